"""Predicted steps with other settings, by the goodput equation of the diagnosis.

`laminar advise` prints them. A choice needs no more GPUs than the run has, and its settings pass the checks of the
run's config (`tests/plan/test_selector.py`).
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from laminar_lab.advice.remedies import Remedy, remedies
from laminar_py.config import ConfigError, RunConfig, load_config
from laminar_py.config.rollout import Schedule
from laminar_py.observe import Diagnosis, MeanStep, StageTimes, StepStage, Wall, compose, predict, without_wall
from laminar_py.runtime.preflight import memory_faults

BOUND = 4  # on staleness, for a run whose schedule had none
WORTH = 0.03  # share of a step; a predicted gain below it is noise
SCALED = {  # settings that divide the seconds of a stage by as much as they grow
    "rollout.replicas": StepStage.GENERATION,
    "rollout.max_batch": StepStage.GENERATION,
    "environment.workers": StepStage.ENVIRONMENT,
    "environment.at_once": StepStage.ENVIRONMENT,
    "reward.workers": StepStage.REWARD,
    "learner.world_size": StepStage.LEARNER,
    "packer.max_tokens": StepStage.LEARNER,
    "relay.max_bytes_per_s": StepStage.WEIGHTS,
}
IN_FLIGHT = (
    "rollout.batch_per_replica",
    "rollout.max_batch",
)  # shorten waits for environments, if these are the wall


def what_if(step: MeanStep, stage: StepStage, factor: float = 2.0) -> float:
    """Predict the seconds of a step with `factor` times as much of a stage, e.g. twice the replicas.

    A step never takes less than its work on all cores, since more processes share the cores.
    """
    times = step.times
    predicted = predict(step.schedule, measured_s=step.measured_s, now=times, then=times.faster(stage, factor))
    return max(predicted, min(step.cpu_s, step.measured_s))


def what_if_set(step: MeanStep, wall: Wall, remedy: Remedy) -> float:
    """Predict the seconds of a step with the new value of a remedy against a wall.

    A remedy that scales no stage is taken to remove the wall, so its prediction is the best case.
    """
    stage = scaled_by(wall, remedy)
    if stage is not None:
        return what_if(step, stage, float(remedy.new) / float(remedy.old))
    return max(without_wall(wall, step).measured_s, min(step.cpu_s, step.measured_s))


def scaled_by(wall: Wall, remedy: Remedy) -> StepStage | None:
    """Return the stage whose seconds a remedy divides by the growth of its setting; None: no stage."""
    if wall is Wall.ENVIRONMENT and remedy.key in IN_FLIGHT:
        return StepStage.ENVIRONMENT
    return SCALED.get(remedy.key)


def steps_under(step: MeanStep) -> dict[Schedule, tuple[float, StepStage]]:
    """Predict the seconds of a step under each schedule, and the stage that takes most of it."""
    found: dict[Schedule, tuple[float, StepStage]] = {}
    for schedule in Schedule:
        times = _times_under(schedule, step)
        own = schedule is step.schedule
        step_s = step.measured_s if own else max(compose(schedule, times), step.cpu_s)
        found[schedule] = step_s, max(StepStage, key=times.seconds_of)
    return found


def _times_under(schedule: Schedule, step: MeanStep) -> StageTimes:
    """Return the times of the stages under a schedule; a batch takes as long as its longest trajectory."""
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


@dataclass(frozen=True, slots=True)
class SettingsChoice:
    """Settings for the next run, e.g. `SettingsChoice(("schedule=async",), 21.8, "no batch waits")`."""

    settings: tuple[str, ...]
    step_s: float  # predicted
    why: str


def choices(diagnosis: Diagnosis, config: RunConfig, *, file: Path) -> list[SettingsChoice]:
    """Return other schedules, placements and settings that shorten a step, the best first.

    `file` holds the config.
    """
    limit_s = (1.0 - WORTH) * diagnosis.mean_step.measured_s
    found = [*_schedules(diagnosis), *_splits(diagnosis, config), *_remedies(diagnosis, config)]
    first: dict[tuple[str, ...], SettingsChoice] = {}
    for one in sorted(found, key=lambda one: one.step_s):
        if one.step_s < limit_s and one.settings not in first and _is_possible(file, one):
            first[one.settings] = one
    return list(first.values())


def train_command(choice: SettingsChoice, *, file: Path) -> str:
    """Return the shell command that trains with a choice."""
    return shlex.join(["laminar", "train", str(file), *choice.settings])


def _is_possible(file: Path, choice: SettingsChoice) -> bool:
    """Return whether the config accepts the settings, and GPUs of usual memory hold the parts."""
    try:
        return not memory_faults(load_config(file, list(choice.settings)))
    except ConfigError:
        return False


def _schedules(diagnosis: Diagnosis) -> Iterator[SettingsChoice]:
    """Yield a choice for each schedule other than the run's own."""
    reasons = {
        Schedule.ASYNC: "stages work side by side, and no batch waits for its longest trajectory",
        Schedule.ONE_STEP: "a batch is generated while the one before trains",
        Schedule.SYNC: "generation and training take turns, on data of no age",
    }
    for schedule, (step_s, _) in steps_under(diagnosis.mean_step).items():
        if schedule is not diagnosis.mean_step.schedule:
            bound = (f"staleness.max_staleness={BOUND}",) if schedule is Schedule.ASYNC else ()
            yield SettingsChoice((f"schedule={schedule}", *bound), step_s, reasons[schedule])


def _splits(diagnosis: Diagnosis, config: RunConfig) -> Iterator[SettingsChoice]:
    """Yield the best division of the GPUs between replicas and learner, under the run's schedule and async."""
    step, each = diagnosis.mean_step, config.rollout.engine.gpus
    ranks, replicas = config.learner.world_size, config.rollout.replicas
    if not each or config.rollout.engine.hosts or config.gpus < ranks + replicas * each:
        return
    gpus = ranks + replicas * each
    divisions = [(other, gpus - other * each) for other in range(1, (gpus - 1) // each + 1)]
    for schedule in dict.fromkeys((step.schedule, Schedule.ASYNC)):
        step_s, best = min(
            (_predict(diagnosis, schedule, _split(step.times, replicas / other, ranks / rest)), other)
            for other, rest in divisions
        )
        if best == replicas:
            continue
        bound = (f"staleness.max_staleness={BOUND}",)
        split = (f"rollout.replicas={best}", f"learner.world_size={gpus - best * each}")
        settings = split if schedule is step.schedule else (f"schedule={schedule}", *split, *bound)
        yield SettingsChoice(settings, step_s, f"{gpus} GPUs divided so that generation and learner take alike")


def _split(times: StageTimes, generation: float, learner: float) -> StageTimes:
    """Return times in which generation and learner take `generation` and `learner` times as long."""
    full_s = times.generation_s - times.tail_s  # the tail of a batch does not depend on the number of replicas
    return replace(times, generation_s=full_s * generation + times.tail_s, learner_s=times.learner_s * learner)


def _predict(diagnosis: Diagnosis, schedule: Schedule, then: StageTimes) -> float:
    """Predict the seconds of a step with other times of stages under a schedule."""
    step = diagnosis.mean_step
    if schedule is step.schedule:
        return predict(schedule, measured_s=step.measured_s, now=step.times, then=then)
    return compose(schedule, then)


def _remedies(diagnosis: Diagnosis, config: RunConfig) -> Iterator[SettingsChoice]:
    """Yield remedies against the binding wall whose effect is known, if the run has the GPUs that they take."""
    wall, step = diagnosis.binding.wall, diagnosis.mean_step
    for remedy in remedies(wall, config, step):
        takes_gpus = config.gpus > 0 and remedy.key in ("rollout.replicas", "learner.world_size")
        if scaled_by(wall, remedy) is not None and not takes_gpus:
            yield SettingsChoice((f"{remedy.key}={remedy.new}",), what_if_set(step, wall, remedy), remedy.why)
