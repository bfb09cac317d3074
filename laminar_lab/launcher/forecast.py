"""Time that runs will take, by the speed of those that have done steps."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from laminar_lab.launcher.experiment import Experiment
from laminar_lab.launcher.standing import RunState, Standing, in_turn, read_summary
from laminar_py.config import ConfigError, RunConfig, load_config
from laminar_py.ledger import RunFolder


def seconds_left(standing: Standing, *, step_s: float | None) -> float | None:
    """Seconds of RL that a run has ahead, at `step_s` where it has no pace of its own; None where none is known.

    One that failed is tried again. Starts, warm starts and evaluations that stop the clock come on top.
    """
    if standing.state is RunState.FINISHED:
        return 0.0
    config, done_s = standing.run.config, 0.0 if standing.row is None else standing.row.rl_s
    pace = standing.step_s or step_s
    left = [] if pace is None else [pace * (config.steps - standing.step)]
    if config.max_rl_seconds is not None:
        left.append(config.max_rl_seconds - done_s)
    return max(0.0, min(left)) if left else None


def experiment_left(standings: Sequence[Standing], paces: dict[str, float], *, slots: int) -> float | None:
    """Seconds until all are done, side by side on so many slots; None where a pace is unknown."""
    free_s = [0.0] * max(1, slots)
    for one, slot in zip(in_turn(standings), deal(standings, paces, slots=slots), strict=True):
        left = seconds_left(one, step_s=paces.get(one.run.variant))
        if left is None or slot is None:
            return None
        free_s[slot] += left
    return max(free_s)


def deal(standings: Sequence[Standing], paces: dict[str, float], *, slots: int) -> list[int | None]:
    """Slot of each run of `in_turn`: the first that is free; None where times that are unknown decide that."""
    free_s, dealt = [0.0] * max(1, slots), list[int | None]()
    for one in in_turn(standings):
        left = seconds_left(one, step_s=paces.get(one.run.variant))
        soonest = min(free_s)
        dealt.append(free_s.index(soonest) if soonest < math.inf else None)
        if soonest < math.inf:
            free_s[free_s.index(soonest)] += math.inf if left is None else left
    return dealt


def known_paces(experiment: Experiment, standings: Sequence[Standing]) -> dict[str, float]:
    """Seconds of a step by variant: of its own runs, else of any of the experiment, else of others of the base."""
    own = {variant: list[float]() for variant in experiment.variants}
    for standing in standings:
        if standing.step_s is not None:
            own[standing.run.variant].append(standing.step_s)
    every = [step_s for paces in own.values() for step_s in paces] or base_paces(experiment.settings.base)
    found = {variant: paces or every for variant, paces in own.items()}
    return {variant: fmean(paces) for variant, paces in found.items() if paces}


def base_paces(base: Path) -> list[float]:
    """Seconds of a step of each run that was made of the base config alone and has finished."""
    try:
        config: RunConfig = load_config(base, [])
    except ConfigError:  # whole only with settings of the experiment
        return []
    summaries = (read_summary(RunFolder(path).summary) for path in config.runs.glob(f"{config.name}-[0-9]*"))
    return [one.rl_seconds / one.steps for one in summaries if one is not None and one.finished and one.steps]


def tell_duration(seconds: float | None) -> str:
    """E.g. "3 h 20 min", "4 min", "50 s"; "unknown" for None."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 10 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
