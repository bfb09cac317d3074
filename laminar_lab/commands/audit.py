"""`laminar audit` and `laminar samples`: arguments and output. `laminar_lab.audit` does the work.

Exit codes: 0 done, 1 a law is broken, 2 bad input or an unreadable ledger (one line on standard error).
"""

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from laminar_lab.audit.sample_lines import Colour
from laminar_lab.audit.samples import SampleOrder
from laminar_py.cli import console, print_line
from laminar_py.config.section import ConfigError
from laminar_py.records.host import counted, visible
from laminar_py.records.trajectory import DropReason, Kind, Status

if TYPE_CHECKING:
    from laminar_lab.audit.queries import Filters
    from laminar_lab.audit.samples import Sample
    from laminar_py.ledger import TrajectoryRow

audit = typer.Typer()
samples_app = typer.Typer()

_PRINTED = 100  # violations, or rows of a table
_LISTED = 50  # trajectories
_AT_ONCE = 8  # samples that one query reads

_COMPARISON = "A comparison, e.g. '>3'"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON alone, one object a line")]
ModelFolder: TypeAlias = Annotated[
    Path | None, typer.Option("--model", help="Folder with the tokenizer, if the run's model has moved")
]


def _conditions(
    status: Annotated[Status | None, typer.Option("--status", help="Their status")] = None,
    reason: Annotated[DropReason | None, typer.Option("--reason", help="Why they were dropped")] = None,
    kind: Annotated[Kind | None, typer.Option("--kind", help="Training or evaluation")] = None,
    eval_set: Annotated[str | None, typer.Option("--set", help="Their evaluation set")] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="Their group, e.g. g17, or their evaluation pass, e.g. e4-aime")
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Id of their prompt, e.g. p17")] = None,
    replica: Annotated[int | None, typer.Option("--replica", help="The last replica that had them")] = None,
    version: Annotated[
        int | None, typer.Option("--version", help="A weight version that generated some of their tokens")
    ] = None,
    staleness: Annotated[str | None, typer.Option("--staleness", help=f"Learner steps. {_COMPARISON}")] = None,
    step: Annotated[
        str | None, typer.Option("--step", help=f"The step that trained on them. {_COMPARISON}")
    ] = None,
    reward: Annotated[str | None, typer.Option("--reward", help=_COMPARISON)] = None,
    length: Annotated[str | None, typer.Option("--length", help=f"Response tokens. {_COMPARISON}")] = None,
) -> None:
    """Declare the options by which `audit list` and `samples` choose trajectories; see `takes_conditions`."""


def takes_conditions(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with the options of `_conditions`; it gets their values as `wanted`, one `Filters`."""
    conditions = inspect.signature(_conditions).parameters

    @functools.wraps(command)
    def run(*arguments: object, **options: object) -> None:
        from laminar_lab.audit.queries import Filters

        wanted = Filters(**{name: options.pop(name) for name in conditions})  # type: ignore[arg-type]
        command(*arguments, **options, wanted=wanted)

    parameters = {
        name: parameter for name, parameter in inspect.signature(command).parameters.items() if name != "wanted"
    }
    merged = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (parameters | dict(conditions)).values()
    ]
    run.__signature__ = inspect.Signature(merged)  # type: ignore[attr-defined]  # typer reads both
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in merged}
    return run


@audit.callback(invoke_without_command=True, epilog="Example: laminar audit runs/quickstart-1 verify")
def audit_run(
    context: typer.Context, run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")]
) -> None:
    """Prove from the ledger what a run did, also while it runs. Without a command, print the accounting."""
    context.obj = run
    if context.invoked_subcommand is None:
        _print_accounting(run)


@audit.command(epilog="Example: laminar audit runs/quickstart-1 verify")
def verify(context: typer.Context) -> None:
    """Check the seal and every rule of the ledger, and print each violation. Exit code 1 if a law is broken."""
    from laminar_lab.audit.verify import SIMULATED, prove

    proof = prove(context.obj)
    for note in proof.notes:
        print_line(note)
    for violation in proof.violations[:_PRINTED]:
        print_line(str(violation), style="red")
    if not proof.violations:
        _print_accounting(context.obj)
        print_line("every law that was checked holds" if SIMULATED in proof.notes else "every law holds")
        return
    if len(proof.violations) > _PRINTED:
        others = Counter((violation.law, violation.rule) for violation in proof.violations[_PRINTED:])
        print_line(
            f"and {', '.join(f'{count} more of law {law}: {rule}' for (law, rule), count in others.items())}"
        )
    broken = ", ".join(map(str, sorted({violation.law for violation in proof.violations})))
    print_line(f"{len(proof.violations)} violations: broken are laws {broken}, see docs/laws.md")
    raise typer.Exit(1)


@audit.command(epilog="Example: laminar audit runs/quickstart-1 show g17.3")
def show(
    context: typer.Context,
    trajectory: Annotated[str, typer.Argument(help="Id of the trajectory, e.g. g17.3")],
    model: ModelFolder = None,
) -> None:
    """Show the history of a trajectory (replicas, versions, interruptions, moves, reward, use), then its text."""
    from laminar_lab.audit.sample_lines import describe_fate, describe_texts
    from laminar_lab.audit.samples import read_sample
    from laminar_lab.audit.stories import describe_events

    sample = read_sample(context.obj, trajectory, model=model)
    _print_texts([describe_fate(sample.story.row)])
    for line in describe_events(sample.story):
        print_line(line)
    _warn_of_ids(sample)
    _print_texts(describe_texts(sample, colour=Colour.VERSION, full=True))


@audit.command("list", epilog="Example: laminar audit runs/quickstart-1 list --staleness '>3' --status consumed")
@takes_conditions
def list_trajectories(
    *,
    context: typer.Context,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"Most trajectories to list; default {_LISTED}, with --json all")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List all trajectories")] = False,
    as_json: AsJson = False,
    wanted: "Filters",
) -> None:
    """List trajectories that meet all conditions, one line each, and their number."""
    from laminar_lab.audit.queries import count, listing, row_record

    run: Path = context.obj
    if as_json:
        for row in listing(run, wanted, limit=limit):
            _write_json(row_record(row))
        return
    most = None if every else _LISTED if limit is None else limit
    listed = 0
    for row in listing(run, wanted, limit=most):
        _print_trajectory(row)
        listed += 1
    total = count(run, wanted)
    rest = "" if listed >= total else f"{listed:,} of "
    print_line(f"{rest}{counted(total, 'trajectory')}{'; --all lists all' if rest else ''}")


def _print_trajectory(row: "TrajectoryRow") -> None:
    fate = f"step {row.step}" if row.step is not None else str(row.drop_reason or "")
    versions = "-" if row.oldest_version is None else f"{row.oldest_version}..{row.newest_version}"
    line = f"{row.id:<12} {row.status:<11} versions {versions:<9} tokens {row.length:<5} reward {row.reward}"
    print_line(f"{line}  staleness {row.staleness}  {fate}")


@audit.command(
    epilog="Example: laminar audit runs/quickstart-1 sql 'SELECT status, count(*) FROM trajectory GROUP BY 1'"
)
def sql(
    context: typer.Context,
    statement: Annotated[str, typer.Argument(help="One SELECT over the tables of ledger/schema.sql")],
    as_json: AsJson = False,
) -> None:
    """Query the ledger, read-only."""
    from laminar_lab.audit.queries import select

    select(context.obj, statement, show=_write_rows if as_json else _print_rows)


@audit.command(epilog="Example: laminar audit runs/quickstart-1 export out.jsonl --responses")
def export(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="New file, .jsonl")],
    responses: Annotated[bool, typer.Option("--responses", help="Include prompts, tokens and spans")] = False,
) -> None:
    """Write all trajectories, with every column, to a file for other tools."""
    from laminar_lab.audit.export import export as write

    count = write(context.obj, out, responses=responses)
    print_line(f"{out}: {counted(count, 'trajectory')}")


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
        print_line(f"the first {_PRINTED} rows; --json writes all")


def _cell(value: object) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return "" if value is None else visible(str(value), keep="\n\t")


def _print_accounting(run: Path) -> None:
    """Print the number of trajectories by state and drop reason, histograms of staleness, and changed settings."""
    from laminar_lab.audit.queries import accounting, setting_changes, staleness_histogram

    counts = accounting(run)
    table = Table("", "issued", "consumed", "dropped", "live", "dropped by reason")
    for name, account in (("train", counts.train), ("eval", counts.eval)):
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(account.dropped.items()))
        dropped = sum(account.dropped.values())
        table.add_row(name, *map(str, (account.issued, account.consumed, dropped, account.live)), reasons)
    console.print(table)
    if counts.train.replayed:
        print_line(f"{counts.train.replayed} replays of consumed trajectories")
    for name, replayed in (("staleness", False), ("replayed, staleness", True)):
        histogram = staleness_histogram(run, replayed=replayed)
        most = max(histogram.values(), default=1)
        for staleness, count in histogram.items():
            print_line(f"{name} {staleness:>3}  {count:>8}  {'#' * (50 * count // most)}")
    for change in setting_changes(run):
        print_line(f"after step {change.step}: {change.describe()}")


@samples_app.command(epilog="Example: laminar samples runs/quickstart-1 --reward 0 --order longest")
@takes_conditions
def samples(
    *,
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    ids: Annotated[
        list[str] | None, typer.Argument(help="Ids of trajectories, e.g. g17.3, instead of conditions")
    ] = None,
    order: Annotated[SampleOrder | None, typer.Option(help="Order of the trajectories")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most trajectories to show")] = 6,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts")] = False,
    colour: Annotated[Colour, typer.Option(help="Meaning of a token's colour")] = Colour.VERSION,
    model: ModelFolder = None,
    as_json: AsJson = False,
    wanted: "Filters",
) -> None:
    """Show responses of the model: the best and the worst of the newest groups, trajectories by id, or all that
    meet the conditions."""
    from laminar_lab.audit.queries import Filters
    from laminar_lab.audit.sample_lines import describe_colours, describe_sample

    if ids and (order or wanted != Filters()):
        raise ConfigError(f"{ids[0]}: ids and conditions exclude each other; leave one of them out")
    chosen = ids or _find_samples(run, wanted, order, limit)
    for place, sample in enumerate(_read_samples(run, chosen, model)):
        if as_json:
            # ASCII, so that text of a model cannot control the terminal
            console.file.write(json.dumps(sample.record()) + "\n")
            continue
        if not place:
            _warn_of_ids(sample)
            _print_texts(filter(None, [describe_colours(colour)]))
        _print_texts([*describe_sample(sample, colour=colour, full=full), Text()])
    if not ids and not as_json:
        _print_count(run, wanted, len(chosen))


def _find_samples(run: Path, wanted: "Filters", order: SampleOrder | None, limit: int) -> list[str]:
    """Return ids of trajectories to show; without conditions or order contrasts of the newest groups."""
    from laminar_lab.audit.queries import Filters
    from laminar_lab.audit.samples import list_samples, newest_contrasts

    if wanted != Filters() or order:
        rows = list_samples(run, wanted, order=order or SampleOrder.NEWEST, limit=limit)
    else:
        rows = newest_contrasts(run, limit=limit)
    return [row.id for row in rows]


def _read_samples(run: Path, ids: Sequence[str], model: Path | None) -> Iterator["Sample"]:
    from laminar_lab.audit.samples import read_samples

    for at in range(0, len(ids), _AT_ONCE):
        yield from read_samples(run, ids[at : at + _AT_ONCE], model=model)


def _warn_of_ids(sample: "Sample") -> None:
    """Print why tokens are shown as ids, if they are."""
    if sample.ids_only:
        print_line(f"tokens are shown as ids: {sample.ids_only} (--model)")


def _print_texts(lines: Iterable[Text]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)


def _print_count(run: Path, wanted: "Filters", shown: int) -> None:
    """Print how many trajectories match, and which options choose others."""
    from laminar_lab.audit.queries import count

    total = count(run, wanted)
    if shown:
        print_line(
            f"{shown} of {counted(total, 'trajectory')}; conditions, --order and --limit choose others, see --help"
        )
    elif total:
        print_line(
            f"{counted(total, 'trajectory')}, none with a score yet; --order newest shows trajectories without one"
        )
    else:
        print_line("0 trajectories; `laminar audit RUN list` lists all")
