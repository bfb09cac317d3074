"""Fill, balance over ranks, and the cost of packing a stream.

Fill is the fewest microbatches that equal counts on all ranks allow, `ranks * ceil(tokens / (ranks *
max_tokens))`, over the used ones. Imbalance is the sum over microbatch indices of the slowest rank's FLOPs, over
the mean of the ranks, since collectives make every index a barrier.
"""

import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar_lab.bench.lengths import log_normal_lengths
from laminar_lab.bench.report import Row, load_now
from laminar_py.config.algorithm import Aggregation
from laminar_py.learner.packing import (
    Packed,
    PackedT,
    StreamPacker,
    assign_bins,
    attention_share,
    microbatches,
    pack,
    sequence_cost,
    step_terms,
)
from laminar_py.records import FinishReason, Trajectory
from laminar_py.records.pieces import PieceRef, TokensRef
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import Kind, TrajectoryRef

ROWS = ("fill", "capacity_used", "imbalance", "pack_2048_ms", "stream_us", "ready_ms")
MAX_TOKENS = 16_384
RANKS = 8
SEQUENCES = 2048
PROMPT = 400
QWEN_7B = attention_share(hidden_size=3584, num_layers=28, num_parameters=7_615_616_512)


def draw_lengths(seed: int, count: int) -> list[int]:
    """Draw lengths of prompt and response together."""
    rng = np.random.default_rng(seed)
    return log_normal_lengths(rng, count, median=2048, cap=MAX_TOKENS, least=2)


def make_trajectories(lengths: Sequence[int], *, prompt: int = PROMPT) -> list[Trajectory]:
    """Make finished trajectories of these lengths, with their prompts; all share the memory of their tokens."""
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
    """Quality of a packing, in shares."""

    fill: float  # lower bound of microbatches over the used ones
    capacity: float  # tokens over the capacity of the used microbatches
    imbalance: float


def quality(packed: Packed[PackedT], *, max_tokens: int) -> PackingQuality:
    """Compute fill, use of capacity and imbalance of a packed step."""
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


def by_reference(trajectories: Iterable[Trajectory]) -> list[TrajectoryRef]:
    """Make the controller's view of trajectories, each in one piece of a segment."""
    return [
        TrajectoryRef(
            id=trajectory.id,
            prompt_id=trajectory.prompt_id,
            group_id=trajectory.group_id,
            sample_index=trajectory.sample_index,
            kind=trajectory.kind,
            prompt_ids=trajectory.prompt_ids,
            tokens=(
                TokensRef(0, len(trajectory.response_ids), PieceRef("replica-3-1-17.18f2a.9e41", 0, 1, bytes(16))),
            ),
            num_trained=len(trajectory.response_ids),
            spans=trajectory.spans,
            finish_reason=trajectory.finish_reason,
            reward=trajectory.reward,
        )
        for trajectory in trajectories
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


def rows(*, sequences: int = SEQUENCES, seeds: int = 100) -> list[Row]:
    """Measure whole steps, and sequences that arrive one by one on a fifth of `seeds`."""
    streamed = stream_rows(sequences=sequences, seeds=max(1, seeds // 5))
    return [*step_rows(sequences=sequences, seeds=seeds), *streamed]


def step_rows(*, sequences: int, seeds: int) -> list[Row]:
    """Measure whole steps."""
    found, times = [], []
    for seed in range(seeds):
        trajectories = make_trajectories(draw_lengths(seed, sequences))
        began = time.perf_counter()
        packed = pack_here(trajectories)
        times.append(time.perf_counter() - began)
        found.append(quality(packed, max_tokens=MAX_TOKENS))
    setting = (
        f"{sequences} log-normal lengths (median 2,048, sigma 0.99, cap 16,384), {MAX_TOKENS} tokens a"
        f" microbatch, {RANKS} ranks, 7B coefficients, median of {seeds} seeds, {load_now()}"
    )
    planning = f"{setting}; planning alone, since the ranks write the arrays"
    return [
        Row("fill", statistics.median(q.fill for q in found), "of lower bound", setting),
        Row("capacity_used", statistics.median(q.capacity for q in found), "of tokens", setting),
        Row("imbalance", statistics.median(q.imbalance for q in found), "slowest/mean", setting),
        Row("pack_2048_ms", statistics.median(times) * 1e3, "ms", planning),
    ]


def stream_rows(*, sequences: int, seeds: int) -> list[Row]:
    """Measure sequences that arrive one by one: seconds to add each, and to write the arrays at the end."""
    runs = [_pack_stream(make_trajectories(draw_lengths(seed, sequences))) for seed in range(seeds)]
    setting = (
        f"{sequences} sequences as for fill, one by one, {RANKS} ranks, median of {seeds} seeds, {load_now()}"
    )
    added_s, ready_s, written_s = (statistics.median(times) for times in zip(*runs, strict=True))
    each, added = 1e6 * (added_s + written_s) / sequences, 1e6 * added_s / sequences
    first = f"from the learner's request to the arrays of the first microbatch; {setting}"
    return [
        Row("stream_us", each, "us/sequence", f"added in {added:.1f} us, and arrays written; {setting}"),
        Row("ready_ms", 1e3 * ready_s, "ms", first),
    ]


def _pack_stream(trajectories: Sequence[Trajectory]) -> tuple[float, float, float]:
    """Return seconds to add all sequences, from then to the first microbatch, and from there to the last one."""
    whole, references = {trajectory.id: trajectory for trajectory in trajectories}, by_reference(trajectories)
    stream, began = StreamPacker(max_tokens=MAX_TOKENS), time.perf_counter()
    for reference in references:
        stream.add(reference)
    added = time.perf_counter()
    bins = stream.bins()
    terms = step_terms(bins, aggregation=Aggregation.SEQUENCE_MEAN)
    packed = assign_bins(bins, terms, max_tokens=MAX_TOKENS, ranks=RANKS, attention_share=QWEN_7B)
    bundles = [[[whole[trajectory.id] for trajectory in bundle] for bundle in mine] for mine in packed.bundles]
    microbatches(bundles[0], terms)[0]
    ready = time.perf_counter()
    for rank in range(RANKS):
        for _ in microbatches(bundles[rank], terms):
            continue  # each is freed before the next is written, as in the learner
    return added - began, ready - added, time.perf_counter() - ready
