"""Visit 4, attention kernels against float32 SDPA: `python -m experiments.gpu.kernels HEADS/KV_HEADS [--dry]`.

Each kernel of the learner attends in bf16 over one sequence and over packed log-normal sequences, forward and
backward. An error is the norm of the difference from SDPA in float32, over the norm. A kernel that raises, e.g.
since it is not installed, has a row that says so. `padding` compares padded SDPA with the learner's kernel on the
same sequences.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.gpu.learner import kernel_of
from experiments.gpu.steps import FULL, SIGMA
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.workplace import log_normal_lengths
from laminar_py.learner.attention import KERNELS, Segments, VarlenKernel, activate

HEAD_DIM, REPEATS = 128, 5
PADDING = "padding"
FORWARD_AND_BACKWARD = 3.5  # work of both over the forward pass, which the backward pass repeats


def packings(*, longest: int) -> list[list[int]]:
    """Sequence lengths of the packed rows: one sequence, short and long, and many."""
    many = log_normal_lengths(np.random.default_rng(0), 64, median=longest / 20, sigma=SIGMA, cap=longest // 2)
    total, packed = 0, []
    for length in many:
        if total + length <= longest:
            packed.append(length)
            total += length
    return [[longest // 8], [longest // 2], [longest], packed]


def inputs(lengths: Sequence[int], heads: int, groups: int, device: str) -> list[Tensor]:
    """Random q, k, v and gradient of the output, [tokens, heads, size] in bf16."""
    generator = torch.Generator().manual_seed(0)
    block = torch.randn((sum(lengths), max(heads, groups), HEAD_DIM), generator=generator).to(
        device, torch.bfloat16
    )
    return [
        block.roll(place, 0)[:, :count].contiguous() for place, count in enumerate((heads, groups, groups, heads))
    ]


def exact(tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Output and gradients of SDPA in float32, sequence by sequence, heads of keys repeated."""
    times = tensors[0].shape[1] // tensors[1].shape[1]
    results: list[list[Tensor]] = [[], [], [], []]
    for parts in zip(*(tensor.split(list(lengths)) for tensor in tensors), strict=True):
        q, k, v = (part.float().requires_grad_() for part in parts[:3])
        repeated = [q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)]
        output = F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in repeated), is_causal=True)
        output = output[0].transpose(0, 1)
        gradients = torch.autograd.grad(output, (q, k, v), parts[3].float())
        for kept, found in zip(results, (output.detach(), *gradients), strict=True):
            kept.append(found)
    return [torch.cat(kept) for kept in results]


def attend(kernel: VarlenKernel, tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
    """Output and gradients of a kernel."""
    q, k, v = (tensor.detach().requires_grad_() for tensor in tensors[:3])
    output = kernel(q, k, v, Segments.of(lengths, device=q.device), HEAD_DIM**-0.5)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), tensors[3])]


def kernel_rows(heads: int, groups: int, *, longest: int, device: str) -> list[Row]:
    """Errors and speed of each kernel on each packing; one row for a kernel that raises."""
    rows: list[Row] = []
    kernels = dict(KERNELS)
    for lengths in packings(longest=longest):
        tensors = inputs(lengths, heads, groups, device)
        wanted = exact(tensors, lengths)
        kind = "one sequence" if len(lengths) == 1 else f"{len(lengths)} log-normal sequences"
        what = f"{kind}, {sum(lengths):,} tokens, {heads}/{groups} heads of {HEAD_DIM}, bf16, {device}"
        for name, kernel in list(kernels.items()):
            label = f"{name}_{'packed' if len(lengths) > 1 else 'one'}_{sum(lengths)}"
            try:
                activate(name)
                rows += measured_rows(label, kernel, tensors, lengths, wanted, what)
            except Exception as error:  # noqa: BLE001 - kernels of other packages raise anything
                fault = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                rows.append(Row(f"{label}_forward_error", None, "", f"not run: {fault}; {what}"))
                del kernels[name]
    return rows


def measured_rows(
    label: str,
    kernel: VarlenKernel,
    tensors: Sequence[Tensor],
    lengths: Sequence[int],
    wanted: Sequence[Tensor],
    what: str,
) -> list[Row]:
    """Errors and speed of one kernel. Raises whatever the kernel raises."""
    device, heads = tensors[0].device.type, tensors[0].shape[1]
    found = attend(kernel, tensors, lengths)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True)]
    rounds = REPEATS if device == "cuda" else 1
    seconds = statistics.median(
        seconds_of(lambda: attend(kernel, tensors, lengths), device) for _ in range(rounds)
    )
    flops = FORWARD_AND_BACKWARD * sum(2.0 * n * n * heads * HEAD_DIM for n in lengths)
    return [
        Row(f"{label}_forward_error", errors[0], "of the norm", what),
        Row(f"{label}_gradient_error", max(errors[1:]), "of the norm, the worst of q, k, v", what),
        Row(f"{label}_ms", 1000 * seconds, "ms, both passes", f"{flops / seconds / 1e12:.4g} TFLOP/s; {what}"),
    ]


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Seconds of a call, its kernels included."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def padding_row() -> Row:
    """Forward and backward of one layer's attention on the same sequences, padded over packed, in turns."""
    lengths = replace(FULL, sequences=16).lengths(0)
    heads, groups, size = FULL.model.num_attention_heads, FULL.model.num_key_value_heads, FULL.model.head_dim
    packed = [_random(sum(lengths), count, size) for count in (heads, groups, groups)]
    padded = [_random(len(lengths), count, max(lengths), size) for count in (heads, groups, groups)]
    segments = Segments.of(lengths, device=torch.device("cuda"))
    kernel = kernel_of(FULL.model, torch.device("cuda"))

    def varlen() -> None:
        KERNELS[kernel](packed[0], packed[1], packed[2], segments, None).sum().backward()

    def sdpa() -> None:
        # Padding on the right needs no mask: what is causal never looks there.
        F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=True).sum().backward()

    ratios = [seconds_of(sdpa, "cuda") / seconds_of(varlen, "cuda") for _ in range(REPEATS + 1)][1:]
    setting = f"{len(lengths)} log-normal sequences, {sum(lengths):,} tokens, {heads} heads, {kernel}, both ways"
    return Row("padded_sdpa_over_varlen", statistics.median(ratios), "x, time", setting)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def main() -> None:
    """Measure kernels and print the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", choices=["28/4", "64/8", PADDING], help="heads of queries, of keys and values")
    parser.add_argument("--dry", action="store_true", help="128 tokens on a CPU")
    args = parser.parse_args()
    if args.heads == PADDING:
        rows = [padding_row()]
    else:
        heads, groups = map(int, args.heads.split("/"))
        rows = kernel_rows(
            heads, groups, longest=128 if args.dry else 32_768, device="cpu" if args.dry else "cuda"
        )
    show("gpu", rows, as_json=True)


if __name__ == "__main__":
    main()
