"""Choice of another schedule and placement for a run, from what its stages took, and what each would give.

Called by `laminar report`. Predictions are those of the diagnosis: the goodput equation with the run's readings.
Invariant: a choice needs no more GPUs than the run has, and its settings go with the run's config.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.config.staleness import Schedule
from laminar_py.observe.diagnosis import Diagnosis, scaled_by, what_if_set
from laminar_py.observe.mean_step import StageTimes, compose, predict
from laminar_py.observe.remedies import Remedy
from laminar_py.runtime.preflight.memory import memory_faults

BOUND = 4  # on staleness, of a run that had none by its schedule
WORTH = 0.03  # share of a step below which a prediction says nothing


@dataclass(frozen=True, slots=True)
class SettingsChoice:
    """Settings to run with next, e.g. `SettingsChoice(("schedule=async",), 21.8, "no batch waits")`."""

    settings: tuple[str, ...]
    step_s: float  # predicted
    why: str


def choices(diagnosis: Diagnosis, config: RunConfig, *, file: Path) -> list[SettingsChoice]:
    """Alternatives that shorten a step, the best first; `file` has the config."""
    measured_s = diagnosis.mean_step.measured_s
    found = [*_schedules(diagnosis), *_splits(diagnosis, config), *_remedies(diagnosis, config)]
    worth = [one for one in found if one.step_s < (1.0 - WORTH) * measured_s and _goes(file, one.settings)]
    first: dict[tuple[str, ...], SettingsChoice] = {}
    for one in sorted(worth, key=lambda one: one.step_s):
        first.setdefault(one.settings, one)
    return list(first.values())


def command(choice: SettingsChoice, *, file: Path) -> str:
    """Shell command that trains with a choice."""
    return shlex.join(["laminar", "train", str(file), *choice.settings])


def _goes(file: Path, settings: Sequence[str]) -> bool:
    """True where the config takes the settings, and GPUs of usual memory hold what comes of it."""
    try:
        return not memory_faults(load_config(file, list(settings)))
    except ConfigError:
        return False


def _schedules(diagnosis: Diagnosis) -> Iterator[SettingsChoice]:
    words = {
        Schedule.ASYNC: "stages work side by side, and no batch waits for its longest trajectory",
        Schedule.ONE_STEP: "a batch is generated while the one before trains",
        Schedule.SYNC: "generation and training take turns, on data of no age",
    }
    for schedule, step_s in diagnosis.under.items():
        if schedule is not diagnosis.mean_step.schedule:
            bound = (f"staleness.max_staleness={BOUND}",) if schedule is Schedule.ASYNC else ()
            yield SettingsChoice((f"schedule={schedule}", *bound), step_s, words[schedule])


def _splits(diagnosis: Diagnosis, config: RunConfig) -> Iterator[SettingsChoice]:
    """The best division of the GPUs of replicas and learner, under the schedule of the run and under async."""
    step, each = diagnosis.mean_step, config.rollout.engine.gpus
    ranks, replicas = config.learner.world_size, config.rollout.replicas
    if not each or config.rollout.engine.hosts or config.gpus < ranks + replicas * each:
        return
    gpus = ranks + replicas * each
    divisions = [(other, gpus - other * each) for other in range(1, (gpus - 1) // each + 1)]
    for schedule in dict.fromkeys((step.schedule, Schedule.ASYNC)):
        step_s, fewer = min(
            (_under(diagnosis, schedule, _split(step.times, replicas / other, ranks / rest)), other)
            for other, rest in divisions
        )
        if fewer == replicas:
            continue
        bound = (f"staleness.max_staleness={BOUND}",)
        split = (f"rollout.replicas={fewer}", f"learner.world_size={gpus - fewer * each}")
        settings = split if schedule is step.schedule else (f"schedule={schedule}", *split, *bound)
        yield SettingsChoice(settings, step_s, f"{gpus} GPUs divided so that generation and learner take alike")


def _split(times: StageTimes, generation: float, learner: float) -> StageTimes:
    full_s = times.generation_s - times.tail_s
    return replace(times, generation_s=full_s * generation + times.tail_s, learner_s=times.learner_s * learner)


def _under(diagnosis: Diagnosis, schedule: Schedule, then: StageTimes) -> float:
    step = diagnosis.mean_step
    if schedule is step.schedule:
        return predict(schedule, measured_s=step.measured_s, now=step.times, then=then)
    return compose(schedule, then)


def _remedies(diagnosis: Diagnosis, config: RunConfig) -> Iterator[SettingsChoice]:
    """Remedies against the wall that binds whose effect is known, of those that take no GPU that the run lacks."""
    binding = diagnosis.binding
    for remedy in binding.remedies:
        if scaled_by(binding.wall, remedy) is not None and not _takes_gpus(remedy, config):
            settings = (f"{remedy.key}={remedy.new}",)
            yield SettingsChoice(settings, what_if_set(diagnosis.mean_step, binding.wall, remedy), remedy.why)


def _takes_gpus(remedy: Remedy, config: RunConfig) -> bool:
    return config.gpus > 0 and remedy.key in ("rollout.replicas", "learner.world_size")
