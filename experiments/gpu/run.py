"""MFU of learner steps on a GPU by what saves memory, and packed varlen attention against padded SDPA.

`python experiments/gpu/run.py [--json] [--repeats 5]` needs one CUDA device, no network, no data: a Qwen3 of 1.5B
parameters with random weights trains on random tokens of log-normal lengths, in microbatches of 32k tokens.
"""

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from laminar_py.bench.learner.mfu import FULL, measure_steps
from laminar_py.bench.learner.parts import draw_lengths
from laminar_py.bench.report import Row, show
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner.attention import KERNELS, choose_kernel, register_kernel

WAYS = {
    "all": LearnerConfig(recompute=Recompute.ALL),
    "all_compiled": LearnerConfig(recompute=Recompute.ALL, compile=True),
    "selective": LearnerConfig(recompute=Recompute.SELECTIVE),
    "selective_compiled": LearnerConfig(recompute=Recompute.SELECTIVE, compile=True),
}


def step_rows(way: str, folder: Path, *, repeats: int) -> list[Row]:
    """MFU, speed and peak memory of whole steps; without values if the way has no room."""
    size = replace(FULL, settings=WAYS[way], steps=repeats)
    device, kernel = torch.cuda.get_device_name(), choose_kernel(torch.device("cuda"))
    setting = f"{device}, 1.5B, bf16, microbatches of {size.max_tokens:,} tokens, {kernel}, recompute {way}"
    gc.collect()  # a model refers to itself, so the one before is still there
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        steps = measure_steps(folder, size, device_type="cuda")
    except torch.OutOfMemoryError:
        return [Row(f"mfu_{way}", None, "of the peak of dense bf16", f"out of memory; {setting}")]
    found = [step.mfu for step in steps if step.mfu is not None]
    memory = torch.cuda.max_memory_allocated() / 2**30
    return [
        Row(f"mfu_{way}", statistics.median(found) if found else None, "of the peak of dense bf16", setting),
        Row(f"tokens_per_s_{way}", statistics.median(step.tokens_per_s for step in steps), "tokens/s", setting),
        Row(f"memory_{way}", memory, "GiB at the peak", setting),
    ]


def attention_row(*, repeats: int) -> Row:
    """Forward and backward of one layer's attention on the same sequences, padded over packed, in turns."""
    lengths = draw_lengths(16, median=FULL.median, seed=0, longest=FULL.max_tokens // 2)
    heads, groups, size = FULL.model.num_attention_heads, FULL.model.num_key_value_heads, FULL.model.head_dim
    packed = [_random(sum(lengths), count, size) for count in (heads, groups, groups)]
    padded = [_random(len(lengths), count, max(lengths), size) for count in (heads, groups, groups)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().cuda()

    kernel = choose_kernel(torch.device("cuda"))
    register_kernel(kernel)

    def varlen() -> Tensor:
        return KERNELS[kernel](packed[0], packed[1], packed[2], cu_seqlens, max(lengths), None)

    def sdpa() -> Tensor:
        # Padding on the right needs no mask: what is causal never looks there.
        return F.scaled_dot_product_attention(padded[0], padded[1], padded[2], is_causal=True, enable_gqa=True)

    ratios = [_seconds(sdpa) / _seconds(varlen) for _ in range(repeats + 1)][1:]
    setting = f"{len(lengths)} log-normal sequences, {sum(lengths):,} tokens, {heads} heads, {kernel}, both ways"
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


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "run.py: no CUDA device; run it on a machine with a GPU\n")
    rows = [attention_row(repeats=args.repeats)]
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            rows += step_rows(way, Path(folder), repeats=args.repeats)
    show("gpu", rows, as_json=args.json)


if __name__ == "__main__":
    main()
