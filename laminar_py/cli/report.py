"""`laminar report`: what limits a run and where its tokens and time went; `laminar dashboard`: the same, live.

This module decides the order of the output, the most important first; figures and tables come from `observe`. It
also chooses settings that would shorten a step, by the goodput equation of the diagnosis. A choice needs no more
GPUs than the run has, and its settings pass the checks of the run's config (`tests/plan/test_selector.py`).
"""

import asyncio
import dataclasses
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from laminar_py.cli.main import console, print_line
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.observe.diagnosis import Diagnosis
    from laminar_py.observe.mean_step import StageTimes
    from laminar_py.observe.report import RunReport

BOUND = 4  # on staleness, for a run whose schedule had none
WORTH = 0.03  # share of a step; a predicted gain below it is noise


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, e.g. runs/quickstart-1")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone, as one object")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also tails by replica, version and task, and drops by length")
    ] = False,
) -> None:
    """Show where the tokens and the time of a run went, also while it runs; compare several runs side by side.

    For one run, also write report.html and trace.json into its folder.
    """
    from laminar_py.observe.compare import compare, comparison_tables
    from laminar_py.observe.report import read_report

    reports = [read_report(run) for run in runs]
    comparison = compare(reports) if len(reports) > 1 else None
    if as_json:
        print(msgspec.json.encode(plain({"runs": reports, "comparison": comparison})).decode())
    elif comparison is not None:
        for table in comparison_tables(reports, comparison):
            console.print(table)
    else:
        _print_report(reports[0], details=details)


def _print_report(found: "RunReport", *, details: bool) -> None:
    from laminar_py.observe.page import write_page
    from laminar_py.observe.terminal import run_tables
    from laminar_py.observe.trace import write_trace

    for table in run_tables(found, details=details):
        console.print(table)
    print_line(f"in pictures: {write_page(found)}; for Perfetto: {write_trace(found)}")
    if not found.simulation:
        _print_choices(found)


def _print_choices(report: "RunReport") -> None:
    """Print settings that would shorten a step, with their gain, and the command that runs the best of them."""
    from laminar_py.observe.tails import tell_seconds
    from laminar_py.observe.terminal import make_table

    config, diagnosis = report.snapshot.config, report.diagnosis
    if config is None or diagnosis is None:
        return
    file = Path(report.config_file)
    best = choices(diagnosis, config, file=file)
    if not best:
        return
    now_s = diagnosis.mean_step.measured_s
    rows = [(" ".join(one.settings), tell_seconds(one.step_s), f"{now_s / one.step_s:.2f} x") for one in best]
    console.print(make_table("\nWhat would give more, by these readings", "settings", ("a step", "goodput"), rows))
    print_line(f"the first: {best[0].why}")
    print_line(command(best[0], file=file))


def print_limits(run: Path) -> None:
    """Print what limits a run, and the commands that show the rest; `laminar train` ends with it."""
    from laminar_py.observe.diagnosis import NO_STEP
    from laminar_py.observe.record import read_snapshot
    from laminar_py.observe.report import RunReport
    from laminar_py.observe.terminal import diagnosis_table

    diagnosis = RunReport(read_snapshot(run)).diagnosis
    if diagnosis is not None:
        console.print(diagnosis_table(diagnosis))
        print_line("what to change are settings of the config, see docs/config.md")
    else:
        print_line(NO_STEP)
    print_line(f"laminar report {run} has all figures, and draws report.html")
    print_line(f"laminar audit {run} verify proves them")


def dashboard(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one")] = 8400,
    host: Annotated[
        str, typer.Option(help="Interface; beyond loopback LAMINAR_DASHBOARD_TOKEN must be set")
    ] = "127.0.0.1",
) -> None:
    """Serve the report as a page that updates while the run runs, and /metrics for Prometheus, until Ctrl-C."""
    from laminar_py.observe.dashboard import TOKEN_VARIABLE, serve

    asyncio.run(serve(run, host=host, port=port, token=os.environ.get(TOKEN_VARIABLE) or None, tell=print_line))


def plain(value: object) -> object:
    """Convert a report to JSON values: fields and properties of its figures by name, and NaN as null."""
    from laminar_py.observe.report import RunReport

    if dataclasses.is_dataclass(value) or isinstance(value, RunReport):
        names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        members = vars(type(value)).items()
        names += [name for name, member in members if isinstance(member, property | cached_property)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value


@dataclass(frozen=True, slots=True)
class SettingsChoice:
    """Settings for the next run, e.g. `SettingsChoice(("schedule=async",), 21.8, "no batch waits")`."""

    settings: tuple[str, ...]
    step_s: float  # predicted
    why: str


def choices(diagnosis: "Diagnosis", config: RunConfig, *, file: Path) -> list[SettingsChoice]:
    """Other schedules, placements and settings that shorten a step, the best first; `file` holds the config."""
    limit_s = (1.0 - WORTH) * diagnosis.mean_step.measured_s
    found = [*_schedules(diagnosis), *_splits(diagnosis, config), *_remedies(diagnosis, config)]
    first: dict[tuple[str, ...], SettingsChoice] = {}
    for one in sorted(found, key=lambda one: one.step_s):
        if one.step_s < limit_s and one.settings not in first and _is_possible(file, one):
            first[one.settings] = one
    return list(first.values())


def command(choice: SettingsChoice, *, file: Path) -> str:
    """Shell command that trains with a choice."""
    return shlex.join(["laminar", "train", str(file), *choice.settings])


def _is_possible(file: Path, choice: SettingsChoice) -> bool:
    """True where the config accepts the settings, and GPUs of usual memory hold the parts."""
    from laminar_py.runtime.preflight.memory import memory_faults

    try:
        return not memory_faults(load_config(file, list(choice.settings)))
    except ConfigError:
        return False


def _schedules(diagnosis: "Diagnosis") -> Iterator[SettingsChoice]:
    """A choice for each schedule other than the run's own."""
    reasons = {
        Schedule.ASYNC: "stages work side by side, and no batch waits for its longest trajectory",
        Schedule.ONE_STEP: "a batch is generated while the one before trains",
        Schedule.SYNC: "generation and training take turns, on data of no age",
    }
    for schedule, step_s in diagnosis.under.items():
        if schedule is not diagnosis.mean_step.schedule:
            bound = (f"staleness.max_staleness={BOUND}",) if schedule is Schedule.ASYNC else ()
            yield SettingsChoice((f"schedule={schedule}", *bound), step_s, reasons[schedule])


def _splits(diagnosis: "Diagnosis", config: RunConfig) -> Iterator[SettingsChoice]:
    """The best division of the GPUs between replicas and learner, under the run's schedule and under async."""
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


def _split(times: "StageTimes", generation: float, learner: float) -> "StageTimes":
    """Times of stages after generation and learner take `generation` and `learner` times as long."""
    full_s = times.generation_s - times.tail_s  # the tail of a batch does not depend on the number of replicas
    return replace(times, generation_s=full_s * generation + times.tail_s, learner_s=times.learner_s * learner)


def _predict(diagnosis: "Diagnosis", schedule: Schedule, then: "StageTimes") -> float:
    """Seconds of a step with other times of stages under a schedule."""
    from laminar_py.observe.mean_step import compose, predict

    step = diagnosis.mean_step
    if schedule is step.schedule:
        return predict(schedule, measured_s=step.measured_s, now=step.times, then=then)
    return compose(schedule, then)


def _remedies(diagnosis: "Diagnosis", config: RunConfig) -> Iterator[SettingsChoice]:
    """Remedies of the stage that limits the run, if their effect is known and the run has the GPUs they take."""
    from laminar_py.observe.diagnosis import scaled_by, what_if_set

    binding = diagnosis.binding
    for remedy in binding.remedies:
        takes_gpus = config.gpus > 0 and remedy.key in ("rollout.replicas", "learner.world_size")
        if scaled_by(binding.wall, remedy) is not None and not takes_gpus:
            settings = (f"{remedy.key}={remedy.new}",)
            yield SettingsChoice(settings, what_if_set(diagnosis.mean_step, binding.wall, remedy), remedy.why)
