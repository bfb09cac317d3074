"""Benchmarks as a table, and the command line that is made of it.

`commands.bench` has the benchmarks that a user runs, `benchmarks.__main__` those that need a laboratory.
Invariant: a row stands in one of both tables, once; making commands imports no heavy library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated

import typer

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.turns import Tell
from laminar_py.config.section import ConfigError

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Rows that `--only` names, e.g. `Measurement("laminar_lab.bench.repack:rows", "plan_256x8192_ms")`."""

    function: str  # that measures, imported when it is called; gets `tell` and those options that it names
    rows: str  # names of its rows, with spaces between

    def measure(self, **options: object) -> list[Row]:
        """Figures of this measurement."""
        function = resolve_name(self.function)
        named = signature(function).parameters
        rows: list[Row] = function(**{name: value for name, value in options.items() if name in named})
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Measurements that one command makes, and the options that it hands on to those that name them."""

    help: str
    example: str  # arguments
    options: Sequence[Parameter] = ()
    measurements: Mapping[str, Measurement]

    def measure(self, only: str | None, *, tell: Tell, **options: object) -> list[Row]:
        """Figures of all measurements that can be made here, or of the named one.

        Raises `ConfigError` where there is no such measurement, or none that can be made.
        """
        names = list(self.measurements)
        if only is not None and only not in names:
            raise ConfigError(f"--only {only}: no such measurement; choose {' or '.join(names)}")
        found: list[Row] = []
        chosen = names if only is None else [only]
        for name in chosen:
            tell(name)
            try:
                found += self.measurements[name].measure(tell=tell, **options)
            except ConfigError as error:
                if name == chosen[-1] and not found:
                    raise
                tell(f"{name} is left out: {error}")
        return found


Catalog = Mapping[str, Benchmark]  # by the name of the command


def option(name: str, annotation: object, default: object) -> Parameter:
    """An option of a command, e.g. `option("seeds", Annotated[int, typer.Option(min=1, help="...")], 3)`."""
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def repeats(default: int) -> Parameter:
    """Number of rounds."""
    kind = Annotated[int, typer.Option(min=1, help="Rounds of each figure; figures are medians")]
    return option("repeats", kind, default)


SHM = option(
    "shm",
    Annotated[
        Path,
        typer.Option(help="Shared memory for versions on one host", exists=True, file_okay=False, writable=True),
    ],
    SHARED_MEMORY,
)


def add_commands(app: typer.Typer, catalog: Catalog, *, program: str) -> None:
    """Give `app` a command for each benchmark; `program` is what comes before its name on the command line."""
    for name, benchmark in catalog.items():
        epilog = f"Example: {program} {name} {benchmark.example}"
        app.command(name, help=benchmark.help, epilog=epilog)(_command(name, benchmark))


def _command(name: str, benchmark: Benchmark) -> Callable[..., None]:
    def command(*, as_json: bool, only: str | None, **options: object) -> None:
        show(name, benchmark.measure(only, tell=tell, **options), as_json=as_json)

    rows = "; ".join(f"{only}: {measurement.rows}" for only, measurement in benchmark.measurements.items())
    json_kind = Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")]
    common = [
        option("as_json", json_kind, False),
        option("only", Annotated[str | None, typer.Option(help=f"Measurement. {rows}")], None),
    ]
    command.__signature__ = Signature([*common, *benchmark.options])  # type: ignore[attr-defined]
    return command


def tell(line: str) -> None:
    """Print a line of progress on standard error."""
    typer.echo(line, err=True)
