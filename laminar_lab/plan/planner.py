"""Ranking of placements: formulas choose which are worth a look, and the simulator judges those.

Called by `laminar plan`. What was simulated of a kind of placements (a schedule, under `async` also how much of a
step replicas admit under a version) says how far its formula is off, and by formulas that are corrected so the
likeliest of all, and beside the best so far, come next. Those that are alike then are simulated with other seeds,
too. Invariant: what comes out depends on the request alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

from laminar_lab.plan.judge import Judgement, judge, mean_of
from laminar_lab.plan.placements import DEPTHS, STATIC_SHARE, FleetPlacement, learner_bytes, placements
from laminar_lab.plan.request import PlanRequest
from laminar_lab.plan.stages import PlacementEstimate, estimate
from laminar_py.config.rollout import Schedule
from laminar_py.runtime.preflight import Parts, engine_memory

FIRST = 6  # placements that the formulas like best, which are simulated
BESIDE, OTHERS = 2, 2  # of a round after that: beside the best so far, and of all
MOST = 16  # placements that are simulated
TIED = 0.03  # share of tokens/s within which one simulation does not tell two apart
MOST_TIED = 3
SEEDS = (1, 2)  # with which those are simulated again


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A placement with what formulas and simulator say of it."""

    placement: FleetPlacement
    estimate: PlacementEstimate
    judgement: Judgement

    @property
    def tokens_per_s(self) -> float:
        """Response tokens that are trained on, simulated."""
        return self.judgement.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """Placements, the best first, one of each schedule, learner size and tensor parallelism."""

    request: PlanRequest
    ranked: tuple[Ranked, ...]
    considered: int  # placements that fit
    # change of the first's tokens/s on twice as many replicas; None where all were simulated
    shrink_error: float | None

    @property
    def best(self) -> Ranked:
        """The first choice."""
        return self.ranked[0]

    def cost(self, ranked: Ranked) -> float | None:
        """Price of 1,000 steps, of all GPUs that were asked for."""
        price = self.request.price
        hours = 1000.0 * ranked.judgement.step_s / 3600.0
        return None if price is None else hours * self.request.fleet.gpus * price

    def learner_memory(self, ranked: Ranked) -> Parts:
        """Bytes of one of the learner's GPUs by part."""
        return learner_bytes(self.request, ranked.placement)

    def engine_memory(self, ranked: Ranked) -> Parts:
        """Bytes of one of a replica's GPUs by part."""
        placement, gpu_bytes = ranked.placement, self.request.fleet.gpu.memory_bytes
        return engine_memory(
            self.request.shape,
            gpus=placement.tensor_parallel,
            kv_tokens=placement.kv_tokens,
            static_bytes=STATIC_SHARE * gpu_bytes,
            gpu_bytes=gpu_bytes,
        )


Look = Callable[[Sequence[FleetPlacement], int], list[Judgement]]  # a judgement of each, with a seed
Estimates = dict[FleetPlacement, PlacementEstimate]
Judged = dict[FleetPlacement, Judgement]
Kind = tuple[Schedule, int]
Kinds = dict[FleetPlacement, Kind]


def make_plan(request: PlanRequest, *, look: Look | None = None) -> RankedPlan:
    """Rank the placements of a request. Raises `ConfigError` where none fits."""
    look = look or (lambda some, seed: [judge(request, one, seed=seed) for one in some])
    estimates = {one: estimate(request, one) for one in placements(request)}
    kinds = {one: _kind(request, one) for one in estimates}
    found: Judged = {}
    some = _worth_a_look(estimates, kinds)
    while some:
        found.update(zip(some, look(some, 0), strict=True))
        some = _likeliest(estimates, kinds, found)[: MOST - len(found)]
    found |= _tied(found, look)
    ranked = [Ranked(placement=one, estimate=estimates[one], judgement=found[one]) for one in found]
    ranked.sort(key=lambda one: -one.tokens_per_s)
    return RankedPlan(
        request=request,
        ranked=tuple(_one_of_each(ranked)),
        considered=len(estimates),
        shrink_error=_shrink_error(request, ranked[0]),
    )


def _kind(request: PlanRequest, one: FleetPlacement) -> Kind:
    """Schedule, and under `async` the depth of admission that is nearest to its own."""
    if one.schedule is not Schedule.ASYNC:
        return one.schedule, 0
    shares = one.batch_per_replica * one.replicas / request.trajectories_per_step
    return one.schedule, min(DEPTHS, key=lambda depth: abs(log2(shares / depth)))


def _worth_a_look(estimates: Estimates, kinds: Kinds) -> list[FleetPlacement]:
    """Placements that formulas like best, and the best of every kind."""
    order = sorted(estimates, key=lambda one: -estimates[one].tokens_per_s)
    firsts = {kinds[one]: one for one in reversed(order)}
    return list(dict.fromkeys([*order[:FIRST], *firsts.values()]))


def _likeliest(estimates: Estimates, kinds: Kinds, found: Judged) -> list[FleetPlacement]:
    """Placements to simulate next, by formulas that what was simulated corrects."""
    rates = _corrected(estimates, kinds, found)
    fresh = sorted((one for one in estimates if one not in found), key=lambda one: -rates[one])
    near = _neighbours(max(found, key=lambda one: found[one].tokens_per_s), estimates)
    beside = [one for one in fresh if one in near][:BESIDE]
    return [*beside, *[one for one in fresh if one not in beside][:OTHERS]]


def _corrected(estimates: Estimates, kinds: Kinds, found: Judged) -> dict[FleetPlacement, float]:
    """Tokens/s by formula, times what the simulator makes of those of the kind in the median."""
    shares: dict[Kind, list[float]] = {}
    for one, judged in found.items():
        shares.setdefault(kinds[one], []).append(judged.tokens_per_s / estimates[one].tokens_per_s)
    return {one: by.tokens_per_s * median(shares[kinds[one]]) for one, by in estimates.items()}


def _tied(found: Judged, look: Look) -> Judged:
    """Judgements of those that are about as good as the best, as the mean of several seeds; none of one alone."""
    order = sorted(found, key=lambda one: -found[one].tokens_per_s)
    least = (1.0 - TIED) * found[order[0]].tokens_per_s
    tied = [one for one in order[:MOST_TIED] if found[one].tokens_per_s >= least]
    if len(tied) == 1:
        return {}
    again = [[found[one] for one in tied], *(look(tied, seed) for seed in SEEDS)]
    return {one: mean_of(judged) for one, judged in zip(tied, zip(*again, strict=True), strict=True)}


def _neighbours(best: FleetPlacement, estimates: Estimates) -> set[FleetPlacement]:
    """Placements of the schedule of the best that differ from it by one step, and have about as much under way."""
    same = [one for one in estimates if one.schedule is best.schedule]
    sizes = sorted({one.learner_gpus for one in same})
    degrees = sorted({one.tensor_parallel for one in same})

    def steps(one: FleetPlacement) -> int:
        size = abs(sizes.index(one.learner_gpus) - sizes.index(best.learner_gpus))
        return size + abs(degrees.index(one.tensor_parallel) - degrees.index(best.tensor_parallel))

    def under_way(one: FleetPlacement) -> float:
        return one.batch_per_replica * one.replicas / (best.batch_per_replica * best.replicas)

    return {one for one in same if steps(one) == 0 or (steps(one) == 1 and 0.7 < under_way(one) < 1.5)}


def _one_of_each(ranked: Iterable[Ranked]) -> list[Ranked]:
    seen: set[tuple[Schedule, int, int]] = set()
    kept = []
    for one in ranked:
        place = one.placement
        kind = (place.schedule, place.learner_gpus, place.tensor_parallel)
        if kind not in seen:
            seen.add(kind)
            kept.append(one)
    return kept


def _shrink_error(request: PlanRequest, first: Ranked) -> float | None:
    """Change of the first's tokens/s on twice as many replicas, which shows what shrinking costs."""
    if first.judgement.replicas >= first.placement.replicas:
        return None
    return judge(request, first.placement, times=2).tokens_per_s / first.tokens_per_s - 1.0
