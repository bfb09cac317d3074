"""Learner steps of a Qwen3 of 1.5B parameters: speed, MFU, and memory over the formula of `laminar doctor`.

`python -m experiments.gpu.learner WAY [--model NAME] [--dry]` in the project's folder, as `run` calls it; a way to
save memory or time is one of `WAYS`. Random weights train on random tokens of log-normal lengths, in microbatches
of 32k tokens. Visit 5 has models of real widths with few layers (`WIDTHS`), so that the states fit one GPU. With
`--dry` the model is tiny, and there are no figures of a GPU.
"""

import argparse
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig

from experiments.gpu.steps import FULL, SEVEN_B, UNIT, GpuStep, measure_steps
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.workplace import count_parameters
from laminar_lab.doctor.memory import learner_parts
from laminar_lab.model_shape import read_shape
from laminar_py.config.learner import Accumulate, Attention, LearnerConfig, Recompute
from laminar_py.config.loading import parse_config
from laminar_py.learner.kernel_check import choose_kernel

WAYS = {
    "selective": LearnerConfig(recompute=Recompute.SELECTIVE),
    "all": LearnerConfig(recompute=Recompute.ALL),
    "selective_compiled": LearnerConfig(recompute=Recompute.SELECTIVE, compile=True),
    "all_compiled": LearnerConfig(recompute=Recompute.ALL, compile=True),
    "offload": LearnerConfig(recompute=Recompute.ALL, offload=True),
    "offload_whole": LearnerConfig(recompute=Recompute.ALL, offload=True, accumulate=Accumulate.WHOLE),
}
SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY = replace(
    FULL,
    model=Qwen3Config(**SMALL, intermediate_size=128, tie_word_embeddings=True),
    sequences=4,
    median=16,
    max_tokens=64,
    steps=1,
)
TINY_MIXTURE = replace(
    TINY, model=Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
)
WIDTHS = {  # real widths with few layers, and the tiny model that stands in with `--dry`
    "7b_10_layers": (
        Qwen2Config(**SEVEN_B, num_hidden_layers=10),
        TINY,
    ),
    "32b_6_layers": (
        Qwen3Config(
            vocab_size=151_936,
            hidden_size=5120,
            num_hidden_layers=6,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=25_600,
            tie_word_embeddings=False,
        ),
        TINY,
    ),
    "30b_a3b_8_layers": (
        Qwen3MoeConfig(
            vocab_size=151_936,
            hidden_size=2048,
            num_hidden_layers=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
        TINY_MIXTURE,
    ),
}


def formula_row(way: str, size: GpuStep, folder: Path) -> Row:
    """Memory that the formula expects of a model, which is not made."""
    size.model.save_pretrained(folder)
    expected = expected_bytes(folder, replace(size, settings=WAYS[way]))
    setting = f"{count_parameters(size.model) / 1e9:.2g}G parameters, {size.max_tokens:,} tokens, {way}"
    return Row(f"memory_formula_{way}", expected / 1e9, "GB by doctor's formula", setting)


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


def _name(device: torch.device) -> str:
    return "a CPU" if device.type == "cpu" else torch.cuda.get_device_name(device)


def kernel_of(model: Qwen2Config | Qwen3Config, device: torch.device) -> Attention:
    """Choose and activate the kernel that a learner of this model uses."""
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    size = getattr(model, "head_dim", None) or model.hidden_size // heads
    return choose_kernel(Attention.AUTO, device=device, heads=heads, kv_heads=groups, head_dim=size).kernel


def main() -> None:
    """Measure one way and print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--model", choices=WIDTHS, help="real widths with few layers; else 1.5B parameters")
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)  # AdamW of what is offloaded
    full, tiny, rows = FULL, TINY, []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        if args.model is not None:
            model, tiny = WIDTHS[args.model]
            full = replace(FULL, model=model)
            rows.append(formula_row(args.way, full, Path(folder) / "shape"))
        size, device_type = (tiny, "cpu") if args.dry else (full, "cuda")
        rows += step_rows(args.way, size, device_type=device_type, folder=Path(folder))
    show("gpu", rows, as_json=True)


if __name__ == "__main__":
    main()
