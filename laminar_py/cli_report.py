"""`laminar report`: what limits a run and where its tokens and time went, or several runs side by side.

Owns the order in which things are said, the most important first; figures and tables come from `analytics`.
"""

import dataclasses
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

if TYPE_CHECKING:
    from laminar_py.analytics.triage import Diagnosis

console = Console(highlight=False)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, e.g. runs/quickstart-1")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    details: Annotated[
        bool, typer.Option("--details", help="Also tails by replica, version and task, and drops by length")
    ] = False,
) -> None:
    """Say where the tokens and the time of a run went, also while it goes on; of several, side by side.

    Of one run it also writes report.html and trace.json into its folder.
    """
    from laminar_py.analytics.compare import compare
    from laminar_py.analytics.run_report import read_report

    reports = [read_report(run) for run in runs]
    comparison = compare(reports) if len(reports) > 1 else None
    if as_json:
        print(msgspec.json.encode(plain({"runs": reports, "comparison": comparison})).decode())
    elif comparison is not None:
        from laminar_py.analytics.compare_tables import comparison_tables

        for table in comparison_tables(reports, comparison):
            console.print(table)
    else:
        from laminar_py.analytics.run_tables import run_tables

        for part in run_tables(reports[0], details=details):
            console.print(part)
        _draw(runs[0], reports[0].diagnosis)


def print_limits(run: Path) -> None:
    """What limits a run, and where all the rest is told; the last words of `laminar train`."""
    from laminar_py.analytics.run_tables import diagnosis_table
    from laminar_py.analytics.triage import read_diagnosis

    diagnosis = read_diagnosis(run)
    if diagnosis is not None:
        console.print(diagnosis_table(diagnosis))
    console.print(f"laminar report {run}: all figures, and report.html; laminar audit {run} verify proves them")


def _draw(run: Path, diagnosis: "Diagnosis | None") -> None:
    from laminar_py.analytics.page import write_report
    from laminar_py.analytics.snapshot import read_snapshot
    from laminar_py.analytics.trace import write_trace
    from laminar_py.analytics.wall import wall_panel

    snapshot, wall = read_snapshot(run), None if diagnosis is None else wall_panel(diagnosis)
    page, trace = write_report(run, wall=wall, snapshot=snapshot), write_trace(run, snapshot=snapshot)
    console.print(f"in pictures: {page}; for Perfetto: {trace}", soft_wrap=True)


def plain(value: object) -> object:
    """Records as JSON has them, with what is derived of them beside their fields; NaN is none."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value
