"""Fill, balance over ranks, and the cost of packing a stream.

Fill is against the fewest microbatches that equal counts on all ranks allow, ranks * ceil(tokens / (ranks *
max_tokens)). Imbalance is the sum over microbatch indices of the slowest rank's FLOPs, over the mean of the ranks,
since collectives make every index a barrier.
"""

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar_lab.bench.report import Row
from laminar_py.config.algorithm import Aggregation
from laminar_py.learner.packing import (
    Packed,
    PackedT,
    StreamPacker,
    assign_bins,
    attention_share,
    choose_groups,
    microbatches,
    pack,
    sequence_cost,
    step_terms,
)
from laminar_py.records import FinishReason, Trajectory
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import PieceRef, TokensRef
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishedTrajectory, Kind
from laminar_py.runtime.workers import FetchRequest

ROWS = (
    "fill capacity_used imbalance pack_2048_ms stream_fill stream_imbalance stream_us stream_add_us "
    "stream_send_us ready_ms look_ahead_0_capacity_used look_ahead_4_capacity_used look_ahead_8_capacity_used "
    "look_ahead_16_capacity_used"
)
MAX_TOKENS = 16_384
RANKS = 8
SEQUENCES = 2048
PROMPT = 400
QWEN_7B = attention_share(hidden_size=3584, num_layers=28, num_parameters=7_615_616_512)
PEERS = (
    "published by others for the same lengths and budget on 2 cores: slime 15 ms, 97.5 % of capacity over 8 ranks;"
    " AReaL 30 ms, 99.8 %; NeMo-RL 3.4 ms, 99.8 %; prime-rl 1.3 s for 1,024, 98.2 %; verl 0.8 s for 256"
)


def draw_lengths(seed: int, count: int, *, median: float = 2048, cap: int = MAX_TOKENS) -> list[int]:
    """Log-normal lengths, sigma 0.99."""
    normal = np.random.default_rng(seed).standard_normal(count)
    lengths: list[int] = np.clip(np.rint(median * np.exp(0.99 * normal)), 2, cap).astype(int).tolist()
    return lengths


def make_trajectories(lengths: Sequence[int], *, prompt: int = PROMPT) -> list[Trajectory]:
    """Finished trajectories of these lengths, the prompt included; they share the memory of their tokens."""
    ids, logprobs = np.zeros(max(lengths), np.int32), np.zeros(max(lengths), np.float32)
    mask = np.ones(max(lengths), np.bool_)
    out = []
    for index, length in enumerate(lengths):
        first = min(prompt, length // 2)
        count = length - first
        out.append(
            Trajectory(
                id=f"g{index // 8}.{index % 8}",
                prompt_id=f"p{index // 8}",
                group_id=f"g{index // 8}",
                sample_index=index % 8,
                kind=Kind.TRAIN,
                prompt_ids=ids[:first],
                response_ids=ids[:count],
                logprobs=logprobs[:count],
                loss_mask=mask[:count],
                spans=(Span(0, 0, count),),
                finish_reason=FinishReason.STOP,
                reward=1.0,
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class PackingQuality:
    """How good a packing is, in shares."""

    fill: float  # microbatches of the lower bound over those used
    capacity: float  # tokens over the capacity of those used
    imbalance: float


def quality(packed: Packed[PackedT], *, max_tokens: int) -> PackingQuality:
    """Fill, use of capacity and imbalance of a packed step."""
    lengths = [[[t.num_tokens for t in bundle] for bundle in bundles] for bundles in packed.bundles]
    costs = np.array(
        [
            [sum(sequence_cost(n, attention_share=QWEN_7B) for n in bundle) for bundle in bundles]
            for bundles in lengths
        ]
    )
    tokens = sum(sum(bundle) for bundles in lengths for bundle in bundles)
    ranks, used = costs.shape
    bound = -(-tokens // (ranks * max_tokens))
    return PackingQuality(
        fill=bound / used,
        capacity=tokens / (ranks * used * max_tokens),
        imbalance=float(costs.max(axis=0).sum() / costs.sum(axis=1).mean()),
    )


def by_reference(trajectories: Iterable[Trajectory]) -> list[FinishedTrajectory]:
    """Trajectories as the controller has them, each in one piece of a segment."""
    return [
        FinishedTrajectory(
            id=one.id,
            prompt_id=one.prompt_id,
            group_id=one.group_id,
            sample_index=one.sample_index,
            kind=one.kind,
            prompt_ids=one.prompt_ids,
            tokens=(TokensRef(0, len(one.response_ids), PieceRef("replica-3-1-17.18f2a.9e41", 0, 1, bytes(16))),),
            num_trained=len(one.response_ids),
            spans=one.spans,
            finish_reason=one.finish_reason,
            reward=one.reward,
        )
        for one in trajectories
    ]


def pack_here(
    trajectories: Sequence[PackedT], *, max_tokens: int = MAX_TOKENS, ranks: int = RANKS
) -> Packed[PackedT]:
    """Pack a step with the coefficients of a 7B model."""
    return pack(
        trajectories,
        max_tokens=max_tokens,
        ranks=ranks,
        aggregation=Aggregation.SEQUENCE_MEAN,
        attention_share=QWEN_7B,
    )


def rows(*, sequences: int = SEQUENCES, seeds: int = 100, steps: int = 400) -> list[Row]:
    """Whole steps, sequences that come one by one (on a fifth of `seeds`), small steps that look ahead."""
    streamed = stream_rows(sequences=sequences, seeds=max(1, seeds // 5))
    return [*step_rows(sequences=sequences, seeds=seeds), *streamed, *look_ahead_rows(steps=steps)]


def step_rows(*, sequences: int, seeds: int) -> list[Row]:
    """Whole steps at once."""
    found, times = [], []
    for seed in range(seeds):
        trajectories = make_trajectories(draw_lengths(seed, sequences))
        began = time.perf_counter()
        packed = pack_here(trajectories)
        times.append(time.perf_counter() - began)
        found.append(quality(packed, max_tokens=MAX_TOKENS))
    setting = (
        f"{sequences} log-normal lengths (median 2,048, sigma 0.99, cap 16,384), {MAX_TOKENS} tokens a"
        f" microbatch, {RANKS} ranks, 7B coefficients, median of {seeds} seeds, {_others()}"
    )
    compared = f"{setting}; planning alone, arrays are written by the ranks; {PEERS}"
    return [
        Row("fill", statistics.median(q.fill for q in found), "of lower bound", setting),
        Row("capacity_used", statistics.median(q.capacity for q in found), "of tokens", compared),
        Row("imbalance", statistics.median(q.imbalance for q in found), "slowest/mean", setting),
        Row("pack_2048_ms", statistics.median(times) * 1e3, "ms", compared),
    ]


def stream_rows(*, sequences: int, seeds: int) -> list[Row]:
    """Sequences that come one by one."""
    runs = [_stream(make_trajectories(draw_lengths(seed, sequences))) for seed in range(seeds)]
    setting = f"{sequences} sequences as for fill, one by one, {RANKS} ranks, median of {seeds} seeds, {_others()}"
    added = statistics.median(run.added_s for run in runs)
    written = statistics.median(run.written_s for run in runs)
    sent = statistics.median(run.sent_s for run in runs)
    unit, per_sequence = "us/sequence", 1e6 / sequences
    return [
        Row("stream_fill", statistics.median(run.quality.fill for run in runs), "of lower bound", setting),
        Row("stream_imbalance", statistics.median(run.quality.imbalance for run in runs), "slowest/mean", setting),
        Row("stream_us", (added + written) * per_sequence, unit, f"added, and arrays written; {setting}"),
        Row("stream_add_us", added * per_sequence, unit, f"added alone; {setting}"),
        Row(
            "stream_send_us", sent * per_sequence, unit, f"encoded for its rank and decoded, both here; {setting}"
        ),
        Row(
            "ready_ms",
            statistics.median(run.ready_s for run in runs) * 1e3,
            "ms",
            f"from the ask to the arrays of the first microbatch; {setting}",
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """Packing of a stream, and seconds for all its sequences."""

    quality: PackingQuality
    added_s: float
    ready_s: float  # from the ask to the first microbatch
    written_s: float
    sent_s: float


def _stream(trajectories: Sequence[Trajectory]) -> Streamed:
    whole, references = {one.id: one for one in trajectories}, by_reference(trajectories)
    stream, began = StreamPacker(max_tokens=MAX_TOKENS), time.perf_counter()
    for reference in references:
        stream.add(reference)
    asked = time.perf_counter()
    bins = stream.bins()
    terms = step_terms(bins, aggregation=Aggregation.SEQUENCE_MEAN)
    packed = assign_bins(bins, terms, max_tokens=MAX_TOKENS, ranks=RANKS, attention_share=QWEN_7B)
    bundles = [[[whole[one.id] for one in bundle] for bundle in mine] for mine in packed.bundles]
    microbatches(bundles[0], terms)[0]
    ready = time.perf_counter()
    for rank in range(RANKS):
        for _ in microbatches(bundles[rank], terms):
            continue  # each is freed before the next is written, as in the learner
    written = time.perf_counter()
    for mine in packed.bundles:
        decode(FetchRequest, encode(FetchRequest(mine, {})))
    sent = time.perf_counter()
    found = quality(packed, max_tokens=MAX_TOKENS)
    return Streamed(
        quality=found,
        added_s=asked - began,
        ready_s=ready - asked,
        written_s=written - ready,
        sent_s=sent - written,
    )


def look_ahead_rows(*, steps: int) -> list[Row]:
    """Small steps that may choose_groups among the next groups."""
    setting = (
        f"64 trajectories a step (8 groups of 8, lengths as for fill), {RANKS} ranks, {steps} steps, seed 0;"
        " 2 passes at most"
    )
    return [
        Row(f"look_ahead_{window}_capacity_used", _capacity(window, steps=steps), "of tokens", setting)
        for window in (0, 4, 8, 16)
    ]


def _capacity(window: int, *, steps: int, groups: int = 8, max_passes: int = 2) -> float:
    """Tokens over capacity when a step may look `window` groups ahead."""
    lengths = draw_lengths(0, 8 * (steps * groups + window))
    ready = [lengths[start : start + 8] for start in range(0, len(lengths), 8)]
    passes = [0] * len(ready)
    waiting, tokens, used = list(range(len(ready))), 0, 0
    for _ in range(steps):
        seen = waiting[: groups + window]
        places = choose_groups(
            [sum(ready[group]) for group in seen],
            due=[passes[group] >= max_passes for group in seen],
            count=groups,
            unit=RANKS * MAX_TOKENS,
        )
        for place in set(range(places[-1])) - set(places):
            passes[seen[place]] += 1
        taken = {seen[place] for place in places}
        waiting = [group for group in waiting if group not in taken]
        step = [length for group in taken for length in ready[group]]
        tokens += sum(step)
        used += RANKS * len(pack_here(make_trajectories(step)).bundles[0])
    return tokens / (used * MAX_TOKENS)


def _others() -> str:
    """Load of the machine: work of others makes times longer."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
