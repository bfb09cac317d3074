"""`laminar report`: what limits a run and where its tokens and time went; `laminar dashboard`: the same, live.

Figures and tables come from `laminar_lab.report`.
"""

import dataclasses
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from laminar_py.cli import console, print_line

if TYPE_CHECKING:
    from laminar_py.observe import Summary

report_app = typer.Typer()
dashboard_app = typer.Typer()


@report_app.command(epilog="Example: laminar report runs/quickstart-1")
def report(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    profile: Annotated[
        Path | None, typer.Option(help="Profile of `laminar doctor --try` or `calibrate`: the rates to expect")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone, as one object")] = False,
) -> None:
    """Show what limits a run and where its tokens and its time went, also while it runs.

    Also write report.html and trace.json into its folder.
    """
    from laminar_lab.emulation.settings import read_profile
    from laminar_lab.report.closing import closing_table
    from laminar_lab.report.page import write_page
    from laminar_lab.report.rates import profiled_rates
    from laminar_lab.report.run_report import read_report
    from laminar_lab.report.snapshot import read_summary
    from laminar_lab.report.terminal import run_tables
    from laminar_lab.report.trace import write_trace
    from laminar_py.records.events import VersionPublished

    found = read_report(run)
    if as_json:
        print(msgspec.json.encode(plain(found)).decode())
        return
    expected = None
    if profile is not None and found.snapshot.config is not None:
        times, ranks = read_profile(profile, setting="--profile"), found.snapshot.config.learner.world_size
        published = next((event for _, event in found.snapshot.history.of_kind(VersionPublished)), None)
        num_bytes = None if published is None else published.num_bytes
        expected = profiled_rates(times, ranks=ranks, num_bytes=num_bytes)
    for table in run_tables(found, expected):
        console.print(table)
    if (summary := read_summary(run)) is not None:
        console.print("\n[bold]The whole run[/bold]", closing_table(summary, found.snapshot.config), sep="\n")
    print_line(f"in pictures: {write_page(found)}; for Perfetto: {write_trace(found)}")
    if not found.simulation:
        print_line(f"what to change first: laminar advise {run}")


def print_ending(summary: "Summary", interrupted: bool) -> None:
    """Print a few lines on the gain of a run, its limit and the next commands; no gain if it was interrupted."""
    from laminar_lab.report.closing import ending_table
    from laminar_lab.report.run_report import RunReport
    from laminar_lab.report.snapshot import read_snapshot

    console.print(ending_table(summary, RunReport(read_snapshot(Path(summary.run))), interrupted=interrupted))


@dashboard_app.command(epilog="Example: laminar dashboard runs/quickstart-1 --port 8400")
def dashboard(
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0: a free one")] = 8400,
) -> None:
    """Serve the report as a page that updates while the run runs, and /metrics for Prometheus, until Ctrl-C."""
    from laminar_lab.report.dashboard import serve

    serve(run, port=port, announce=print_line)


def plain(value: object) -> object:
    """Convert a report to JSON values: fields and properties of its figures by name, and NaN as null."""
    from laminar_lab.report.run_report import RunReport

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
