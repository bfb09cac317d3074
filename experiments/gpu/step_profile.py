"""Where a step of the learner spends its time: `python -m experiments.gpu.step_profile WAY`, as `run` calls it.

Kernels of one step by kind, as shares of its wall time; what is left is the GPU waiting for the host. The kernels
that take most are printed too.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.gpu.learner import TINY, WAYS
from experiments.gpu.steps import FULL, WARM_STEPS, GpuStep, open_learner
from laminar_lab.bench.report import Row, log_line, show

KINDS = {  # parts of kernels' names, the first that fits; Triton's tell of all operations in them
    "log-probabilities": ("logsumexp", "arange_div_eq"),
    "attention": ("flash", "fmha", "attn"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas"),
    "optimizer": ("adam", "fusedoptimizer"),
    "elementwise": ("triton",),
    "copies": ("memcpy", "memset", "copy_kernel", "catarray", "chunk", "split_with_sizes"),
}
OTHER = "elementwise"
SHOWN = 40


def kind_of(kernel: str) -> str:
    """Kind of a kernel, by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), OTHER)


def measure(folder: Path, size: GpuStep, *, device_type: str) -> tuple[float, Counter[str], Counter[str]]:
    """Seconds of a step, and of its kernels the microseconds by name, and the calls."""
    activity = ProfilerActivity.CUDA if device_type == "cuda" else ProfilerActivity.CPU
    with open_learner(folder, size, device_type=device_type) as learner:
        batches = size.batches()
        for _ in range(WARM_STEPS + 1):
            began = time.perf_counter()
            learner.step(batches)
            step_s = time.perf_counter() - began  # without the profiler, which slows the host
        with profile(activities=[activity]) as found:
            learner.step(batches)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in found.events() or []:
        if device_type == "cpu" or event.device_type == torch.autograd.DeviceType.CUDA:
            spent[event.name] += event.time_range.elapsed_us()
            calls[event.name] += 1
    return step_s, spent, calls


def rows(step_s: float, spent: Counter[str], setting: str) -> Iterable[Row]:
    """Shares of the step by kind."""
    kinds: Counter[str] = Counter()
    for name, micros in spent.items():
        kinds[kind_of(name)] += micros / 1e6
    for kind, seconds in kinds.most_common():
        yield Row(f"step_share_{kind}", seconds / step_s, "of a step's time", f"{seconds:.3f} s; {setting}")
    idle = max(0.0, 1 - sum(kinds.values()) / step_s)
    yield Row("step_share_idle", idle, "of a step's time", f"a step took {step_s:.3f} s; {setting}")


def main() -> None:
    """Measure, print the kernels, and the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--dry", action="store_true", help="a tiny model on a CPU")
    args = parser.parse_args()
    size, device_type = (TINY, "cpu") if args.dry else (FULL, "cuda")
    size = replace(size, settings=WAYS[args.way])
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        step_s, spent, calls = measure(Path(folder), size, device_type=device_type)
    for name, micros in spent.most_common(SHOWN):
        log_line(f"{micros / 1e3:9.1f} ms {calls[name]:6} x {name:.150}")
    name = "a CPU" if device_type == "cpu" else torch.cuda.get_device_name()
    show("gpu", list(rows(step_s, spent, f"{name}, {args.way}")), as_json=True)


if __name__ == "__main__":
    main()
