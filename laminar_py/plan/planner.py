"""Ranking of placements: formulas choose which are worth a look, the simulator judges those and their neighbours.

Called by `laminar plan`. Invariant: what comes out depends on the request alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from laminar_py.config.staleness import Schedule
from laminar_py.plan.judge import Judgement, judge
from laminar_py.plan.placements import STATIC_SHARE, FleetPlacement, learner_bytes, placements
from laminar_py.plan.request import PlanRequest
from laminar_py.plan.stages import PlacementEstimate, estimate
from laminar_py.preflight.memory import Parts, engine_memory

FIRST = 8  # placements that the formulas like best, which are simulated
OF_OTHERS = 1  # of each schedule that has none among those
MOST = 16  # simulations, with those of neighbours


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


Look = Callable[[Sequence[FleetPlacement]], list[Judgement]]  # a judgement of each


def make_plan(request: PlanRequest, *, look: Look | None = None) -> RankedPlan:
    """Rank the placements of a request. Raises `ConfigError` where none fits."""
    look = look or (lambda some: [judge(request, one) for one in some])
    estimates = {one: estimate(request, one) for one in placements(request)}
    found: dict[FleetPlacement, Judgement] = {}

    def see(some: Iterable[FleetPlacement]) -> None:
        fresh = [one for one in dict.fromkeys(some) if one not in found][: MOST - len(found)]
        found.update(zip(fresh, look(fresh), strict=True))

    see(_worth_a_look(estimates))
    best: FleetPlacement | None = None
    while len(found) < MOST and best is not (now := max(found, key=lambda one: found[one].tokens_per_s)):
        best = now
        see(_neighbours(best, estimates))
    ranked = [Ranked(placement=one, estimate=estimates[one], judgement=found[one]) for one in found]
    ranked.sort(key=lambda one: -one.tokens_per_s)
    return RankedPlan(
        request=request,
        ranked=tuple(_one_of_each(ranked)),
        considered=len(estimates),
        shrink_error=_shrink_error(request, ranked[0]),
    )


def _worth_a_look(estimates: dict[FleetPlacement, PlacementEstimate]) -> list[FleetPlacement]:
    """Placements that formulas like best, and the best of every schedule."""
    order = sorted(estimates, key=lambda one: -estimates[one].tokens_per_s)
    others = [
        one
        for schedule in Schedule
        for one in [place for place in order if place.schedule is schedule][:OF_OTHERS]
    ]
    return [*order[:FIRST], *others]


def _neighbours(best: FleetPlacement, estimates: dict[FleetPlacement, PlacementEstimate]) -> list[FleetPlacement]:
    """Placements of the same schedule that differ from the best by one step, the likeliest first."""
    same = [one for one in estimates if one.schedule is best.schedule]
    sizes = sorted({one.learner_gpus for one in same})
    degrees = sorted({one.tensor_parallel for one in same})
    size, degree = sizes.index(best.learner_gpus), degrees.index(best.tensor_parallel)

    def depth(one: FleetPlacement) -> float:
        return one.batch_per_replica * one.replicas

    near = [
        one
        for one in same
        if abs(sizes.index(one.learner_gpus) - size) + abs(degrees.index(one.tensor_parallel) - degree) <= 1
    ]
    near.sort(key=lambda one: -estimates[one].tokens_per_s)
    beside = [
        one for one in near if (one.learner_gpus, one.tensor_parallel) == (best.learner_gpus, best.tensor_parallel)
    ]
    across = [one for one in near if one not in beside and 0.7 < depth(one) / depth(best) < 1.5]
    return [*beside, *across]


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
