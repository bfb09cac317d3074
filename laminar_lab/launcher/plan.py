"""Plan of an experiment: runs, places and time: `laminar launch FILE --dry-run`."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from laminar_lab.launcher.experiment import Experiment
from laminar_lab.launcher.forecast import deal, experiment_left, known_paces, seconds_left, tell_duration
from laminar_lab.launcher.places import Slot
from laminar_lab.launcher.standing import Standing, in_turn
from laminar_py.config.loading import to_overrides


def plan_rows(
    experiment: Experiment, standings: Sequence[Standing], slots: Sequence[Slot]
) -> Iterator[RenderableType]:
    """A line on the whole, a row for each run, and the time by what is known of speed."""
    address = experiment.runs[0].config.cluster.address
    where = "on this machine" if address is None else f"on the Ray cluster {address}"
    gpus = max(run.config.gpus for run in experiment.runs)
    each = f", {gpus} GPUs each" if gpus else ", without GPUs"
    yield Text(
        f"{experiment.settings.name}: {len(experiment.runs)} runs of {len(experiment.variants)} variants,"
        f" {len(slots)} at a time {where}{each}; in {experiment.runs[0].config.runs}"
    )
    if common := experiment.settings.set:
        yield Text(f"every run: {experiment.settings.base} with {' '.join(to_overrides(common))}")
    yield _variants(experiment)
    paces = known_paces(experiment, standings)
    yield _runs(standings, paces, slots)
    left_s = experiment_left(standings, paces, slots=len(slots))
    source = "by runs that have done steps" if paces else "no run of it, or of its base, has done a step yet"
    yield Text(f"RL left in all: {tell_duration(left_s)} ({source}); starts and warm starts come on top")


def _runs(standings: Sequence[Standing], paces: dict[str, float], slots: Sequence[Slot]) -> Table:
    """How far each run is, and where it would go on, if all take as long as is known."""
    dealt = deal(standings, paces, slots=len(slots))
    places = {one.run.name: slot for one, slot in zip(in_turn(standings), dealt, strict=True)}
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True)
    for name in ("state", "steps", "RL left", "where"):
        table.add_column(name)
    for one in standings:
        left = tell_duration(seconds_left(one, step_s=paces.get(one.run.variant)))
        index = places.get(one.run.name)
        told = "next free" if index is None else ", ".join(slots[index].words)
        where = told if one.run.name in places else "-"
        table.add_row(*map(Text, (one.run.name, one.state, f"{one.step}/{one.run.config.steps}", left, where)))
    return table


def _variants(experiment: Experiment) -> Table:
    """Settings of each variant beside those that all have in common."""
    common = to_overrides(experiment.settings.set)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("variant", no_wrap=True)
    table.add_column("settings")
    for run in {run.variant: run for run in experiment.runs}.values():
        own = " ".join(override for override in run.overrides if override not in common)
        table.add_row(Text(run.variant), Text(own or "-"))
    return table
