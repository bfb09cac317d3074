"""Lengths of the responses of a run that has ended, for the plan of the next one. Called by `laminar plan`."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from laminar_lab.plan.request import Lengths
from laminar_py.config import ConfigError
from laminar_py.observe import Trajectories, read_snapshot
from laminar_py.records.trajectory import Kind

FEWEST = 20  # responses that lengths are taken from


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLengths:
    """Lengths of the responses of one task in a run, e.g. 4,000 of "math" with p50 812 and p99 7,400 tokens."""

    task: str
    count: int
    p50: float
    p99: float
    prompt_share: float  # of the variance of their logarithm, which is between prompts


def lengths_by_task(run: Path) -> list[TaskLengths]:
    """Lengths of a run's finished training responses, of all of them first. Raises `ConfigError`."""
    trained = read_snapshot(run).trajectories
    trained = trained.where(trained.is_kind(Kind.TRAIN) & (trained.finish >= 0))
    if len(trained) < FEWEST:
        raise ConfigError(
            f"--run={run}: {len(trained)} responses have finished in it, and lengths need {FEWEST}; name another"
        )
    found = [_measured("all", trained)]
    if len(trained.tasks) > 1:
        of_tasks = [(task, trained.where(trained.task == place)) for place, task in enumerate(trained.tasks)]
        found += [_measured(task, of_task) for task, of_task in of_tasks if len(of_task)]
    return found


def lengths_of(measured: TaskLengths, *, cap: int, prompt: int) -> Lengths:
    """Log-normal lengths with the percentiles of a run."""
    return Lengths.of_percentiles(
        measured.p50, measured.p99, cap=cap, prompt=prompt, prompt_share=measured.prompt_share
    )


def prompt_share(lengths: npt.NDArray[np.number], groups: npt.NDArray[np.integer]) -> float:
    """Share of the variance of the logarithm of lengths [N] in tokens that is between their groups [N], numbers.

    This is the intraclass correlation of a one-way layout; 0 where no two groups have several.
    """
    logs = np.log(np.maximum(lengths, 1))
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    several = sizes > 1
    num_groups, num_values = int(several.sum()), int(sizes[several].sum())
    if num_groups < 2:
        return 0.0
    means = np.bincount(place, weights=logs)[several] / sizes[several]
    squares = np.bincount(place, weights=logs**2)[several] - sizes[several] * means**2
    within = float(squares.sum()) / (num_values - num_groups)
    between = float(means.var(ddof=1)) - within * float((1.0 / sizes[several]).mean())
    whole = between + within
    return min(1.0, max(0.0, between / whole)) if whole > 0 else 0.0


def _measured(task: str, trained: Trajectories) -> TaskLengths:
    p50, p99 = np.percentile(np.maximum(trained.length, 1), [50, 99])
    share = prompt_share(trained.length, trained.group)
    return TaskLengths(task=task, count=len(trained), p50=float(p50), p99=float(p99), prompt_share=share)
