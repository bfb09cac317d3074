"""The command `laminar bench NAME`, which calls `rows` of the module with that name in `laminar_lab/bench`.

Such a module has `ROWS`, the names of its rows, and `rows`, which measures and returns the rows. Parameters of
`rows` with a type of `KINDS` are the settings of the command.
"""

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from laminar_lab.bench.report import Row, show
from laminar_py.config import ConfigError

BENCHMARKS = {
    "control": "one controller with 1,024 replicas",
    "endpoint": "time that the endpoint of agents adds to the engine's first token",
    "engine": "the embedded engine beside `generate` of transformers",
    "learner": "packed sequences beside padded sequences; fill and balance of the packer",
    "ledger": "the cost of recording a run and of reading the record",
    "publish": "a publish by two ranks of a learner beside one rank's, and its stall beside a plain copy",
    "refresh": "new weights in an engine by changed positions beside a whole version",
    "relay": "a hop from a relay to its child beside a bare socket",
    "repack": "the gain of repacking at the speed of published tables, simulated",
    "turns": "time from an environment's answer to the next turn's first token",
}
KINDS = (int, float, str, Path)  # of settings; parameters of other kinds are for tests

bench = typer.Typer()


@bench.command(epilog="Example: laminar bench relay repeats=5 --json")
def measure_here(
    benchmark: Annotated[str | None, typer.Argument(help="Benchmark to run; without one, list all")] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. repeats=5")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout")] = False,
) -> None:
    """Measure a part of the system on this machine. Most benchmarks take minutes, `repack` an hour.

    `control` and `repack` need the project's folder.
    """
    if benchmark is None:
        table = Table("benchmark", "about")
        for name, about in BENCHMARKS.items():
            table.add_row(name, about)
        Console().print(table)
        return
    show(benchmark, measure(benchmark, settings or []), as_json=as_json)


def measure(benchmark: str, settings: Sequence[str]) -> list[Row]:
    """Measure and return the rows of a benchmark. Raises `ConfigError` for an unknown name or a bad setting."""
    if benchmark not in BENCHMARKS:
        raise ConfigError(f"{benchmark}: no such benchmark; choose one of {', '.join(BENCHMARKS)}")
    rows: Any = import_module(f"laminar_lab.bench.{benchmark}").rows
    parameters = inspect.signature(rows).parameters
    kinds = {name: one.annotation for name, one in parameters.items() if one.annotation in KINDS}
    values: dict[str, object] = {}
    for name, _, text in (setting.partition("=") for setting in settings):
        if name not in kinds:
            raise ConfigError(f"{name}: no such setting here; choose {' or '.join(sorted(kinds)) or 'none'}")
        values[name] = _parse_setting(name, text, kinds[name])
    found: list[Row] = rows(**values)
    return found


def _parse_setting(name: str, text: str, kind: type) -> object:
    """Convert a setting to its kind. Raises `ConfigError` unless it is a positive number or a known folder."""
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: not a number; give one above 0") from None
    if isinstance(value, int | float) and not value > 0:
        raise ConfigError(f"{name}={text}: too small; give a number above 0")
    if isinstance(value, Path) and not value.is_dir():
        raise ConfigError(f"{name}={text}: no such folder; name an existing one")
    return value
