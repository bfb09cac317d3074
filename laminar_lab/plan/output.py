"""A plan as sentences and as the record of `--json`. Called by `laminar plan`."""

import math
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np

from laminar_lab.doctor.gpu_formula import Parts
from laminar_lab.plan.planner import TIED, Ranked, RankedPlan
from laminar_lab.plan.request import P99, PlanRequest
from laminar_lab.plan.stages import PlacementEstimate
from laminar_lab.report.diagnosis import Bottleneck
from laminar_lab.report.mean_step import StepStage
from laminar_py.config.rollout import Schedule
from laminar_py.records.host import counted

# decoding with block fp8 over bf16 by sequences, a 7B on one H100: tables of aiconfigurator 0.12.0 (SGLang 0.5.14)
FP8_GPUS, FP8_MODELS = ("H100", "H200"), ("qwen2", "qwen3")
FP8_BATCHES, FP8_SPEED = (1, 16, 64), (1.41, 1.40, 1.24)


class PlacementRow(msgspec.Struct, frozen=True, kw_only=True):
    """A placement, with figures of the whole fleet; None where it was not simulated."""

    schedule: str
    learner_gpus: int
    replicas: int
    tensor_parallel: int
    max_batch: int
    batch_per_replica: int
    pack_tokens: int
    recompute: str
    shared: int  # replicas that take turns with the learner on its GPUs
    keeps_cache: bool  # in the learner's turn
    tokens_per_s: float
    step_s: float
    staleness_mean: float | None
    staleness_max: int | None
    versions_alive: int | None
    kv_use: float | None
    binds: str
    binds_next: str
    generation_s: float
    learner_s: float
    weights_s: float
    freshness_s: float
    cost: float | None  # of 1,000 steps
    learner_memory: Parts
    learner_host: float  # bytes of each learner GPU in the host's memory
    engine_memory: Parts


class PlanOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The object of `--json`."""

    model: str
    fleet: str
    price: float | None
    words: list[str]
    rows: list[PlacementRow]
    formulas: list[tuple[str, str, str]]
    considered: int
    shrink_error: float | None


def make_output(plan: RankedPlan) -> PlanOutput:
    """Make the object of `--json`."""
    request = plan.request
    fleet = request.fleet
    return PlanOutput(
        model=request.model,
        fleet=f"{fleet.nodes} x {fleet.per_node} {fleet.gpu.name}",
        price=request.price,
        words=list(describe_plan(plan)),
        rows=[_row(plan, ranked) for ranked in plan.ranked],
        formulas=[(formula.name, formula.text, formula.result) for formula in plan.best.estimate.formulas],
        considered=plan.considered,
        shrink_error=plan.shrink_error,
    )


def _row(plan: RankedPlan, ranked: Ranked) -> PlacementRow:
    """Make the table row of a placement: its settings, simulated figures, formula seconds, cost and memory."""
    placement, times = ranked.placement, ranked.estimate.times
    figures = None if ranked.judgement is None else ranked.judgement.figures
    return PlacementRow(
        schedule=str(placement.schedule),
        learner_gpus=placement.learner_gpus,
        replicas=placement.replicas,
        tensor_parallel=placement.tensor_parallel,
        max_batch=placement.max_batch,
        batch_per_replica=placement.batch_per_replica,
        pack_tokens=placement.pack_tokens,
        recompute=str(placement.recompute),
        shared=placement.shared,
        keeps_cache=placement.keeps_cache,
        tokens_per_s=ranked.tokens_per_s,
        step_s=ranked.step_s,
        staleness_mean=None if figures is None else figures.staleness_mean,
        staleness_max=None if figures is None else figures.staleness_max,
        versions_alive=None if figures is None else figures.versions_alive_max,
        kv_use=None if figures is None else figures.kv_use,
        binds=ranked.estimate.binds.value,
        binds_next=ranked.estimate.binds_next.value,
        generation_s=times.generation_s,
        learner_s=times.learner_s,
        weights_s=times.weights_s,
        freshness_s=ranked.estimate.freshness_s,
        cost=plan.cost(ranked),
        learner_memory=plan.learner_memory(ranked),
        learner_host=plan.learner_host(ranked),
        engine_memory=plan.engine_memory(ranked),
    )


# ---- sentences


def describe_workload(request: PlanRequest) -> str:
    """Return two lines with the work of a step that a plan is made for, and the learner's assumed speed."""
    lengths = request.lengths
    p99 = lengths.median * math.exp(P99 * lengths.sigma)
    stale = "no bound on staleness" if request.max_staleness is None else f"staleness {request.max_staleness}"
    again = f" {request.replayed_groups} of them replayed," if request.replayed_groups else ""
    speed = f"learner MFU {request.mfu:g} (--mfu)" if request.measured is None else "speeds of --profile"
    return (
        f"a step: {request.prompts_per_step} prompts of {lengths.prompt:,} tokens x {request.group_size} samples,"
        f"{again} {stale}\n{speed}; response tokens p50 {lengths.median:,.0f}, p99 {p99:,.0f}, cap {lengths.cap:,}"
    )


def describe_plan(plan: RankedPlan) -> Iterator[str]:
    """Describe the first choice, why the second is slower, and the error of the figures."""
    best = plan.best
    bottlenecks = f"{best.estimate.binds.value} binds, then {best.estimate.binds_next.value}"
    yield f"first: {_name(best)}; by formula {bottlenecks}"
    placement = best.placement
    sharing = placement.context_parallel
    shared = f" on {sharing} ranks that share it" if sharing > 1 else ""
    is_async = placement.schedule is Schedule.ASYNC
    admits = f" admits {placement.batch_per_replica} trajectories under a version and" if is_async else ""
    yield (
        f"each replica{admits} decodes at most {placement.max_batch} at a time; a microbatch has"
        f" {placement.pack_tokens:,} tokens{shared}, recompute {placement.recompute}"
    )
    if len(plan.ranked) > 1:
        yield _second(best, plan.ranked[1])
    yield from with_fp8(plan)
    if best.judgement is None:
        yield f"{plan.considered} placements fit; these are ranked by formula alone"
        return
    error = best.estimate.tokens_per_s / best.tokens_per_s - 1
    yield f"{plan.considered} placements fit, and the planner simulated the likeliest of them"
    shrunk = f"{best.judgement.replicas} of {counted(placement.replicas, 'replica')}"
    if plan.shrink_error is not None:
        shrunk = f"{shrunk} ({plan.shrink_error:+.0%} tokens/s on twice as many)"
    yield (
        f"the first was simulated on {shrunk}; its formulas give {abs(error):.0%}"
        f" {'more' if error > 0 else 'fewer'} tokens/s than its simulation"
    )


def with_fp8(plan: RankedPlan) -> Iterator[str]:
    """Describe the first choice with weights rounded to fp8, by formula and published speeds of decoding.

    Nothing where a run refuses to round, or where the published speeds do not hold.
    """
    request, best = plan.request, plan.best
    if (
        request.learner.lora
        or request.shape.model_type not in FP8_MODELS
        or request.fleet.gpu.name not in FP8_GPUS
    ):
        return
    batch = min(best.placement.max_batch, best.placement.batch_per_replica)
    factor = float(np.interp(math.log(batch), np.log(FP8_BATCHES), FP8_SPEED))
    faster = replace(best.estimate, times=best.estimate.times.faster(StepStage.GENERATION, factor))
    yield (
        f"with rollout.engine.quantization=fp8 by formula {faster.tokens_per_s:,.0f} tokens/s in place of"
        f" {best.estimate.tokens_per_s:,.0f}: published tables have decoding {factor:.2f} times as fast for a 7B"
        f" on H100 at {counted(batch, 'sequence')}; not measured"
    )


def _second(first: Ranked, second: Ranked) -> str:
    """Describe the second choice, and why it is slower than the first."""
    share = max(0.0, 1.0 - second.tokens_per_s / first.tokens_per_s)
    begun = f"second: {_name(second)}; {share:.0%} less"
    if share < TIED and first.judgement is None:
        return f"{begun}, too little for formulas to separate the two"
    if share < TIED:
        return f"{begun}, too little for simulations of this size to separate the two"
    best, other = first.estimate, second.estimate
    if other.schedule is not best.schedule:
        steps = (
            f"under {other.schedule} a step takes {other.step_s:.1f} s, under {best.schedule} {best.step_s:.1f}"
        )
        return f"{begun}: by formula {steps}"
    best_s, other_s = _seconds_by_bottleneck(best), _seconds_by_bottleneck(other)
    slower = max(other_s, key=lambda stage: other_s[stage] - best_s[stage])
    if other_s[slower] <= best_s[slower]:
        return f"{begun}; the simulation shows that, and no formula explains it"
    return (
        f"{begun}: {slower.value} takes {other_s[slower]:.1f} s of a step, and {best_s[slower]:.1f} s in the first"
    )


def _seconds_by_bottleneck(estimate: PlacementEstimate) -> dict[Bottleneck, float]:
    """Return the seconds of each stage in a step by formula, keyed by the bottleneck that the stage can be."""
    times = estimate.times
    return {
        Bottleneck.GENERATION: times.generation_s,
        Bottleneck.LEARNER: times.learner_s,
        Bottleneck.WEIGHTS: times.weights_s,
        Bottleneck.FRESHNESS: estimate.freshness_s,
    }


def _name(ranked: Ranked) -> str:
    placement = ranked.placement
    trained = f"{placement.schedule}, {counted(placement.learner_gpus, 'GPU')} to train"
    generate = f"{counted(placement.replicas, 'replica')} of {placement.tensor_parallel} to generate"
    return f"{trained}, {generate}" + (f", {placement.shared} on the learner's GPUs" if placement.shared else "")
