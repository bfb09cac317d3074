"""Memory that chunked log-probabilities save."""

import multiprocessing
from pathlib import Path

import torch

from laminar_lab.bench.report import Row
from laminar_py.learner.losses import token_logprobs

ROWS = "logprob_memory_over_naive"
Sizes = tuple[int, int, int]  # tokens T, entries of the vocabulary V, width H
FULL: Sizes = (8192, 32_768, 512)


def rows(*, sizes: Sizes = FULL) -> list[Row]:
    """Compare the peak of the chunked log-probabilities with the peak of all logits."""
    naive, chunked = (_peak_bytes(naive, sizes) for naive in (True, False))
    tokens, vocab, width = sizes
    setting = (
        f"log-probability and entropy, forward and backward, T {tokens:,}, V {vocab:,}, H {width}, fp32; above"
        " the memory of the inputs"
    )
    return [Row("logprob_memory_over_naive", chunked / naive, "of peak memory", setting)]


def _peak_bytes(naive: bool, sizes: Sizes) -> int:
    """Measure the peak in a new process, which has allocated nothing yet."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure_peak, (naive, sizes))


def _measure_peak(naive: bool, sizes: Sizes) -> int:
    torch.set_num_threads(1)
    tokens, vocab, width = sizes
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    token_logprobs(hidden[:8], weight, labels[:8])[0].sum().backward()  # type: ignore[no-untyped-call]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident_bytes("VmRSS")
    if naive:
        logp = torch.log_softmax(hidden @ weight.t(), dim=-1)
        logprobs, entropy = logp.gather(1, labels[:, None]), -(logp.exp() * logp).sum(-1)
    else:
        logprobs, entropy = token_logprobs(hidden, weight, labels)
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    return _resident_bytes("VmHWM") - before


def _resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{which}:")]
    return 1024 * int(line.split()[1])
