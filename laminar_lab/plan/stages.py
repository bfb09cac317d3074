"""Closed formulas for a placement: the seconds of each stage, and of the whole step. Pure.

The formulas choose which placements the planner simulates, and `--explain` prints them. Source: the goodput
equation (`laminar_lab.report.mean_step.compose`), with the times of `laminar_lab.step_time`.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from laminar_lab.emulation.settings import EngineTimes, LearnerTimes
from laminar_lab.plan.placements import FleetPlacement, learner_traffic
from laminar_lab.plan.request import Lengths, PlanRequest
from laminar_lab.report.diagnosis import Bottleneck
from laminar_lab.report.mean_step import StageTimes, StepStage, compose
from laminar_lab.step_time import (
    RankTraffic,
    decode_step_s,
    learner_step_s,
    recovered_share,
    token_cost,
)
from laminar_py.config.cluster import LeaseConfig
from laminar_py.config.rollout import Schedule
from laminar_py.learner.packing import RowSize
from laminar_py.records.host import counted

NORM = 6  # order of the norm over an asynchronous step's stages
GRID = 400  # points of an integral over lengths
BATCHES_A_TURN = 4  # most steps of a learner's turn on shared GPUs, without a bound on staleness


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A line of the explanation, e.g. of a learner step."""

    name: str
    text: str  # with numbers in place of names
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEstimate:
    """Stage times of a placement by formula."""

    schedule: Schedule
    times: StageTimes
    freshness_s: float  # shortest step in which the groups that the bound on staleness admits end
    tokens: float  # response tokens of a step
    formulas: tuple[Formula, ...]
    waiting_share: float = 0.0  # of the replicas, which share GPUs with the learner and stop while it computes

    @property
    def step_s(self) -> float:
        """Seconds of a step.

        Generation takes the learner's time longer, for the replicas that stop meanwhile (`sync` has no others).
        Under `async` it is longer than its longest stage where others are nearly as long, since each waits for
        another at times: by a norm whose order fits simulations (experiments/plan), 12 % for two equal stages.
        """
        if self.schedule is not Schedule.ASYNC:
            return compose(self.schedule, self.times)
        times = self.times
        generation_s = times.generation_s + times.weights_s + self.waiting_share * times.learner_s
        stages = np.array([generation_s, times.learner_s, self.freshness_s])
        return float(np.linalg.norm(stages, ord=NORM))

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second."""
        return self.tokens / self.step_s

    @property
    def binds(self) -> Bottleneck:
        """The bottleneck whose resource, if doubled, shortens the step most."""
        return min(_BOTTLENECKS, key=lambda bottleneck: self._relieved(bottleneck).step_s)

    @property
    def binds_next(self) -> Bottleneck:
        """The bottleneck that binds after the first bottleneck is gone."""
        relieved = self._relieved(self.binds, 1e9)
        others = [bottleneck for bottleneck in _BOTTLENECKS if bottleneck is not self.binds]
        return min(others, key=lambda bottleneck: relieved._relieved(bottleneck).step_s)

    def _relieved(self, bottleneck: Bottleneck, times: float = 2.0) -> "PlacementEstimate":
        """Return the estimate with `times` as much of a bottleneck's resource."""
        if bottleneck is Bottleneck.FRESHNESS:
            return replace(self, freshness_s=self.freshness_s / times)
        return replace(self, times=self.times.faster(StepStage(bottleneck.value), times))


@dataclass(frozen=True, slots=True)
class ReplicaRates:
    """Speed of one replica on responses of these lengths."""

    times: EngineTimes
    lengths: Lengths

    def full_tokens_per_s(self, running: float) -> float:
        """Return the response tokens per second of a replica that always decodes `running` sequences.

        Prefill is taken off.
        """
        lengths = self.lengths
        decode_s = lengths.mean * decode_step_s(self.times, running, lengths.mean_context) / running
        return float(lengths.mean / (decode_s + lengths.prompt / self.times.prefill_tokens_per_s))

    def batch_s(self, running: float, until: float) -> float:
        """Return the seconds of `running` responses that start together; the longest has `until` tokens."""
        generated = np.linspace(0.0, until, GRID)
        left = 1.0 - np.searchsorted(self.lengths.quantiles, generated, side="left") / len(self.lengths.quantiles)
        steps = decode_step_s(self.times, running * left, self.lengths.prompt + generated)
        prefill_s = running * self.lengths.prompt / self.times.prefill_tokens_per_s
        return float(np.trapezoid(steps, generated)) + prefill_s

    def tail_s(self, running: float) -> float:
        """Return the seconds from the last admission to the last end; responses are at random places by then."""
        quantiles = self.lengths.quantiles
        remaining = np.linspace(0.0, quantiles[-1], GRID)
        sums = np.append(np.cumsum(quantiles[::-1])[::-1], 0.0)  # of all quantiles from each on
        first = np.searchsorted(quantiles, remaining)
        beyond = (sums[first] - remaining * (len(quantiles) - first)) / len(quantiles)  # E[(X - r)+]
        left = running * beyond / self.lengths.mean
        busy = left >= 0.5  # below half a sequence the replica is empty
        steps = decode_step_s(self.times, left[busy], self.lengths.mean_context + remaining[busy])
        return float(np.trapezoid(steps, remaining[busy]))


def estimate(request: PlanRequest, placement: FleetPlacement) -> PlacementEstimate:
    """Estimate the stage times of a placement."""
    profile = request.profile(placement.tensor_parallel)
    rates = ReplicaRates(profile.engine, request.lengths)
    learner_s, trained = _train_step(request, placement, profile.learner)
    freshness_s: float = 0.0
    aged: tuple[Formula, ...] = ()
    if placement.schedule is Schedule.ASYNC:
        cycle = _drain_cycle(request, placement, rates)
        if placement.shared:
            generation_s, generated = _generate_in_turns(request, placement, rates, cycle)
            weights_s, moved = _hand_over(request, placement, rates, cycle, generation_s=generation_s)
        else:
            generation_s, generated = _generate_async(request, placement, rates, cycle)
            weights_s, moved = _load_between_batches(request, placement, rates, cycle)
        is_shared = placement.shared > 0
        freshness_s, aged = _freshness(request, rates, cycle, learner_s=learner_s, is_shared=is_shared)
    else:
        generation_s, generated = _generate_batch(request, placement, rates)
        weights_s, moved = _wait_for_weights(
            request, placement.schedule, rates, generation_s=generation_s, learner_s=learner_s
        )
        if placement.shared:  # with no response under way, a hand-over takes its own time alone
            weights_s += 2 * profile.engine.hand_over_s
    times = StageTimes(generation_s=generation_s, learner_s=learner_s, weights_s=weights_s)
    estimated = PlacementEstimate(
        schedule=placement.schedule,
        times=times,
        freshness_s=freshness_s,
        tokens=request.trajectories_per_step * request.lengths.mean,
        formulas=(*generated, *trained, *moved, *aged),
        waiting_share=placement.shared / placement.replicas,
    )
    goodput = Formula(
        name="goodput",
        text=f"{request.trajectories_per_step:,} responses x {request.lengths.mean:,.0f} tokens /"
        f" {estimated.step_s:.1f} s ({placement.schedule}: {_COMPOSED[placement.schedule]})",
        result=f"{estimated.tokens_per_s:,.0f} tokens/s",
    )
    return replace(estimated, formulas=(*estimated.formulas, goodput))


_COMPOSED = {
    Schedule.SYNC: "generation + learner + weights",
    Schedule.ONE_STEP: "max(generation, learner) + weights",
    Schedule.ASYNC: "the longest of generation + weights, learner and freshness, and more where two are alike",
}
_BOTTLENECKS = (Bottleneck.GENERATION, Bottleneck.LEARNER, Bottleneck.WEIGHTS, Bottleneck.FRESHNESS)
_Stage = tuple[float, tuple[Formula, ...]]  # seconds, and their explanation


class ReplicaCycle(NamedTuple):
    """Work of a draining replica under one version, e.g. `ReplicaCycle(683.0, 256.0, 271.0)`."""

    admitted: float  # responses
    running: float  # responses decoded at a time
    seconds: float  # until the last response ends


def _drain_cycle(request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates) -> ReplicaCycle:
    """Return the time in which a replica generates the responses that it may admit under one version.

    More responses than slots run at a steady rate until the tail of the last slots.
    """
    admitted = float(placement.batch_per_replica)
    if request.max_staleness is not None:  # the scheduler keeps no more responses live
        live = request.new_per_step * (request.max_staleness + 1) / placement.replicas
        admitted = max(1.0, min(admitted, live))
    running = min(admitted, placement.max_batch)
    if admitted <= placement.max_batch:
        seconds = rates.batch_s(running, request.lengths.longest_of(math.ceil(admitted)))
    else:
        steady_s = (admitted - running) * request.lengths.mean / rates.full_tokens_per_s(running)
        seconds = steady_s + rates.tail_s(running)
    return ReplicaCycle(admitted, running, seconds)


def _generate_async(
    request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates, cycle: ReplicaCycle
) -> _Stage:
    """Replicas drain one by one, and a part of each tail is recovered."""
    lengths, per_step = request.lengths, request.new_per_step
    rate = rates.full_tokens_per_s(cycle.running)
    drained = min(1.0, cycle.admitted * lengths.mean / cycle.seconds / rate)
    depth = cycle.admitted * placement.replicas / per_step
    recovered = recovered_share(placement.replicas, depth=depth, tail=lengths.tail)
    share = drained + recovered * (1.0 - drained)
    seconds = per_step * lengths.mean / (placement.replicas * rate * share)
    return seconds, (
        _decode_formula(rates, cycle.running),
        Formula(
            name="a replica",
            text=f"{rate:,.0f} tokens/s without draining; the last of a version's {cycle.admitted:.0f} responses"
            f" ends after {cycle.seconds:.0f} s: {drained:.0%} of that rate, {share:.0%} with others meanwhile",
            result=f"{rate * share:,.0f} tokens/s",
        ),
        Formula(
            name="generation",
            text=f"{per_step:,} x {lengths.mean:,.0f} tokens / ({placement.replicas} x {rate * share:,.0f})",
            result=f"{seconds:.1f} s",
        ),
    )


def _generate_in_turns(
    request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates, cycle: ReplicaCycle
) -> _Stage:
    """Replicas generate without a pause, in the time that the learner leaves the shared GPUs.

    Responses continue under new weights, so nothing drains.
    """
    lengths, per_step = request.lengths, request.new_per_step
    rate = rates.full_tokens_per_s(cycle.running)
    seconds = per_step * lengths.mean / (placement.replicas * rate)
    return seconds, (
        _decode_formula(rates, cycle.running),
        Formula(
            name="generation",
            text=f"{per_step:,} x {lengths.mean:,.0f} tokens / ({placement.replicas} x {rate:,.0f}), beside the"
            f" learner's turn for {counted(placement.shared, 'replica')}",
            result=f"{seconds:.1f} s",
        ),
    )


def _hand_over(
    request: PlanRequest,
    placement: FleetPlacement,
    rates: ReplicaRates,
    cycle: ReplicaCycle,
    *,
    generation_s: float,
) -> _Stage:
    """Shared GPUs change hands twice in a turn of the learner, and replicas load the new weights.

    A released cache is computed again. Several steps share a turn where one costs more than the policy allows
    (`cluster.lease.most_cost`), and as far as staleness allows.
    """
    engine = rates.times
    prefill_s = cycle.running * request.lengths.mean_context / engine.prefill_tokens_per_s
    seconds = engine.load_s + (0.0 if placement.keeps_cache else 2 * engine.hand_over_s + prefill_s)
    most = BATCHES_A_TURN if request.max_staleness is None else max(1, request.max_staleness - 1)
    steps = min(max(1.0, seconds / (LeaseConfig().most_cost * generation_s)), float(most))
    text = f"load {engine.load_s:.2f} s, caches kept; {steps:.1f} steps a turn"
    if not placement.keeps_cache:
        text = (
            f"load {engine.load_s:.2f} s + 2 x {engine.hand_over_s:g} s + {cycle.running:.0f} caches again"
            f" {prefill_s:.1f} s; {steps:.1f} steps a turn"
        )
    return seconds / steps, (Formula(name="hand-overs", text=text, result=f"{seconds / steps:.2f} s"),)


def _generate_batch(request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates) -> _Stage:
    """Replicas start a step's shares together, and all wait for the longest response."""
    lengths = request.lengths
    each = request.new_per_step / placement.replicas
    running = min(each, placement.max_batch)
    longest = lengths.longest_of(request.new_per_step)
    waiting_s = (each - running) * lengths.mean / rates.full_tokens_per_s(running)
    seconds = waiting_s + rates.batch_s(running, longest) + request.reward_s
    return seconds, (
        _decode_formula(rates, running),
        Formula(
            name="generation",
            text=f"{each:.0f} responses a replica, {running:.0f} at a time, until the longest of"
            f" {request.new_per_step:,} ends, with {longest:,.0f} tokens, and its score",
            result=f"{seconds:.1f} s",
        ),
    )


def _decode_formula(rates: ReplicaRates, running: float) -> Formula:
    times, context = rates.times, rates.lengths.mean_context
    return Formula(
        name="decode step",
        text=f"{times.step_s * 1e3:.2f} ms + {running:.0f} x {times.sequence_s * 1e6:.1f} us + {running:.0f} x"
        f" {context:,.0f} tokens x {times.kv_token_s * 1e9:.1f} ns",
        result=f"{decode_step_s(times, running, context) * 1e3:.1f} ms",
    )


def _train_step(request: PlanRequest, placement: FleetPlacement, times: LearnerTimes) -> _Stage:
    """Return the seconds of a learner step and their formula. Longer responses cost more attention per token."""
    size, ranks = request.learner_size(placement.pack_tokens), placement.learner_gpus
    batches = max(1.0, size.tokens / placement.pack_tokens)
    traffic = learner_traffic(request, placement)
    seconds = _learner_step_s(placement, times, size, traffic=traffic)
    groups = "" if placement.shard_ranks is None else f", sharded in groups of {placement.shard_ranks}"
    if placement.context_parallel > 1:
        groups += f", each microbatch shared by {placement.context_parallel}"
    return seconds, (
        Formula(
            name="learner",
            text=f"{times.optimizer_s:.2f} s + publish {times.publish_s:.2f} s + {size.tokens / 1e6:.2f}M tokens x"
            f" {token_cost(times, size):.2f} (attention) in {batches:,.0f} microbatches on {ranks} GPUs{groups} x"
            f" {times.train_tokens_per_s:,.0f} tokens/s; collectives of {traffic.round_s:.2f} s a microbatch and"
            f" {traffic.copies_s:.2f} s an update, which computation hides as far as it lasts",
            result=f"{seconds:.1f} s",
        ),
    )


def _learner_step_s(
    placement: FleetPlacement, times: LearnerTimes, size: RowSize, *, traffic: RankTraffic | None
) -> float:
    """Return the seconds of a learner step; ranks that share a microbatch are one rank of their joint speed."""
    speed = times.train_tokens_per_s * placement.context_parallel
    return learner_step_s(
        times.model_copy(update={"train_tokens_per_s": speed}),
        tokens=size.tokens,
        cost=token_cost(times, size),
        microbatches=max(1.0, size.tokens / placement.pack_tokens),
        ranks=placement.learner_gpus // placement.context_parallel,
        traffic=traffic,
    )


def train_step_s(request: PlanRequest, placement: FleetPlacement) -> float:
    """Return the seconds of a learner step, with its collectives and its publish."""
    times, size = request.profile(placement.tensor_parallel).learner, request.learner_size(placement.pack_tokens)
    return _learner_step_s(placement, times, size, traffic=learner_traffic(request, placement))


def traffic_slowdown(request: PlanRequest, placement: FleetPlacement) -> float:
    """Return how many times as long microbatches take with their collectives as without."""
    times = request.profile(placement.tensor_parallel).learner
    size, fixed_s = request.learner_size(placement.pack_tokens), times.optimizer_s + times.publish_s
    with_traffic, alone = (
        _learner_step_s(placement, times, size, traffic=traffic) - fixed_s
        for traffic in (learner_traffic(request, placement), None)
    )
    return with_traffic / alone


def _load_between_batches(
    request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates, cycle: ReplicaCycle
) -> _Stage:
    """Each replica loads by itself, between the batches of two versions."""
    load_s, loads = rates.times.load_s, request.new_per_step / (placement.replicas * cycle.admitted)
    text = f"{load_s:.2f} s a load x {loads:.2f} loads of a replica in a step"
    return load_s * loads, (Formula(name="weights", text=text, result=f"{load_s * loads:.2f} s"),)


def _wait_for_weights(
    request: PlanRequest, schedule: Schedule, rates: ReplicaRates, *, generation_s: float, learner_s: float
) -> _Stage:
    """Under `sync` all replicas wait for the weights.

    Under `one_step` a batch starts when the learner takes the batch before it, with the weights of the step before
    that. So learner, weights and generation follow one another within two steps, and part of the way is hidden. A
    version that takes longer than a step costs more than this formula says.
    """
    load_s, seconds = rates.times.load_s, _on_the_way_s(request, rates)
    text = f"{request.version_bytes / 1e9:,.1f} GB to all nodes {request.publish_s:.2f} s + load {load_s:.2f} s"
    if schedule is Schedule.ONE_STEP:
        two_s = learner_s + request.publish_s + load_s + generation_s
        seconds = max(generation_s + load_s, learner_s, two_s / 2) - max(generation_s, learner_s)
        text = f"{text}, less the part that the longer of generation and learner hides"
    return seconds, (Formula(name="weights", text=text, result=f"{seconds:.2f} s"),)


def _on_the_way_s(request: PlanRequest, rates: ReplicaRates) -> float:
    return request.publish_s + rates.times.load_s


def _freshness(
    request: PlanRequest, rates: ReplicaRates, cycle: ReplicaCycle, *, learner_s: float, is_shared: bool
) -> _Stage:
    """Return the shortest step in which the admitted groups end.

    A group counts from its issue to the end of its learner step, so it waits for a slot, decodes until its longest
    response ends, is scored and trained. A group on shared GPUs also stands still in each learner's turn.
    """
    bound = request.max_staleness
    if bound is None:
        return 0.0, ()
    waiting_s = (
        (cycle.admitted - cycle.running) * request.lengths.mean / rates.full_tokens_per_s(cycle.running) / 2
    )
    decode_s = rates.batch_s(cycle.running, request.lengths.longest_of(request.group_size))
    text = (
        f"a group waits {waiting_s:.0f} s, decodes {decode_s:.0f} s, is scored {request.reward_s:g} s and trained"
        f" {learner_s:.0f} s; {bound} + 1 steps of groups may be under way"
    )
    seconds = (waiting_s + decode_s + request.reward_s + learner_s) / (bound + 1)
    if is_shared:
        text, seconds = f"{text}, and stand still while the learner computes", seconds + learner_s
    return seconds, (Formula(name="freshness", text=text, result=f"{seconds:.1f} s"),)
