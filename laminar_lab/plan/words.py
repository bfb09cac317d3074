"""Sentences about a plan: what binds, why the second is not the first, how far the figures go. Pure."""

from collections.abc import Iterator

from laminar_lab.plan.planner import Ranked, RankedPlan
from laminar_lab.plan.stages import PlacementEstimate
from laminar_py.config.rollout import Schedule
from laminar_py.observe import Wall

CLOSE = 0.03  # share of tokens/s within which two placements are alike


def tell(plan: RankedPlan) -> Iterator[str]:
    """Lines under the tables."""
    best = plan.best
    walls = f"{best.estimate.binds.value} binds, then {best.estimate.binds_next.value}"
    yield f"first: {_name(best)}; by formula {walls}"
    place = best.placement
    admits = f" admits {place.batch_per_replica} trajectories under a version and"
    yield (
        f"each replica{admits if place.schedule is Schedule.ASYNC else ''} decodes at most {place.max_batch} at a"
        f" time; a microbatch has {place.pack_tokens:,} tokens, recompute {place.recompute}"
    )
    if len(plan.ranked) > 1:
        yield _second(best, plan.ranked[1])
    error = best.estimate.tokens_per_s / best.tokens_per_s - 1
    shrunk = "all its replicas"
    if plan.shrink_error is not None:
        shrunk = f"{best.judgement.replicas} of its replicas, and on twice as many it has {plan.shrink_error:+.0%}"
    yield (
        f"{plan.considered} placements fit; the likeliest were simulated, the first on {shrunk}; its formulas say"
        f" {abs(error):.0%} {'more' if error > 0 else 'less'} than the simulator"
    )


def _second(first: Ranked, second: Ranked) -> str:
    share = 1.0 - second.tokens_per_s / first.tokens_per_s
    begun = f"second: {_name(second)}; {share:.0%} less"
    if share < CLOSE:
        return f"{begun}, which is within what simulations of this size tell apart"
    before, now = first.estimate, second.estimate
    if now.schedule is not before.schedule:
        steps = (
            f"under {now.schedule} a step takes {now.step_s:.1f} s, under {before.schedule} {before.step_s:.1f}"
        )
        return f"{begun}: by formula {steps}"
    then, later = _seconds(before), _seconds(now)
    wall = max(later, key=lambda one: later[one] - then[one])
    if later[wall] <= then[wall]:
        return f"{begun}, which the simulator tells and no formula"
    return f"{begun}: {wall.value} takes {later[wall]:.1f} s of a step, and {then[wall]:.1f} s in the first"


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
    trained = f"{place.schedule}, {place.learner_gpus} GPUs train"
    return f"{trained}, {place.replicas} replicas of {place.tensor_parallel} generate"
