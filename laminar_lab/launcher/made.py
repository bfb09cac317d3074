"""Runs that are there already: whether they are those that the experiment's file asks for. Reads run folders."""

import re
from pathlib import Path

from laminar_lab.launcher.experiment import OWN_KEYS, Experiment, PlannedRun
from laminar_py.config import ConfigError, load_config
from laminar_py.config.loading import flatten
from laminar_py.ledger import RunFolder, runs_of

MOST_TOLD = 3  # names in a line


def check_made(experiment: Experiment) -> None:
    """Raise `ConfigError` for a run that was made with other settings than the file says, or twice."""
    for run in experiment.runs:
        try:
            _check(run, [made for made in runs_of(run.config) if made.has_ledger])
        except OSError as error:
            raise ConfigError(
                f"{run.config.runs}: what {run.name} left cannot be read ({error}); let its owner launch"
            ) from None


def _check(run: PlannedRun, begun: list[RunFolder]) -> None:
    if len(begun) > 1:
        raise ConfigError(
            f"{run.name}: {begun[0].path} and {begun[1].path.name} are both runs of it; move one of them elsewhere"
        )
    for made in begun:
        if why := tell_difference(run, made):
            raise ConfigError(f"{why}; set that to go on with it, or give the experiment another name")


def tell_difference(run: PlannedRun, made: RunFolder) -> str:
    """First setting of a run's folder that is another than the file says; "" without any. Raises `ConfigError`."""
    try:
        before = flatten(load_config(made.config, []))
    except ConfigError as error:
        raise ConfigError(f"{made.config}: {error}") from None
    now = flatten(run.config)
    differing = (key for key in sorted({*before, *now} - set(OWN_KEYS)) if before.get(key) != now.get(key))
    key = next(differing, None)
    return "" if key is None else f"{key}={now.get(key)}: {made.path} was made with {before.get(key)}"


def tell_strangers(experiment: Experiment) -> str:
    """Line on folders that were runs of this experiment and that its file no longer names; "" without any."""
    runs, name = experiment.runs[0].config.runs, re.escape(experiment.settings.name)
    claimed = {made.path for run in experiment.runs for made in runs_of(run.config)}
    found = sorted(path.name for path in runs.glob("*-s*-*") if path not in claimed and _is_run(path, name))
    if not found:
        return ""
    more = f" and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    return (
        f"{runs}: no run of {experiment.file} has the folder {', '.join(found[:MOST_TOLD])}{more}; variants are"
        " named after their grid, so another key of it begins all of them anew"
    )


def _is_run(path: Path, name: str) -> bool:
    return re.fullmatch(rf"{name}-.+-s\d+-\d+", path.name) is not None and RunFolder(path).config.is_file()
