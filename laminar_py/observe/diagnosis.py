"""Diagnosis of a run: the binding wall by name, its evidence, what to change first, and what that can gain.

A wall is judged by the goodput that would be there without it, so one that does not bind gains nothing. Pure;
called by `triage.report`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from laminar_py.config.rollout import Schedule
from laminar_py.config.run import RunConfig
from laminar_py.observe.mean_step import MeanStep, StageTimes, StepStage, Use, compose, predict
from laminar_py.observe.remedies import Remedy, Wall, remedies

WORTH_A_WORD = 0.05  # share that a bound on staleness costs, below which it fits
SPARSE = 0.5  # share of the groups without any success from which on that may be the wall
STAGE_OF = {Wall(stage): stage for stage in StepStage}  # a wall that is a stage has its name
SCALED = {  # settings that give a stage so many times as much as they grow
    "rollout.replicas": StepStage.GENERATION,
    "rollout.max_batch": StepStage.GENERATION,
    "environment.workers": StepStage.ENVIRONMENT,
    "environment.at_once": StepStage.ENVIRONMENT,
    "reward.workers": StepStage.REWARD,
    "learner.world_size": StepStage.LEARNER,
    "packer.max_tokens": StepStage.LEARNER,
    "relay.max_bytes_per_s": StepStage.WEIGHTS,
}
IN_FLIGHT = ("rollout.batch_per_replica", "rollout.max_batch")  # hide environments, where these are the wall


@dataclass(frozen=True, slots=True)
class JudgedWall:
    """A wall, e.g. LEARNER: without it goodput would be 1.3 times as high, and no change of it gains more."""

    wall: Wall
    gain: float
    evidence: str
    remedies: tuple[Remedy, ...]  # the first is to be tried first


class BoundSide(StrEnum):
    """Side on which a bound on staleness costs more."""

    TIGHT = "too tight"
    LOOSE = "too loose"
    NEITHER = "neither too tight nor too loose"


@dataclass(frozen=True, slots=True)
class BoundFit:
    """Costs of the bound on staleness, e.g. `BoundFit(BoundSide.LOOSE, 2, 0.01, 0.38)`."""

    side: BoundSide
    max_staleness: int | None
    idle: float  # share of the goodput that waits, or is dropped, for freshness
    lost: float  # share of the weight that age has taken from the data


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Wall of a run, the wall that would follow it, and what the schedule has to do with them."""

    mean_step: MeanStep
    binding: JudgedWall
    next: JudgedWall  # once the first is gone
    under: dict[Schedule, float]  # seconds of a step: as measured, and predicted under the other schedules
    walls_under: dict[Schedule, StepStage]  # what takes most of such a step
    bound: BoundFit | None  # None under schedules that bound staleness by themselves


def diagnose(step: MeanStep, config: RunConfig) -> Diagnosis:
    """Name the wall that binds, and the one that would follow it."""
    gains = _gains(step)
    wall = _largest(gains, step)
    after_it = _without(wall, step)
    later = {name: gain for name, gain in _gains(after_it).items() if name is not wall}
    following = _largest(later, after_it)
    binding, after = (
        JudgedWall(name, gain, evidence(name, step), remedies(name, config, step))
        for name, gain in ((wall, gains[wall]), (following, later[following]))
    )
    under = {schedule: _times_under(schedule, step) for schedule in Schedule}
    bounded = step.schedule is Schedule.ASYNC
    return Diagnosis(
        mean_step=step,
        binding=binding,
        next=after,
        under={
            schedule: step.measured_s if schedule is step.schedule else max(compose(schedule, times), step.cpu_s)
            for schedule, times in under.items()
        },
        walls_under={schedule: max(StepStage, key=times.of) for schedule, times in under.items()},
        bound=fit_bound(step, config.staleness.max_staleness, gains[Wall.FRESHNESS]) if bounded else None,
    )


def fit_bound(step: MeanStep, max_staleness: int | None, gain: float) -> BoundFit:
    """Side on which the bound costs more; `gain` is what goodput would be without it, over what it is."""
    idle, lost = 0.0 if max_staleness is None else 1 - 1 / max(gain, 1.0), step.age.lost
    if max(idle, lost) < WORTH_A_WORD:
        return BoundFit(BoundSide.NEITHER, max_staleness, idle, lost)
    return BoundFit(BoundSide.TIGHT if idle >= lost else BoundSide.LOOSE, max_staleness, idle, lost)


def what_if(step: MeanStep, stage: StepStage, factor: float = 2.0) -> float:
    """Predicted seconds of a step with `factor` times as much of a stage, e.g. twice the replicas.

    Never less than its work takes all cores, which more processes share.
    """
    times = step.times
    predicted = predict(step.schedule, measured_s=step.measured_s, now=times, then=times.faster(stage, factor))
    return max(predicted, min(step.cpu_s, step.measured_s))


def what_if_set(step: MeanStep, wall: Wall, remedy: Remedy) -> float:
    """Predicted seconds of a step, at best, once a setting has the value that a remedy against that wall names.

    One that does not scale a stage takes the wall away.
    """
    stage = scaled_by(wall, remedy)
    if stage is not None:
        return what_if(step, stage, float(remedy.new) / float(remedy.old))
    return max(_without(wall, step).measured_s, min(step.cpu_s, step.measured_s))


def scaled_by(wall: Wall, remedy: Remedy) -> StepStage | None:
    """Stage that a remedy against that wall divides by as much as its setting grows; None: no such stage."""
    if wall is Wall.ENVIRONMENT and remedy.key in IN_FLIGHT:
        return StepStage.ENVIRONMENT
    return SCALED.get(remedy.key)


def evidence(wall: Wall, step: MeanStep) -> str:
    """Evidence for a wall, in one line."""
    times, whole_s = step.times, step.measured_s

    def share(seconds: float) -> str:
        return f"{seconds / whole_s:.0%}" if whole_s else "0%"

    match wall:
        case Wall.GENERATION:
            busy = share(times.generation_s)
            waits = f"the learner waits for a batch {share(step.waited_s)}"
            return f"replicas are busy {busy} of the time{_filled(step)}; {waits}"
        case Wall.LONG_TAIL:
            few = f"replicas have less than a quarter of their usual batch {share(times.tail_s)} of the time"
            return f"{few}, held by the last long responses; p95 of lengths is {step.length_ratio:.1f} x p50"
        case Wall.ENVIRONMENT:
            waits = f"replicas wait for their trajectories' environments {share(times.environment_s)} of the time"
            return f"{waits}; about {step.away:.0f} are away at a time, p95 of a turn is {step.turn_p95_s:.2f} s"
        case Wall.REWARD:
            busy = share(times.reward_s)
            return f"scorers are busy {busy} of the time; p95 of a reward is {step.reward_p95_s:.2f} s"
        case Wall.REFERENCE:
            where = "in the learner" if step.reference_in_learner else "as a stage"
            return f"the reference model works {share(step.reference_s)} of the time, {where}"
        case Wall.LEARNER:
            idle = share(step.held_s)
            busy = share(times.learner_s)
            return f"the learner is busy {busy} of the time; replicas are idle {idle}, with no room to begin"
        case Wall.WEIGHTS:
            late, way = share(times.weights_s), f"{step.transfer_s:.2f} s"
            return f"replicas are idle {late} of the time, waiting for newer weights: {way} a step on the way"
        case Wall.FRESHNESS:
            idle = share(step.held_s)
            held = f"replicas are idle {idle} of the time: nothing may begin, though no stage fills the step"
            if not step.stale_share:
                return held
            return f"{held}, and {step.stale_share:.0%} of the tokens are dropped as too old"
        case Wall.STALE_DATA:
            return f"{step.age.lost:.0%} of the weight of what is trained on is gone: {tell_divergence(step)}"
        case Wall.CPU:
            cpu, cores = (step.use.cpu, step.use.cores) if step.use is not None else (0.0, 0)
            return f"processes keep {cpu:.0%} of the {cores} cores busy; most of a step takes {_longest(step)}"
        case Wall.SPARSE_REWARD:
            return f"in {step.hopeless_share:.0%} of the groups no member had any success"


def _filled(step: MeanStep) -> str:
    if step.use is None:
        return ""
    return f", with {step.use.slots:.0%} of their slots and {step.use.kv:.0%} of their KV caches in use"


def tell_divergence(step: MeanStep) -> str:
    """KL of old data, in one phrase."""
    if not step.age.kl:
        return "KL by staleness is not on record"
    values, ages = ", ".join(f"{value:.1g}" for value in step.age.kl.values()), ", ".join(step.age.kl)
    return f"KL {values} nats at staleness {ages}"


def _longest(step: MeanStep) -> StepStage:
    return max(StepStage, key=step.times.of)


def _gains(step: MeanStep) -> dict[Wall, float]:
    """Goodput without each wall over goodput now."""
    now = _useful(step) / max(step.measured_s, 1e-9)
    gains = {}
    for wall in Wall:
        without = _without(wall, step)
        gains[wall] = _useful(without) / max(without.measured_s, 1e-9) / max(now, 1e-12)
    return gains


def _largest(gains: dict[Wall, float], step: MeanStep) -> Wall:
    """The wall with most to gain; of those that gain alike, the one that takes more of the step."""
    times = step.times
    seconds = {wall: times.of(stage) for wall, stage in STAGE_OF.items()}
    seconds |= {Wall.LONG_TAIL: times.tail_s, Wall.GENERATION: times.generation_s - times.tail_s}
    return max(gains, key=lambda wall: (round(gains[wall], 2), seconds.get(wall, 0.0)))


def _useful(step: MeanStep) -> float:
    return (1 - step.stale_share) * (1 - step.hopeless_share) * (1 - step.age.lost)


def _without(wall: Wall, step: MeanStep) -> MeanStep:
    """Mean step if that wall were not there; of full cores, if they were twice as many."""
    times = step.times
    shortest_s = min(step.cpu_s, step.measured_s) if step.cores_full else 0.0
    match wall:
        case Wall.CPU:
            return replace(step, measured_s=step.measured_s - shortest_s / 2, cpu_s=0.0) if shortest_s else step
        case Wall.STALE_DATA:
            return replace(step, age=replace(step.age, lost=0.0))
        case Wall.SPARSE_REWARD:
            return replace(step, hopeless_share=0.0) if step.hopeless_share > SPARSE else step
        case Wall.FRESHNESS if step.schedule is Schedule.ASYNC:
            composed = compose(step.schedule, times)
            measured = min(max(composed, shortest_s), step.measured_s)
            return replace(step, measured_s=measured, held_s=0.0, stale_share=0.0)
        case Wall.FRESHNESS:
            return replace(step, stale_share=0.0)
        case Wall.LONG_TAIL:
            then = times.without_tail()
        case Wall.REFERENCE if step.reference_in_learner:
            then = replace(times, learner_s=max(0.0, times.learner_s - step.reference_s))
        case _:
            then = times.without(STAGE_OF[wall])
    measured = predict(step.schedule, measured_s=step.measured_s, now=times, then=then)
    return replace(step, times=then, measured_s=max(measured, shortest_s))


def _times_under(schedule: Schedule, step: MeanStep) -> StageTimes:
    """Times of stages under a schedule; a batch that is waited for takes as long as its longest trajectory."""
    times = step.times
    if schedule in (step.schedule, Schedule.ASYNC):
        return times
    moved = max(times.weights_s, step.transfer_s + step.load_s)
    longer = max(1.0, step.longest_s / max(times.generation_s + times.environment_s, 1e-9))
    return replace(
        times,
        generation_s=times.generation_s * longer,
        environment_s=times.environment_s * longer,
        weights_s=moved,
    )


NO_STEP = "no learner step was completed, so what limits the run cannot be told"
TOLD_S = 0.005  # of a stage: less is not worth a word
NEXT_REMEDIES = 2
HOW = {
    Schedule.SYNC: "one after another",
    Schedule.ONE_STEP: "a batch ahead",
    Schedule.ASYNC: "side by side",
}
MEANINGS = {
    Wall.GENERATION: "Replicas generate as fast as they can, and the rest of the run waits for them.",
    Wall.LONG_TAIL: "A few long responses keep replicas nearly empty while everybody waits for the last of them.",
    Wall.ENVIRONMENT: "Trajectories wait for their environments, and too few others are there to fill the slots.",
    Wall.REWARD: "Responses are finished faster than they are scored.",
    Wall.REFERENCE: "The reference model's pass takes more of a step than anything that could go on beside it.",
    Wall.WEIGHTS: "New weights are so long on their way to the replicas that these stand empty meanwhile.",
    Wall.LEARNER: "Trajectories are there faster than the learner trains on them.",
    Wall.FRESHNESS: "The bound on staleness keeps the replicas from beginning new work, though nothing is busy.",
    Wall.STALE_DATA: "Weights have moved so far from those that drew the data that much of it hardly counts.",
    Wall.SPARSE_REWARD: "Most of what is generated never succeeds, and teaches nothing.",
    Wall.CPU: "Processes fill the machine's cores: more of them would share these, and be no faster.",
}


def wall_rows(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Rows of a heading and its words."""
    binding, following, step = diagnosis.binding, diagnosis.next, diagnosis.mean_step
    yield "limited by", f"{str(binding.wall).upper()}: {binding.evidence}"
    first, *others = binding.remedies
    yield "change first", str(first)
    if others:
        yield "or instead", ", or ".join(f"{remedy.key} {remedy.change}" for remedy in others[:NEXT_REMEDIES])
    without = "with twice the cores" if binding.wall is Wall.CPU else "without it"
    yield without, f"{_gain(binding.gain)}; then {following.wall} limits, now: {following.evidence}"
    if diagnosis.bound is not None:
        yield "staleness", tell_bound(diagnosis.bound, step)
    if step.use is not None:
        yield "in use", tell_use(step.use)
    stages = f"its stages, {HOW[step.schedule]} (schedule={step.schedule}): {_stages(step)}"
    yield "a step", f"takes {step.measured_s:.2f} s; {stages}"
    twice = ", ".join(_twice(step))
    if twice:
        yield "it would take", f"with twice {twice}"
    others_s = (schedule for schedule in Schedule if schedule is not step.schedule)
    words = (f"schedule={s} {diagnosis.under[s]:.2f} s (most of it {diagnosis.walls_under[s]})" for s in others_s)
    yield "", f"with {', with '.join(words)}"


def tell_bound(bound: BoundFit, step: MeanStep) -> str:
    """The bound on staleness, and which of its two costs is larger, in one line."""
    lost = f"{bound.lost:.0%} of the weight is gone"
    kl = tell_divergence(step)
    if bound.max_staleness is None:
        return f"staleness.max_staleness=null: nothing bounds staleness; {lost} ({kl})"
    idle = f"{bound.idle:.0%} of the goodput is lost to idle replicas and dropped work"
    first, second = (lost, idle) if bound.side is BoundSide.LOOSE else (idle, lost)
    return f"staleness.max_staleness={bound.max_staleness} is {bound.side}: {first}; {second} ({kl})"


def tell_use(use: Use) -> str:
    """Use of slots, KV caches and cores, in one line."""
    engines = f"{use.slots:.0%} of the engines' slots, {use.kv:.0%} of their KV caches"
    return f"{engines}, {use.cpu:.0%} of {use.cores} cores" if use.cores else engines


def _gain(gain: float) -> str:
    times = f"at most {gain:.2f} x" if gain < 100 else "more than 100 x"
    return f"{times} the goodput (useful trained tokens per second)"


def _stages(step: MeanStep) -> str:
    times = {stage: step.times.of(stage) for stage in StepStage}
    shown = {stage: f"{stage} {seconds:.2f} s" for stage, seconds in times.items() if seconds >= TOLD_S}
    if StepStage.GENERATION in shown and step.times.tail_s >= TOLD_S:
        shown[StepStage.GENERATION] += f" ({step.times.tail_s:.2f} s of it with the last few responses)"
    if StepStage.LEARNER in shown and step.reference_in_learner and step.reference_s >= TOLD_S:
        shown[StepStage.LEARNER] += f" ({step.reference_s:.2f} s of it the reference model)"
    return ", ".join(shown.values()) or f"none takes {TOLD_S} s"


def _twice(step: MeanStep) -> Iterator[str]:
    names = {
        StepStage.GENERATION: "the replicas",
        StepStage.REWARD: "the scorers",
        StepStage.LEARNER: "the learner ranks",
    }
    for stage, name in names.items():
        if step.times.of(stage) >= TOLD_S:
            yield f"{name} {what_if(step, stage):.2f} s"
