"""Learner steps of a Qwen3 of 1.5B parameters: speed, MFU, and memory over the formula of `laminar doctor`.

`python -m experiments.gpu.learner WAY [--cpu]` in the project's folder, as `run` calls it; a way to save memory or
time is one of `WAYS`, or `attention`: one layer's, padded SDPA over the packed kernel. Random weights train on
random tokens of log-normal lengths, in microbatches of 32k tokens; with `--cpu` a tiny model, without figures of a
GPU.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config

from experiments.gpu.steps import FULL, UNIT, GpuStep, measure_steps
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.workplace import count_parameters
from laminar_lab.doctor.memory import learner_parts
from laminar_lab.model_shape import read_shape
from laminar_py.config.learner import Accumulate, Attention, LearnerConfig, Recompute
from laminar_py.config.loading import parse_config
from laminar_py.learner.attention import KERNELS
from laminar_py.learner.kernel_check import choose_kernel

WAYS = {
    "selective": LearnerConfig(recompute=Recompute.SELECTIVE),
    "all": LearnerConfig(recompute=Recompute.ALL),
    "selective_compiled": LearnerConfig(recompute=Recompute.SELECTIVE, compile=True),
    "all_compiled": LearnerConfig(recompute=Recompute.ALL, compile=True),
    "offload": LearnerConfig(recompute=Recompute.ALL, offload=True),
    "offload_whole": LearnerConfig(recompute=Recompute.ALL, offload=True, accumulate=Accumulate.WHOLE),
}
TINY = replace(
    FULL,
    model=Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=True,
    ),
    sequences=4,
    median=16,
    max_tokens=64,
    steps=1,
)
ATTENTION, REPEATS = "attention", 5


def step_rows(way: str, size: GpuStep, *, device_type: str, folder: Path) -> list[Row]:
    """Speed of whole steps, and on a GPU MFU and memory; without values if the way has no room."""
    size = replace(size, settings=WAYS[way])
    device = torch.device(device_type)
    setting = (
        f"{_name(device)}, {count_parameters(size.model) / 1e9:.2g}G parameters, {size.sequences} log-normal"
        f" sequences in microbatches of at most {size.max_tokens:,} tokens, {kernel_of(size.model, device)}, {way}"
    )
    try:
        steps = measure_steps(folder, size, device_type=device_type)
    except torch.OutOfMemoryError:
        return [Row(f"tokens_per_s_{way}", None, "tokens/s", f"out of memory; {setting}")]
    speed = statistics.median(step.tokens_per_s for step in steps)
    rows = [Row(f"tokens_per_s_{way}", speed, "tokens/s", f"{setting}, median of {len(steps)} steps")]
    if device_type == "cpu":
        return rows
    found = [step.mfu for step in steps if step.mfu is not None]
    peak, expected = torch.cuda.max_memory_allocated(), expected_bytes(folder / "model", size)
    formula = f"{expected / 1e9:.1f} GB by the formula, without what CUDA takes; {setting}"
    return [
        *rows,
        Row(f"mfu_{way}", statistics.median(found) if found else None, UNIT, f"recomputation no work; {setting}"),
        Row(f"memory_{way}", peak / 1e9, "GB at the peak", setting),
        Row(f"memory_over_formula_{way}", peak / expected, "x", formula),
    ]


def expected_bytes(model: Path, size: GpuStep) -> float:
    """Peak of a step by the formula of `laminar doctor`, without what CUDA takes."""
    config = parse_config(
        {
            "name": "gpu",
            "steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "prompts.jsonl"},
            "reward": {"use": ["rewards.py:score"]},
            "cluster": {"learner_device": "cuda"},
            "packer": {"max_tokens": size.max_tokens},
            "learner": size.settings.model_dump(mode="json", exclude_unset=True),
        }
    )
    shape = read_shape(model)
    assert shape is not None, f"{model} has a shape"
    return sum(learner_parts(shape, config).values())


def attention_row(*, repeats: int) -> Row:
    """Forward and backward of one layer's attention on the same sequences, padded over packed, in turns."""
    lengths = replace(FULL, sequences=16).lengths(0)
    heads, groups, size = FULL.model.num_attention_heads, FULL.model.num_key_value_heads, FULL.model.head_dim
    packed = [_random(sum(lengths), count, size) for count in (heads, groups, groups)]
    padded = [_random(len(lengths), count, max(lengths), size) for count in (heads, groups, groups)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    kernel = kernel_of(FULL.model, torch.device("cuda"))

    def varlen() -> Tensor:
        return KERNELS[kernel](packed[0], packed[1], packed[2], cu_seqlens, max(lengths), None)

    def sdpa() -> Tensor:
        # Padding on the right needs no mask: what is causal never looks there.
        return F.scaled_dot_product_attention(padded[0], padded[1], padded[2], is_causal=True, enable_gqa=True)

    ratios = [_seconds(sdpa) / _seconds(varlen) for _ in range(repeats + 1)][1:]
    setting = f"{len(lengths)} log-normal sequences, {sum(lengths):,} tokens, {heads} heads, {kernel}, both ways"
    return Row("padded_sdpa_over_varlen", statistics.median(ratios), "x, time", setting)


def kernel_of(model: Qwen3Config, device: torch.device) -> Attention:
    """Choose and activate the kernel that a learner of this model uses."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": model.head_dim}
    return choose_kernel(Attention.AUTO, device=device, **sizes).kernel


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _seconds(work: Callable[[], Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work().sum().backward()  # type: ignore[no-untyped-call]
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def _name(device: torch.device) -> str:
    return "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def main() -> None:
    """Measure one way and print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=[*WAYS, ATTENTION])
    parser.add_argument("--cpu", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # AdamW of what is offloaded
    if args.way == ATTENTION:
        rows = [attention_row(repeats=REPEATS)]
    else:
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            size, device_type = (TINY, "cpu") if args.cpu else (FULL, "cuda")
            rows = step_rows(args.way, size, device_type=device_type, folder=Path(folder))
    show("gpu", rows, as_json=True)


if __name__ == "__main__":
    main()
