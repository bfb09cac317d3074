"""A diagnosis laid out: rows of words for the terminal; a panel and the bars of a mean step for the page. Pure."""

from collections.abc import Iterator

from laminar_py.config.staleness import Schedule
from laminar_py.observe.analytics.measure.use import Use
from laminar_py.observe.analytics.show.panels import StageBar, WallPanel
from laminar_py.observe.analytics.triage.diagnosis import (
    STAGE_OF,
    BoundFit,
    BoundSide,
    Diagnosis,
    tell_divergence,
    what_if,
)
from laminar_py.observe.analytics.triage.goodput import StageTimes, StepStage
from laminar_py.observe.analytics.triage.mean_step import MeanStep
from laminar_py.observe.analytics.triage.remedies import Wall

NO_STEP = "no learner step was completed, so what limits the run cannot be told"
TOLD_S = 0.005  # of a stage: less is not worth a word
DRAWN_S = 1e-4  # of a stage: less has no bar
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


def wall_panel(diagnosis: Diagnosis) -> WallPanel:
    """Panel of the page on what limits the run."""
    binding, following = diagnosis.binding, diagnosis.next
    step, without = diagnosis.mean_step, "with twice the cores" if binding.wall is Wall.CPU else "without it"
    evidence = [
        binding.evidence,
        f"{without}, goodput would be at most {binding.gain:.3g} times as high",
        f"the next wall is then {following.wall}: {following.evidence}",
    ]
    if diagnosis.bound is not None:
        evidence.append(tell_bound(diagnosis.bound, step))
    if step.use is not None:
        evidence.append(f"in use: {tell_use(step.use)}")
    meaning = MEANINGS[binding.wall]
    return WallPanel(name=str(binding.wall), meaning=meaning, evidence=tuple(evidence), remedies=binding.remedies)


def stage_bars(schedule: Schedule, times: StageTimes, wall: Wall) -> list[StageBar]:
    """Bars of a mean step: stages that wait for each other one after another, see `goodput.compose`."""
    turns = times.generation_s + times.environment_s
    rollout = max(turns, times.reward_s, times.reference_s)
    match schedule:
        case Schedule.SYNC:
            begin = {StepStage.LEARNER: rollout, StepStage.WEIGHTS: rollout + times.learner_s}
        case Schedule.ONE_STEP:
            begin = {StepStage.WEIGHTS: max(rollout, times.learner_s)}
        case Schedule.ASYNC:
            begin = {StepStage.WEIGHTS: turns}
    begin[StepStage.ENVIRONMENT] = times.generation_s
    of_wall = StepStage.GENERATION if wall is Wall.LONG_TAIL else STAGE_OF.get(wall)
    return [
        StageBar(name=str(stage), start_s=begin.get(stage, 0.0), seconds=times.of(stage), binding=stage is of_wall)
        for stage in StepStage
        if times.of(stage) >= DRAWN_S
    ]
