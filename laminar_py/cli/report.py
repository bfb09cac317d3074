"""`laminar report`: what limits a run and where its tokens and time went; `laminar dashboard`: the same, live.

Owns the order in which things are said, the most important first; figures and tables come from `analytics`.
"""

import asyncio
import dataclasses
import os
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from laminar_py.cli.lines import console, say

if TYPE_CHECKING:
    from laminar_py.observe.report import RunReport


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, e.g. runs/quickstart-1")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also tails by replica, version and task, and drops by length")
    ] = False,
) -> None:
    """Say where the tokens and the time of a run went, also while it runs; of several runs, side by side.

    Of one run it also writes report.html and trace.json into its folder.
    """
    if len(runs) == 1 and not as_json:
        _report_one(runs[0], details=details)
        return
    from laminar_py.observe.compare import compare, comparison_tables
    from laminar_py.observe.report import read_report

    reports = [read_report(run) for run in runs]
    comparison = compare(reports) if len(reports) > 1 else None
    if as_json:
        print(msgspec.json.encode(plain({"runs": reports, "comparison": comparison})).decode())
    elif comparison is not None:
        for table in comparison_tables(reports, comparison):
            console.print(table)


def _report_one(run: Path, *, details: bool) -> None:
    from laminar_py.observe.page import write_page
    from laminar_py.observe.report import read_report
    from laminar_py.observe.terminal import run_tables
    from laminar_py.observe.trace import write_trace

    found = read_report(run)
    for table in run_tables(found, details=details):
        console.print(table)
    say(f"in pictures: {write_page(found)}; for Perfetto: {write_trace(found)}")
    if not found.simulation:
        _print_choices(found)


def _print_choices(report: "RunReport") -> None:
    """Other schedules and placements with what they would give, and the command that runs the best."""
    from laminar_py.cli.choices import choices, command
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
    say(f"the first: {best[0].why}")
    say(command(best[0], file=file))


def print_limits(run: Path) -> None:
    """Print what limits a run, and where all the rest is told; the last words of `laminar train`."""
    from laminar_py.observe.diagnosis import NO_STEP
    from laminar_py.observe.record import read_snapshot
    from laminar_py.observe.report import RunReport
    from laminar_py.observe.terminal import diagnosis_table

    diagnosis = RunReport(read_snapshot(run)).diagnosis
    if diagnosis is not None:
        console.print(diagnosis_table(diagnosis))
        say("what to change are settings of the config, see docs/config.md")
    else:
        say(NO_STEP)
    say(f"laminar report {run} has all figures, and draws report.html")
    say(f"laminar audit {run} verify proves them")


def dashboard(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one")] = 8400,
    host: Annotated[
        str, typer.Option(help="Interface; beyond loopback LAMINAR_DASHBOARD_TOKEN must be set")
    ] = "127.0.0.1",
) -> None:
    """Serve the report's page, updating while the run goes on, and /metrics for Prometheus, until Ctrl-C."""
    from laminar_py.observe.dashboard import TOKEN_VARIABLE, serve

    asyncio.run(serve(run, host=host, port=port, token=os.environ.get(TOKEN_VARIABLE) or None, tell=say))


def plain(value: object) -> object:
    """Figures as JSON has them, with what is derived of them beside their fields; NaN is none."""
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
