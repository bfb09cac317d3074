"""Sentences about a plan: what binds, why the second is not the first, how far the figures go. Pure."""

from collections.abc import Iterator

from laminar_py.analytics.triage.remedies import Wall
from laminar_py.config.staleness import Schedule
from laminar_py.plan.planner import Ranked, RankedPlan
from laminar_py.plan.stages import PlacementEstimate

CLOSE = 0.03  # share of tokens/s within which two placements are alike


def tell(plan: RankedPlan) -> Iterator[str]:
    """Lines under the tables."""
    best, fleet = plan.best, plan.request.fleet
    used = best.placement.learner_gpus + best.placement.rollout_gpus
    idle = f"; {fleet.gpus - used} of {fleet.gpus} GPUs stay idle" if used < fleet.gpus else ""
    yield (
        f"first: {_name(best)}; {best.estimate.binds.value} binds, with twice of that it would be"
        f" {best.estimate.binds_next.value}{idle}"
    )
    if len(plan.ranked) > 1:
        yield _second(best, plan.ranked[1])
    yield (
        f"of {plan.considered} placements that fit, {len(plan.ranked)} kinds were simulated on"
        f" {best.judgement.replicas} replicas of theirs; the first has {plan.shrink_error:+.0%} on twice as many;"
        f" the formulas said {best.estimate.tokens_per_s / best.tokens_per_s - 1:+.0%} of what it does"
    )


def _second(first: Ranked, second: Ranked) -> str:
    share = 1.0 - second.tokens_per_s / first.tokens_per_s
    if share < CLOSE:
        return (
            f"second: {_name(second)}; {share:.0%} less, which is within what simulations of this size tell apart"
        )
    then, now = _seconds(first.estimate), _seconds(second.estimate)
    wall = max(now, key=lambda one: now[one] - then[one])
    return (
        f"second: {_name(second)}; {share:.0%} less: {wall.value} takes {now[wall]:.1f} s of a step, and"
        f" {then[wall]:.1f} s in the first"
    )


def _seconds(estimate: PlacementEstimate) -> dict[Wall, float]:
    times = estimate.times
    return {
        Wall.GENERATION: times.generation_s,
        Wall.LEARNER: times.learner_s,
        Wall.WEIGHTS: times.weights_s,
        Wall.FRESHNESS: estimate.freshness_s,
    }


def _name(ranked: Ranked) -> str:
    place = ranked.placement
    how = {Schedule.ASYNC: "async", Schedule.ONE_STEP: "one_step", Schedule.SYNC: "sync"}[place.schedule]
    return f"{how}, {place.learner_gpus} GPUs train, {place.replicas} replicas of {place.tensor_parallel} generate"
