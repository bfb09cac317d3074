"""Ranking of placements: formulas choose which placements to simulate, and simulations rank them.

Called by `laminar plan`. A kind of placements is a schedule, and under `async` also the depth of admission. The
simulated placements of a kind correct the formula for the whole kind. Each round then simulates the best
placements by corrected formula, and neighbours of the best so far. Close placements are simulated with more seeds.
A plan depends on its request alone (`tests/plan/test_planner.py::test_a_plan_depends_on_its_request_alone`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import median

from laminar_lab.plan.judge import Judgement, judge, mean_judgement
from laminar_lab.plan.placements import DEPTHS, STATIC_SHARE, FleetPlacement, learner_bytes, placements
from laminar_lab.plan.request import PlanRequest
from laminar_lab.plan.stages import PlacementEstimate, estimate
from laminar_py.config.rollout import Schedule
from laminar_py.runtime.preflight import Parts, engine_memory

FIRST = 6  # placements of the first round, the best by formula
BESIDE, OTHERS = 2, 2  # placements of a later round: neighbours of the best so far, and the best of all others
MOST = 16  # placements of all rounds
TIED = 0.03  # share of tokens/s within which one simulation cannot separate two placements
MOST_TIED = 3
SEEDS = (1, 2)  # for tied placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A placement with its formulas and its simulation."""

    placement: FleetPlacement
    estimate: PlacementEstimate
    judgement: Judgement

    @property
    def tokens_per_s(self) -> float:
        """Simulated trained response tokens per second."""
        return self.judgement.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """Placements from the best on, one for each schedule, learner size and tensor parallelism."""

    request: PlanRequest
    ranked: tuple[Ranked, ...]
    considered: int  # number of placements that fit
    shrink_error: float | None  # change of the best's tokens/s on twice the replicas; None if all were simulated

    @property
    def best(self) -> Ranked:
        """The first choice."""
        return self.ranked[0]

    def cost(self, ranked: Ranked) -> float | None:
        """Return the price of 1,000 steps on all GPUs of the request; None without a price."""
        price = self.request.price
        hours = 1000.0 * ranked.judgement.step_s / 3600.0
        return None if price is None else hours * self.request.fleet.gpus * price

    def learner_memory(self, ranked: Ranked) -> Parts:
        """Return the peak bytes of a learner GPU by part."""
        return learner_bytes(self.request, ranked.placement)

    def engine_memory(self, ranked: Ranked) -> Parts:
        """Return the bytes of a replica's GPU by part."""
        placement, gpu_bytes = ranked.placement, self.request.fleet.gpu.memory_bytes
        return engine_memory(
            self.request.shape,
            gpus=placement.tensor_parallel,
            kv_tokens=placement.kv_tokens,
            static_bytes=STATIC_SHARE * gpu_bytes,
            gpu_bytes=gpu_bytes,
        )


JudgeAll = Callable[[Sequence[FleetPlacement], int], list[Judgement]]  # simulates placements with a seed
Estimates = dict[FleetPlacement, PlacementEstimate]
Judged = dict[FleetPlacement, Judgement]
Kind = tuple[Schedule, int]
Kinds = dict[FleetPlacement, Kind]


def make_plan(request: PlanRequest, *, judge_all: JudgeAll | None = None) -> RankedPlan:
    """Rank the placements of a request; `judge_all` simulates them. Raises `ConfigError` if none fits."""
    judge_all = judge_all or (lambda some, seed: [judge(request, one, seed=seed) for one in some])
    estimates = {one: estimate(request, one) for one in placements(request)}
    kinds = {one: _kind_of(request, one) for one in estimates}
    found: Judged = {}
    some = _first_round(estimates, kinds)
    while some:
        found.update(zip(some, judge_all(some, 0), strict=True))
        some = _next_round(estimates, kinds, found)[: MOST - len(found)]
    found |= _judge_ties(found, judge_all)
    ranked = [Ranked(placement=one, estimate=estimates[one], judgement=found[one]) for one in found]
    ranked.sort(key=lambda one: -one.tokens_per_s)
    return RankedPlan(
        request=request,
        ranked=tuple(_one_of_each(ranked)),
        considered=len(estimates),
        shrink_error=_shrink_error(request, ranked[0]),
    )


def _kind_of(request: PlanRequest, one: FleetPlacement) -> Kind:
    """Return the schedule, and under `async` the nearest depth of admission."""
    if one.schedule is not Schedule.ASYNC:
        return one.schedule, 0
    shares = one.batch_per_replica * one.replicas / request.trajectories_per_step
    return one.schedule, min(DEPTHS, key=lambda depth: abs(log2(shares / depth)))


def _first_round(estimates: Estimates, kinds: Kinds) -> list[FleetPlacement]:
    """Return the best placements by formula, and the best of every kind."""
    order = sorted(estimates, key=lambda one: -estimates[one].tokens_per_s)
    firsts = {kinds[one]: one for one in reversed(order)}
    return list(dict.fromkeys([*order[:FIRST], *firsts.values()]))


def _next_round(estimates: Estimates, kinds: Kinds, found: Judged) -> list[FleetPlacement]:
    """Return the placements to simulate next, by corrected formulas."""
    rates = _corrected_rates(estimates, kinds, found)
    fresh = sorted((one for one in estimates if one not in found), key=lambda one: -rates[one])
    near = _neighbours(max(found, key=lambda one: found[one].tokens_per_s), estimates)
    beside = [one for one in fresh if one in near][:BESIDE]
    return [*beside, *[one for one in fresh if one not in beside][:OTHERS]]


def _corrected_rates(estimates: Estimates, kinds: Kinds, found: Judged) -> dict[FleetPlacement, float]:
    """Return tokens/s by formula, times the median of simulated over computed tokens/s of the same kind."""
    shares: dict[Kind, list[float]] = {}
    for one, judged in found.items():
        shares.setdefault(kinds[one], []).append(judged.tokens_per_s / estimates[one].tokens_per_s)
    return {one: by.tokens_per_s * median(shares[kinds[one]]) for one, by in estimates.items()}


def _judge_ties(found: Judged, judge_all: JudgeAll) -> Judged:
    """Judge the placements close to the best with more seeds; return nothing if the best is alone."""
    order = sorted(found, key=lambda one: -found[one].tokens_per_s)
    least = (1.0 - TIED) * found[order[0]].tokens_per_s
    tied = [one for one in order[:MOST_TIED] if found[one].tokens_per_s >= least]
    if len(tied) == 1:
        return {}
    again = [[found[one] for one in tied], *(judge_all(tied, seed) for seed in SEEDS)]
    return {one: mean_judgement(judged) for one, judged in zip(tied, zip(*again, strict=True), strict=True)}


def _neighbours(best: FleetPlacement, estimates: Estimates) -> set[FleetPlacement]:
    """Return placements one learner size or replica size from the best, with a similar number of live
    trajectories.
    """
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
    """Keep the first placement of each schedule, learner size and tensor parallelism."""
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
    """Return the change of the best's tokens/s on twice the replicas, which shows the error of shrinking."""
    if first.judgement.replicas >= first.placement.replicas:
        return None
    return judge(request, first.placement, times=2).tokens_per_s / first.tokens_per_s - 1.0
