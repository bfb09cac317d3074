"""MFU of learner steps on a GPU, and packed varlen attention against padded SDPA.

`python experiments/gpu/run.py [--json] [--tokens 32768] [--repeats 5]` needs one CUDA device, no network, no data:
a Qwen3 of 1.5B parameters with random weights trains on random tokens of log-normal lengths.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from laminar_py.algorithm import AlgorithmConfig
from laminar_py.bench.learner_parts import draw_lengths, make_trajectory, pack_here
from laminar_py.bench.report import Row, show
from laminar_py.config import LearnerConfig, ModelConfig, Recompute
from laminar_py.learner.attention import choose_kernel, torch_varlen
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.step import Learner
from laminar_py.types import MicroBatch

MODEL = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1536,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=8960,
    tie_word_embeddings=True,
)
MEANS = {
    "all": LearnerConfig(recompute=Recompute.ALL),
    "all_compiled": LearnerConfig(recompute=Recompute.ALL, compile=True),
    "selective": LearnerConfig(recompute=Recompute.SELECTIVE),
    "selective_compiled": LearnerConfig(recompute=Recompute.SELECTIVE, compile=True),
}
MEDIAN = 1600  # tokens; p95 is 5 times that


def write_model(folder: Path) -> Path:
    """Weights in bf16 from a fixed seed; the learner's masters are fp32."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODEL, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def draw_batches(tokens: int, *, count: int) -> list[MicroBatch]:
    """`count` microbatches of at most `tokens` tokens, filled with whole sequences."""
    out: list[MicroBatch] = []
    for seed in range(count):
        lengths: list[int] = []
        for length in draw_lengths(1000, median=MEDIAN, seed=seed, longest=tokens // 2):
            if sum(lengths) + length > tokens:
                break
            lengths.append(length)
        items = [make_trajectory(i, length, vocab=MODEL.vocab_size) for i, length in enumerate(lengths)]
        out += pack_here(items, max_tokens=tokens)
    return out


def mfu_rows(folder: Path, *, tokens: int, repeats: int) -> list[Row]:
    """MFU and peak memory of a step of two microbatches, for each way to save memory that has room."""
    mesh = join_group(str(folder / "rendezvous"), rank=0, world_size=1, device_type="cuda")
    batches, rows = draw_batches(tokens, count=2), []
    shape = f"1.5B, bf16, 2 microbatches of {tokens:,} tokens, {choose_kernel(torch.device('cuda'))}"
    for name, settings in MEANS.items():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        learner = Learner(
            ModelConfig(path=folder / "model"), settings, AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh
        )
        setting = f"{shape}, recompute {name}"
        try:
            steps = [learner.step(batches) for _ in range(repeats + 1)][1:]  # the first one compiles and allocates
        except torch.OutOfMemoryError:
            rows.append(Row(f"fits_{name}", 0, "of 1", f"{setting}: out of memory"))
            continue
        mfu = [step.mfu for step in steps if step.mfu is not None]
        speed = statistics.median(step.tokens_per_s for step in steps)
        rows.append(Row(f"tokens_per_s_{name}", speed, "tokens/s", setting))
        if mfu:
            rows.append(Row(f"mfu_{name}", statistics.median(mfu), "of the device's dense bf16 peak", setting))
        rows.append(Row(f"memory_{name}", torch.cuda.max_memory_allocated() / 2**30, "GiB", setting))
        del learner
    leave_group()
    return rows


def attention_row(tokens: int, *, repeats: int) -> Row:
    """Forward and backward of one layer's attention on the same sequences, padded over packed."""
    lengths = draw_batches(tokens, count=1)[0].lengths
    heads, groups, size = MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.head_dim
    packed = [_random(sum(lengths), heads_, size) for heads_ in (heads, groups, groups)]
    padded = [_random(len(lengths), heads_, max(lengths), size) for heads_ in (heads, groups, groups)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()

    def varlen() -> Tensor:
        return torch_varlen(packed[0], packed[1], packed[2], cu_seqlens, max(lengths), None)

    def sdpa() -> Tensor:
        # Right padding needs no mask: what is causal never looks there.
        return F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True)

    ratios = [_seconds(sdpa) / _seconds(varlen) for _ in range(repeats + 1)][1:]
    setting = f"{len(lengths)} log-normal sequences, {tokens:,} tokens, {heads} heads, forward and backward"
    return Row("padded_sdpa_over_varlen", statistics.median(ratios), "x, time", setting)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _seconds(work: Callable[[], Tensor]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work().sum().backward()  # type: ignore[no-untyped-call]
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--tokens", type=int, default=32_768, help="of a microbatch")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "run.py: no CUDA device; run it on a machine with a GPU\n")
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        write_model(Path(folder) / "model")
        rows = mfu_rows(Path(folder), tokens=args.tokens, repeats=args.repeats)
    rows.append(attention_row(args.tokens, repeats=args.repeats))
    device = torch.cuda.get_device_name()
    rows = [msgspec.structs.replace(row, conditions=f"{device}; {row.conditions}") for row in rows]
    show("gpu", rows, as_json=args.json)


if __name__ == "__main__":
    main()
