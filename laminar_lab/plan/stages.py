"""Closed formulas of a placement: what each stage of a step takes, and what the step takes of that. Pure.

They choose which placements are worth a simulation, and are what `--explain` prints. Source: the goodput equation
(`analytics.triage.goodput`), with a decode step of `a + b sequences + c KV tokens`.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from laminar_lab.plan.placements import FleetPlacement
from laminar_lab.plan.request import Lengths, PlanRequest
from laminar_lab.plan.times import engine_times, learner_times, weights_bytes
from laminar_py.config.emulation import EngineTimes, LearnerTimes
from laminar_py.config.rollout import Schedule
from laminar_py.learner.packing import attention_share
from laminar_py.observe import StageTimes, StepStage, Wall, compose

REPACK_SHARE = 0.5  # of what draining costs, that repacking gives back: the simulator's figure for a 7B, rounded
RELAY_BYTES_PER_S = 1.6e9  # of a version, as deltas of one encoding thread: measured, see docs/scale.md
GRID = 400  # points of an integral over lengths

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A line of the explanation, e.g. of a learner step."""

    name: str
    text: str  # with the numbers in it
    result: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEstimate:
    """Stage times of a placement by formula."""

    schedule: Schedule
    times: StageTimes
    freshness_s: float  # shortest step in which no response grows older than the bound on staleness
    tokens_per_s: float  # response tokens that are trained on
    formulas: tuple[Formula, ...]

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return max(compose(self.schedule, self.times), self.freshness_s)

    @property
    def binds(self) -> Wall:
        """Wall that, with twice as much of what makes it, shortens the step most."""
        return min(_WALLS, key=lambda wall: self._relieved(wall).step_s)

    @property
    def binds_next(self) -> Wall:
        """Wall that binds once the first is gone."""
        relieved = self._relieved(self.binds, 1e9)
        return min(
            (wall for wall in _WALLS if wall is not self.binds), key=lambda wall: relieved._relieved(wall).step_s
        )

    def _relieved(self, wall: Wall, times: float = 2.0) -> "PlacementEstimate":
        """Estimate with so many times as much of what makes a wall."""
        if wall is Wall.FRESHNESS:
            return replace(self, freshness_s=self.freshness_s / times)
        return replace(self, times=self.times.faster(StepStage(wall.value), times))


@dataclass(frozen=True, slots=True)
class ReplicaRates:
    """Rates of a replica with `running` sequences at a time."""

    times: EngineTimes
    lengths: Lengths

    def step_s(self, running: Floats | float, context: Floats | float) -> Floats | float:
        """Seconds of a decode step; `context` is the mean of the sequences' tokens."""
        times = self.times
        return times.step_s + running * (times.sequence_s + times.kv_token_s * context)

    def full_tokens_per_s(self, running: float) -> float:
        """Response tokens a second of a replica that always has so many sequences, prefill taken off."""
        lengths = self.lengths
        decode_s = lengths.mean * self.step_s(running, lengths.mean_context) / running
        return float(lengths.mean / (decode_s + lengths.prompt / self.times.prefill_tokens_per_s))

    def batch_s(self, running: float, until: float) -> float:
        """Seconds in which so many responses that begin together end, the longest with `until` tokens."""
        generated = np.linspace(0.0, until, GRID)
        left = 1.0 - np.searchsorted(self.lengths.quantiles, generated, side="left") / len(self.lengths.quantiles)
        steps = self.step_s(running * left, self.lengths.prompt + generated)
        prefill_s = running * self.lengths.prompt / self.times.prefill_tokens_per_s
        return float(np.trapezoid(steps, generated)) + prefill_s

    def tail_s(self, running: float) -> float:
        """Seconds from the last admission to the last end, of sequences of which each was somewhere on its way."""
        quantiles = self.lengths.quantiles
        remaining = np.linspace(0.0, quantiles[-1], GRID)
        sums = np.append(np.cumsum(quantiles[::-1])[::-1], 0.0)  # of all quantiles from each on
        first = np.searchsorted(quantiles, remaining)
        beyond = (sums[first] - remaining * (len(quantiles) - first)) / len(quantiles)  # E[(X - r)+]
        left = running * beyond / self.lengths.mean
        shown = left >= 0.5  # later nobody is left
        steps = self.step_s(left[shown], self.lengths.mean_context + remaining[shown])
        return float(np.trapezoid(steps, remaining[shown]))


@dataclass(frozen=True, slots=True)
class ReplicaCycle:
    """Time of a draining replica under one version, e.g. `ReplicaCycle(683.0, 256.0, 271.0)`."""

    admitted: float  # responses
    running: float  # that it decodes at a time
    seconds: float  # until the last of them ends


def estimate(request: PlanRequest, placement: FleetPlacement) -> PlacementEstimate:
    """Stage times of a placement."""
    rates, learner = profile_of(request, placement)
    learner_s, trained = _train(request, placement, learner)
    freshness_s: float = 0.0
    aged: tuple[Formula, ...] = ()
    if placement.schedule is Schedule.ASYNC:
        cycle = _cycle(request, placement, rates)
        generation_s, generated = _generate_async(request, placement, rates, cycle)
        weights_s, moved = _take_weights(request, placement, rates, cycle)
        freshness_s, aged = _stay_fresh(request, cycle, handed_on_s=learner_s + _on_the_way_s(request, rates))
    else:
        generation_s, generated = _generate_batch(request, placement, rates)
        exposed = _sync_weights if placement.schedule is Schedule.SYNC else _one_step_weights
        weights_s, moved = exposed(request, rates, StageTimes(generation_s=generation_s, learner_s=learner_s))
    times = StageTimes(generation_s=generation_s, learner_s=learner_s, weights_s=weights_s)
    step_s = max(compose(placement.schedule, times), freshness_s)
    tokens = request.trajectories_per_step * request.lengths.mean
    goodput = Formula(
        name="goodput",
        text=f"{request.trajectories_per_step:,} responses x {request.lengths.mean:,.0f} tokens / {step_s:.1f} s"
        f" ({placement.schedule}: {_COMPOSED[placement.schedule]})",
        result=f"{tokens / step_s:,.0f} tokens/s",
    )
    return PlacementEstimate(
        schedule=placement.schedule,
        times=times,
        freshness_s=freshness_s,
        tokens_per_s=tokens / step_s,
        formulas=(*generated, *trained, *moved, *aged, goodput),
    )


def profile_of(request: PlanRequest, placement: FleetPlacement) -> tuple[ReplicaRates, LearnerTimes]:
    """Times of the placement's replicas and of its learner's GPUs: measured ones, or those of the rules."""
    shape, gpu, measured = request.shape, request.fleet.gpu, request.measured
    if measured is not None:
        return ReplicaRates(measured.engine, request.lengths), measured.learner
    times = engine_times(shape, gpu, tensor_parallel=placement.tensor_parallel)
    return ReplicaRates(times, request.lengths), learner_times(shape, gpu, mfu=request.mfu)


def publish_s(request: PlanRequest) -> float:
    """Seconds of a version's way to every node, in a pipeline of chunks, whatever their number."""
    link = min(request.fleet.network_bytes_per_s, RELAY_BYTES_PER_S)
    return weights_bytes(request.shape) / link if request.fleet.nodes > 1 else 0.0


_COMPOSED = {
    Schedule.SYNC: "generation + learner + weights",
    Schedule.ONE_STEP: "max(generation, learner) + weights",
    Schedule.ASYNC: "max(generation + weights, learner)",
}
_WALLS = (Wall.GENERATION, Wall.LEARNER, Wall.WEIGHTS, Wall.FRESHNESS)
_Stage = tuple[float, tuple[Formula, ...]]


def _cycle(request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates) -> ReplicaCycle:
    admitted = float(placement.batch_per_replica)
    if request.max_staleness is not None:  # more are never live
        live = request.trajectories_per_step * (request.max_staleness + 1) / placement.replicas
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
    """Replicas drain what they admitted, one by one, and repacking takes over a part of each tail."""
    lengths, per_step = request.lengths, request.trajectories_per_step
    rate = rates.full_tokens_per_s(cycle.running)
    drained = min(1.0, cycle.admitted * lengths.mean / cycle.seconds / rate)
    share = drained + REPACK_SHARE * (1.0 - drained) if placement.replicas > 1 else drained
    seconds = per_step * lengths.mean / (placement.replicas * rate * share)
    return seconds, (
        _decode_formula(rates, cycle.running),
        Formula(
            name="a replica",
            text=f"{rate:,.0f} tokens/s never draining; of {cycle.admitted:.0f} that it admits under a version the"
            f" last ends after {cycle.seconds:.0f} s: {drained:.0%} of that, {share:.0%} with repacking",
            result=f"{rate * share:,.0f} tokens/s",
        ),
        Formula(
            name="generation",
            text=f"{per_step:,} x {lengths.mean:,.0f} tokens / ({placement.replicas} x {rate * share:,.0f})",
            result=f"{seconds:.1f} s",
        ),
    )


def _generate_batch(request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates) -> _Stage:
    """Replicas begin a step's shares together, and the longest response is waited for."""
    lengths = request.lengths
    each = request.trajectories_per_step / placement.replicas
    running = min(each, placement.max_batch)
    longest = lengths.longest_of(request.trajectories_per_step)
    waiting_s = (each - running) * lengths.mean / rates.full_tokens_per_s(running)
    seconds = waiting_s + rates.batch_s(running, longest) + request.reward_s
    return seconds, (
        _decode_formula(rates, running),
        Formula(
            name="generation",
            text=f"{each:.0f} responses a replica, {running:.0f} at a time, until the longest of"
            f" {request.trajectories_per_step:,} ends, with {longest:,.0f} tokens, and its score",
            result=f"{seconds:.1f} s",
        ),
    )


def _decode_formula(rates: ReplicaRates, running: float) -> Formula:
    times, context = rates.times, rates.lengths.mean_context
    return Formula(
        name="decode step",
        text=f"{times.step_s * 1e3:.2f} ms + {running:.0f} x {times.sequence_s * 1e6:.1f} us + {running:.0f} x"
        f" {context:,.0f} tokens x {times.kv_token_s * 1e9:.1f} ns",
        result=f"{rates.step_s(running, context) * 1e3:.1f} ms",
    )


def _train(request: PlanRequest, placement: FleetPlacement, times: LearnerTimes) -> _Stage:
    """Microbatches, each whole on one rank; the ranks go through them in rounds."""
    lengths, ranks = request.lengths, placement.learner_gpus
    share = attention_share(
        hidden_size=times.hidden_size, num_layers=times.num_layers, num_parameters=times.num_parameters
    )
    whole = lengths.quantiles + lengths.prompt
    cost = 1.0 + share * float((whole**2).mean()) / float(whole.mean())  # of a token, over one of a short sequence
    tokens = request.trajectories_per_step * float(whole.mean())
    batches = max(1.0, tokens / placement.pack_tokens)
    rounds = math.ceil(batches / ranks)
    seconds = times.optimizer_s + rounds * tokens / batches * cost / times.train_tokens_per_s
    return seconds, (
        Formula(
            name="learner",
            text=f"{times.optimizer_s:.1f} s + {tokens / 1e6:.2f}M tokens x {cost:.2f} (attention) in"
            f" {batches:,.0f} microbatches on {ranks} GPUs x {times.train_tokens_per_s:,.0f} tokens/s",
            result=f"{seconds:.1f} s",
        ),
    )


def _take_weights(
    request: PlanRequest, placement: FleetPlacement, rates: ReplicaRates, cycle: ReplicaCycle
) -> _Stage:
    """Replicas load, each by itself, between what they admit under two versions."""
    load_s, loads = rates.times.load_s, request.trajectories_per_step / (placement.replicas * cycle.admitted)
    text = f"{load_s:.2f} s a load x {loads:.2f} loads of a replica in a step"
    return load_s * loads, (Formula(name="weights", text=text, result=f"{load_s * loads:.2f} s"),)


def _sync_weights(request: PlanRequest, rates: ReplicaRates, beside: StageTimes) -> _Stage:
    """Everybody waits until all replicas have new weights."""
    seconds = _on_the_way_s(request, rates)
    return seconds, (Formula(name="weights", text=_way(request, rates), result=f"{seconds:.2f} s"),)


def _one_step_weights(request: PlanRequest, rates: ReplicaRates, beside: StageTimes) -> _Stage:
    """Seconds that a batch ahead does not hide: within two steps learner, weights, generation follow each other.

    A batch begins when the one before it is taken, with the weights of the step before that, once they are there.
    """
    load_s, way_s = rates.times.load_s, publish_s(request)
    generation_s, learner_s = beside.generation_s, beside.learner_s
    two_s = learner_s + way_s + load_s + generation_s
    seconds = max(generation_s + load_s, learner_s, two_s / 2) - max(generation_s, learner_s)
    text = f"{_way(request, rates)}, as far as the longer of generation and learner does not hide it"
    return seconds, (Formula(name="weights", text=text, result=f"{seconds:.2f} s"),)


def _way(request: PlanRequest, rates: ReplicaRates) -> str:
    gigabytes = weights_bytes(request.shape) / 1e9
    return f"{gigabytes:.0f} GB to all nodes {publish_s(request):.2f} s + load {rates.times.load_s:.2f} s"


def _on_the_way_s(request: PlanRequest, rates: ReplicaRates) -> float:
    return publish_s(request) + rates.times.load_s


def _stay_fresh(request: PlanRequest, cycle: ReplicaCycle, *, handed_on_s: float) -> _Stage:
    """Shortest step in which the last response that a replica admits is not older than the bound."""
    bound = request.max_staleness
    if bound is None:
        return 0.0, ()
    whole_s = cycle.seconds + request.reward_s + handed_on_s
    text = (
        f"from a version to the step of its last response {cycle.seconds:.0f} s of generation,"
        f" {request.reward_s:g} s of reward, {handed_on_s:.0f} s of learner and weights, within {bound} + 1 steps"
    )
    seconds = whole_s / (bound + 1)
    return seconds, (Formula(name="freshness", text=text, result=f"{seconds:.1f} s"),)
