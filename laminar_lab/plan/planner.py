"""Ranking of placements: formulas choose which placements to simulate, and simulations rank them.

Called by `laminar plan`. A formula class is a schedule, on shared GPUs or on separate ones, and under `async` on
separate ones also the depth of admission. The simulated placements of a class correct the formula for the whole
class. Each round then simulates the best placements by corrected formula, and neighbours of the best so far. Close
placements are simulated with more seeds. Unless the time for simulations is over earlier, a plan depends on its
request alone
(`tests/plan/test_planner.py::test_a_plan_depends_on_its_request_alone`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, log2
from statistics import median
from typing import Protocol

from laminar_lab.doctor.gpu_formula import Parts, host_inputs
from laminar_lab.plan.judge import Judgement, judge, mean_judgement
from laminar_lab.plan.placements import DEPTHS, FleetPlacement, gpu_bytes, placements
from laminar_lab.plan.request import PlanRequest
from laminar_lab.plan.stages import PlacementEstimate, estimate
from laminar_py.config.rollout import Schedule

FIRST = 6  # placements of the first round, the best by formula
BESIDE, OTHERS = 2, 2  # placements of a later round: neighbours of the best so far, and the best of all others
MOST = 16  # placements of all rounds
TIED = 0.08  # share of tokens/s within which one simulation cannot separate two placements
ALIKE = 0.01  # share of tokens/s within which the placement with the fewest learner GPUs comes first
MOST_TIED = 3
SEEDS = (1, 2)  # for tied placements
SHARED = -1  # stands for the depth, where GPUs are shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A placement with its formulas and its simulation."""

    placement: FleetPlacement
    estimate: PlacementEstimate
    judgement: Judgement | None  # None: not simulated

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens per second, simulated or else by formula."""
        return self.estimate.tokens_per_s if self.judgement is None else self.judgement.tokens_per_s

    @property
    def step_s(self) -> float:
        """Seconds of a step, simulated or else by formula."""
        return self.estimate.step_s if self.judgement is None else self.judgement.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """Placements from the best on, one for each schedule, learner size, tensor parallelism and use of its GPUs."""

    request: PlanRequest
    ranked: tuple[Ranked, ...]
    considered: int  # number of placements that fit
    shrink_error: float | None  # change of the best's tokens/s on twice the replicas; None if that is unknown

    @property
    def best(self) -> Ranked:
        """The first choice."""
        return self.ranked[0]

    def cost(self, ranked: Ranked) -> float | None:
        """Return the price of 1,000 steps on all GPUs of the request; None without a price."""
        price = self.request.price
        hours = 1000.0 * ranked.step_s / 3600.0
        return None if price is None else hours * self.request.fleet.gpus * price

    def learner_memory(self, ranked: Ranked) -> Parts:
        """Return the peak bytes of a learner GPU by part; of a shared GPU in the learner's turn."""
        return gpu_bytes(self.request, ranked.placement)[0]

    def learner_host(self, ranked: Ranked) -> float:
        """Return the bytes that a learner GPU has in the host's memory."""
        where = ranked.placement
        tokens = where.pack_tokens // where.context_parallel
        return host_inputs(self.request.shape, where.recompute, tokens=tokens)

    def engine_memory(self, ranked: Ranked) -> Parts:
        """Return the bytes of a replica's GPU by part; of a shared GPU in the replicas' turn."""
        return gpu_bytes(self.request, ranked.placement)[1]


class JudgeAll(Protocol):
    """Simulates placements with a seed, on `times` as many replicas as usual; None where no time is left."""

    def __call__(
        self, placements: Sequence[FleetPlacement], seed: int, times: int = 1, /
    ) -> Sequence[Judgement | None]:
        """Return the judgement of each placement."""
        ...


Estimates = dict[FleetPlacement, PlacementEstimate]
Judged = dict[FleetPlacement, Judgement]
FormulaClass = tuple[Schedule, int]  # schedule and depth of admission, or `SHARED`; one factor corrects a class
FormulaClasses = dict[FleetPlacement, FormulaClass]


def plan_by_formula(request: PlanRequest) -> RankedPlan:
    """Rank the placements of a request by formula alone. Raises `ConfigError` if none fits."""
    estimates = {placement: estimate(request, placement) for placement in placements(request)}
    return _ranked_plan(request, estimates, {}, shrink_error=None)


def make_plan(request: PlanRequest, *, judge_all: JudgeAll | None = None) -> RankedPlan:
    """Rank the placements of a request; `judge_all` simulates them. Raises `ConfigError` if none fits.

    Where no simulation ends in time, the plan is by formula alone.
    """
    judge_all = judge_all or _judge_here(request)
    estimates = {placement: estimate(request, placement) for placement in placements(request)}
    classes = {placement: _formula_class(request, placement) for placement in estimates}
    judged: Judged = {}
    chosen = _first_round(estimates, classes)
    while chosen:
        found = judge_all(chosen, 0)
        if None in found and not judged:  # a part of the classes would win over all others
            return _ranked_plan(request, estimates, {}, shrink_error=None)
        judged.update((one, result) for one, result in zip(chosen, found, strict=True) if result is not None)
        if None in found:
            return _ranked_plan(request, estimates, judged, shrink_error=None)
        chosen = _next_round(estimates, classes, judged)[: MOST - len(judged)]
    judged |= _judge_ties(judged, judge_all)
    made = _ranked_plan(request, estimates, judged, shrink_error=None)
    best = made.best.placement
    return replace(made, shrink_error=_shrink_error(best, judged[best], judge_all))


def _judge_here(request: PlanRequest) -> JudgeAll:
    """Return a function that simulates placements one by one in this process."""

    def judge_all(placements: Sequence[FleetPlacement], seed: int, times: int = 1) -> list[Judgement]:
        return [judge(request, placement, seed=seed, times=times) for placement in placements]

    return judge_all


def _ranked_plan(
    request: PlanRequest, estimates: Estimates, judged: Judged, *, shrink_error: float | None
) -> RankedPlan:
    """Rank the simulated placements; all by formula if none was simulated."""
    ranked = [
        Ranked(placement=placement, estimate=estimates[placement], judgement=judged.get(placement))
        for placement in judged or estimates
    ]
    best = max(candidate.tokens_per_s for candidate in ranked)
    ranked.sort(key=lambda candidate: (_tied_gpus(candidate, best), -candidate.tokens_per_s))
    return RankedPlan(
        request=request,
        ranked=tuple(_first_of_each_split(ranked)),
        considered=len(estimates),
        shrink_error=shrink_error,
    )


def _tied_gpus(candidate: Ranked, best: float) -> float:
    """Return the learner GPUs of a placement that is as fast as the best; of others infinity, so they come later.

    Ranks that gain less than the error of the figures are better used to generate.
    """
    return candidate.placement.learner_gpus if candidate.tokens_per_s >= (1.0 - ALIKE) * best else inf


def _formula_class(request: PlanRequest, placement: FleetPlacement) -> FormulaClass:
    """Return a placement's schedule, and `SHARED`, or under `async` the nearest depth of admission, else 0."""
    if placement.shared:
        return placement.schedule, SHARED
    if placement.schedule is not Schedule.ASYNC:
        return placement.schedule, 0
    shares = placement.batch_per_replica * placement.replicas / request.new_per_step
    return placement.schedule, min(DEPTHS, key=lambda depth: abs(log2(shares / depth)))


def _first_round(estimates: Estimates, classes: FormulaClasses) -> list[FleetPlacement]:
    """Return the best placements by formula, and the best of every formula class."""
    order = sorted(estimates, key=lambda placement: -estimates[placement].tokens_per_s)
    firsts = {classes[placement]: placement for placement in reversed(order)}
    return list(dict.fromkeys([*order[:FIRST], *firsts.values()]))


def _next_round(estimates: Estimates, classes: FormulaClasses, judged: Judged) -> list[FleetPlacement]:
    """Return the placements to simulate next: neighbours of the best so far, and the best by corrected formula."""
    rates = _corrected_rates(estimates, classes, judged)
    fresh = sorted((p for p in estimates if p not in judged), key=lambda placement: -rates[placement])
    near = _neighbours(max(judged, key=lambda placement: judged[placement].tokens_per_s), estimates)
    beside = [placement for placement in fresh if placement in near][:BESIDE]
    return [*beside, *[placement for placement in fresh if placement not in beside][:OTHERS]]


def _corrected_rates(estimates: Estimates, classes: FormulaClasses, judged: Judged) -> dict[FleetPlacement, float]:
    """Return tokens/s by formula times the median share that simulations of the formula class have reached."""
    shares: dict[FormulaClass, list[float]] = {}
    for placement, judgement in judged.items():
        share = judgement.tokens_per_s / estimates[placement].tokens_per_s
        shares.setdefault(classes[placement], []).append(share)
    return {
        placement: formula.tokens_per_s * median(shares[classes[placement]])
        for placement, formula in estimates.items()
    }


def _judge_ties(judged: Judged, judge_all: JudgeAll) -> Judged:
    """Judge the placements close to the best with more seeds; return nothing if the best is alone."""
    order = sorted(judged, key=lambda placement: -judged[placement].tokens_per_s)
    least = (1.0 - TIED) * judged[order[0]].tokens_per_s
    tied = [placement for placement in order[:MOST_TIED] if judged[placement].tokens_per_s >= least]
    if len(tied) == 1:
        return {}
    found: list[list[Judgement]] = [[judged[placement]] for placement in tied]
    for seed in SEEDS:
        for judgements, another in zip(found, judge_all(tied, seed), strict=True):
            if another is None:
                return {}  # no time is left, and all keep one seed
            judgements.append(another)
    return {placement: mean_judgement(each) for placement, each in zip(tied, found, strict=True)}


def _neighbours(best: FleetPlacement, estimates: Estimates) -> set[FleetPlacement]:
    """Return placements one learner size or replica size from the best, with about as many live trajectories."""
    alike = (best.schedule, bool(best.shared))
    same = [placement for placement in estimates if (placement.schedule, bool(placement.shared)) == alike]
    sizes = sorted({placement.learner_gpus for placement in same})
    degrees = sorted({placement.tensor_parallel for placement in same})

    def steps(placement: FleetPlacement) -> int:
        size = abs(sizes.index(placement.learner_gpus) - sizes.index(best.learner_gpus))
        return size + abs(degrees.index(placement.tensor_parallel) - degrees.index(best.tensor_parallel))

    def live_over_best(placement: FleetPlacement) -> float:
        return placement.batch_per_replica * placement.replicas / (best.batch_per_replica * best.replicas)

    return {p for p in same if steps(p) == 0 or (steps(p) == 1 and 0.7 < live_over_best(p) < 1.5)}


def _first_of_each_split(ranked: Iterable[Ranked]) -> list[Ranked]:
    """Keep the first placement of each schedule, learner size, tensor parallelism and number of shared GPUs."""
    seen: set[tuple[Schedule, int, int, int]] = set()
    kept = []
    for candidate in ranked:
        placement = candidate.placement
        split = (placement.schedule, placement.learner_gpus, placement.tensor_parallel, placement.shared)
        if split not in seen:
            seen.add(split)
            kept.append(candidate)
    return kept


def _shrink_error(placement: FleetPlacement, judgement: Judgement, judge_all: JudgeAll) -> float | None:
    """Return how much the best plan's tokens/s change when the fleet doubles; this bounds the scaling error.

    A plan is simulated on fewer replicas than it has. Returns None where the simulation had all replicas, and
    without time for another.
    """
    if judgement.replicas >= placement.replicas:
        return None
    (doubled,) = judge_all([placement], 0, 2)
    return None if doubled is None else doubled.tokens_per_s / judgement.tokens_per_s - 1.0
