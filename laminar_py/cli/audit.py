"""`laminar audit`: arguments and what is printed. All work is done in `audit/`. Registered by `cli`.

Exit codes: 0 done, 1 a law is broken, 2 bad input or a ledger that cannot be read (one line on standard error).
"""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from laminar_py.cli.filters import OfModel, takes_conditions
from laminar_py.cli.lines import console, say
from laminar_py.records.visible import visible

if TYPE_CHECKING:
    from laminar_py.ledger.audit.queries import Filters
    from laminar_py.ledger.rows import TrajectoryRow

audit = typer.Typer()

_PRINTED = 100  # violations, or rows of a table
_LISTED = 50  # trajectories

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else, on stdout")]


@audit.callback(invoke_without_command=True, epilog="Example: laminar audit runs/quickstart-1 verify")
def audit_run(
    context: typer.Context, run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")]
) -> None:
    """Prove from the ledger what a run did, also while it runs; without a command: print the accounting."""
    context.obj = run
    if context.invoked_subcommand is None:
        _print_accounting(run)


@audit.command(epilog="Example: laminar audit runs/quickstart-1 verify")
def verify(context: typer.Context) -> None:
    """Check the seal and every rule of the ledger, and print each violation; exit code 1 if a law is broken."""
    from laminar_py.ledger.audit.tasks import SIMULATED
    from laminar_py.ledger.audit.verify import prove

    proof = prove(context.obj)
    for note in proof.notes:
        say(note)
    for violation in proof.violations[:_PRINTED]:
        say(str(violation), style="red")
    if not proof.violations:
        _print_accounting(context.obj)
        say("every law that was checked holds" if SIMULATED in proof.notes else "every law holds")
        return
    if len(proof.violations) > _PRINTED:
        others = Counter((found.law, found.rule) for found in proof.violations[_PRINTED:])
        say(f"and {', '.join(f'{count} more of law {law}: {rule}' for (law, rule), count in others.items())}")
    broken = ", ".join(map(str, sorted({found.law for found in proof.violations})))
    say(f"{len(proof.violations)} violations: broken are laws {broken}, see docs/laws.md")
    raise typer.Exit(1)


@audit.command(epilog="Example: laminar audit runs/quickstart-1 show g17.3")
def show(
    context: typer.Context,
    trajectory: Annotated[str, typer.Argument(help="Its id, e.g. g17.3")],
    model: OfModel = None,
) -> None:
    """Tell a trajectory's whole life: who made which tokens, interruptions, moves, reward, use; then its text."""
    from laminar_py.cli.samples import print_lines, say_model
    from laminar_py.ledger.audit.stories import tell_story
    from laminar_py.observe.sample_lines import tell_text
    from laminar_py.observe.sample_reader import read_life
    from laminar_py.observe.samples import Colour

    life, sample = read_life(context.obj, trajectory, model=model)
    for line in tell_story(life):
        say(line)
    say_model(sample)
    print_lines(tell_text(sample, colour=Colour.VERSION, whole=True))


@audit.command("list", epilog="Example: laminar audit runs/quickstart-1 list --staleness '>3' --status consumed")
@takes_conditions
def list_trajectories(
    *,
    context: typer.Context,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"At most so many; default {_LISTED}, with --json all")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them")] = False,
    as_json: AsJson = False,
    wanted: "Filters",
) -> None:
    """List trajectories that meet all conditions, one line each, and say how many there are."""
    if as_json:
        _write_list(context.obj, wanted, limit)
    else:
        _print_list(context.obj, wanted, None if every else _LISTED if limit is None else limit)


def _write_list(run: Path, wanted: "Filters", limit: int | None) -> None:
    from laminar_py.ledger.audit.queries import listing
    from laminar_py.ledger.rows import COLUMNS

    for row in listing(run, wanted, limit=limit):
        _write_json(dict(zip(COLUMNS, msgspec.to_builtins(row), strict=True)))


def _print_list(run: Path, wanted: "Filters", limit: int | None) -> None:
    from laminar_py.ledger.audit.queries import count, listing

    listed = 0
    for row in listing(run, wanted, limit=limit):
        _print_trajectory(row)
        listed += 1
    total = count(run, wanted)
    say(f"{total:,} trajectories" if listed >= total else f"{listed:,} of {total:,} trajectories; --all lists all")


def _print_trajectory(row: "TrajectoryRow") -> None:
    fate = f"step {row.step}" if row.step is not None else str(row.drop_reason or "")
    versions = "-" if row.oldest_version is None else f"{row.oldest_version}..{row.newest_version}"
    line = f"{row.id:<12} {row.status:<11} versions {versions:<9} tokens {row.length:<5} reward {row.reward}"
    say(f"{line}  staleness {row.staleness}  {fate}")


@audit.command(
    epilog="Example: laminar audit runs/quickstart-1 sql 'SELECT status, count(*) FROM trajectory GROUP BY 1'"
)
def sql(
    context: typer.Context,
    statement: Annotated[str, typer.Argument(help="One SELECT over the ledger; ledger/schema.sql has its tables")],
    as_json: AsJson = False,
) -> None:
    """Query the ledger, read-only."""
    from laminar_py.ledger.audit.queries import select

    select(context.obj, statement, show=_write_rows if as_json else _print_rows)


@audit.command(epilog="Example: laminar audit runs/quickstart-1 export out.parquet --responses")
def export(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="New file, .jsonl or .parquet")],
    responses: Annotated[bool, typer.Option("--responses", help="With prompts, tokens and spans")] = False,
) -> None:
    """Write all trajectories, with every column, to a file for other tools."""
    from laminar_py.ledger.audit.export import export as write

    count = write(context.obj, out, responses=responses)
    say(f"{out}: {count} trajectories")


def _write_json(record: dict[str, object]) -> None:
    console.file.write(msgspec.json.encode(record, enc_hook=str).decode() + "\n")


def _write_rows(names: list[str], rows: Iterator[tuple[object, ...]]) -> None:
    for row in rows:
        values = (value.hex() if isinstance(value, bytes) else value for value in row)
        _write_json(dict(zip(names, values, strict=True)))


def _print_rows(names: list[str], rows: Iterator[tuple[object, ...]]) -> None:
    table = Table(*map(escape, names))
    for row in islice(rows, _PRINTED):
        table.add_row(*(escape(_cell(value)) for value in row))
    console.print(table)
    if next(rows, None) is not None:
        say(f"the first {_PRINTED} rows; --json writes all")


def _cell(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return "" if value is None else visible(str(value), keep="\n\t")


def _print_accounting(run: Path) -> None:
    from laminar_py.ledger.audit.queries import accounting, staleness_histogram

    found = accounting(run)
    table = Table("", "issued", "consumed", "dropped", "live", "dropped by reason")
    for name, account in (("train", found.train), ("eval", found.eval)):
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(account.dropped.items()))
        dropped = sum(account.dropped.values())
        table.add_row(name, *map(str, (account.issued, account.consumed, dropped, account.live)), reasons)
    console.print(table)
    histogram = staleness_histogram(run)
    most = max(histogram.values(), default=1)
    for staleness, count in histogram.items():
        say(f"staleness {staleness:>3}  {count:>8}  {'#' * (50 * count // most)}")
