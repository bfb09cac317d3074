"""What packing and chunked log-probabilities save: rows `packed_over_*` and `logprob_memory_over_naive`."""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from laminar_py.bench.learner_parts import (
    MAX_TOKENS,
    draw_lengths,
    gradient,
    make_learner,
    make_trajectory,
    pack_here,
)
from laminar_py.bench.models import write_model
from laminar_py.bench.report import Row
from laminar_py.learner.losses.logprob import token_logprobs
from laminar_py.learner.step import Learner
from laminar_py.records.trajectory import Trajectory

PADDED_ROWS = 8


def throughput_rows(
    folder: Path, *, config: PretrainedConfig, sequences: int, median: int, repeats: int
) -> list[Row]:
    """Real tokens a CPU second, packed and padded, in turns."""
    model = write_model(folder / "speed", config)
    learner, plain = make_learner(model), _plain(model)
    packed, padded, ordered = [], [], []
    for repeat in range(repeats):
        lengths = draw_lengths(sequences, median=median, seed=repeat)
        items = [make_trajectory(index, length, vocab=config.vocab_size) for index, length in enumerate(lengths)]
        tokens = sum(lengths)
        by_length = sorted(items, key=lambda item: item.num_tokens)
        packed.append(tokens / _cpu_s(partial(_train_packed, learner, items)))
        padded.append(tokens / _cpu_s(partial(_train_padded, plain, items)))
        ordered.append(tokens / _cpu_s(partial(_train_padded, plain, by_length)))
    setting = (
        f"forward and backward, {sequences} log-normal lengths (median {median}, p95 5 times that),"
        f" 25M parameters, fp32; padded: {PADDED_ROWS} rows each to its longest; median of {repeats} batches"
    )
    return [
        Row("packed_tokens_per_s", statistics.median(packed), "real tokens/CPU-s", setting),
        Row("packed_over_padded", _over(packed, padded), "x, in order of arrival", setting),
        Row("packed_over_sorted", _over(packed, ordered), "x, padded rows sorted by length", setting),
    ]


def _train_packed(learner: Learner, items: Sequence[Trajectory]) -> None:
    gradient(learner, pack_here(items, max_tokens=MAX_TOKENS))


def _train_padded(model: PreTrainedModel, items: Sequence[Trajectory]) -> None:
    """The same loss on rows that are filled up to the longest of them."""
    for first in range(0, len(items), PADDED_ROWS):
        rows = items[first : first + PADDED_ROWS]
        longest = max(item.num_tokens for item in rows)
        ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
        weights = torch.zeros(len(rows), longest)
        for row, item in enumerate(rows):
            both = np.concatenate([item.prompt_ids, item.response_ids])
            ids[row, : len(both)], mask[row, : len(both)] = torch.tensor(both), 1
            weights[row, len(item.prompt_ids) - 1 : len(both) - 1] = 1
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        labels = torch.roll(ids, -1, dims=1).flatten()
        head = model.get_output_embeddings().weight
        logprobs, _ = token_logprobs(hidden.flatten(0, 1), head, labels)
        (weights.flatten() * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _over(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def memory_row(sizes: tuple[int, int, int]) -> Row:
    """Peak of the chunked log-probabilities over that of all logits, for T tokens, V entries and width H."""
    tokens, vocab, width = sizes
    naive, chunked = (_peak_bytes(naive, sizes) for naive in (True, False))
    setting = (
        f"log-probability and entropy, forward and backward, T {tokens:,}, V {vocab:,}, H {width}, fp32; above"
        " what the inputs take"
    )
    return Row("logprob_memory_over_naive", chunked / naive, "of peak memory", setting)


def _peak_bytes(naive: bool, sizes: tuple[int, int, int]) -> int:
    """In a process of its own, which has allocated nothing yet."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measure_peak, (naive, sizes))


def _measure_peak(naive: bool, sizes: tuple[int, int, int]) -> int:
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
