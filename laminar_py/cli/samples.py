"""`laminar samples`: arguments and what is printed. All work is done in `samples/`. Registered by `main`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.text import Text

from laminar_py.cli.filters import OfModel, takes_conditions
from laminar_py.cli.lines import console, say
from laminar_py.config.section import ConfigError
from laminar_py.observe.samples import Colour, SampleOrder
from laminar_py.records.trajectory import Kind

if TYPE_CHECKING:
    from laminar_py.ledger.audit.queries import Filters
    from laminar_py.observe.samples import FullSample

_AT_ONCE = 8  # read by one look at the ledger


@takes_conditions
def samples(
    *,
    run: Annotated[Path, typer.Argument(help="Folder of the run, e.g. runs/quickstart-1")],
    ids: Annotated[list[str] | None, typer.Argument(help="Ids, e.g. g17.3, in place of conditions")] = None,
    order: Annotated[SampleOrder | None, typer.Option(help="Which ones come first")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most that are shown")] = 6,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten long texts")] = False,
    colour: Annotated[Colour, typer.Option(help="What the colour of a token shows")] = Colour.VERSION,
    model: OfModel = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line, and nothing else")] = False,
    wanted: "Filters",
) -> None:
    """Show what the model wrote: of the newest groups the best and the worst, or the trajectories that are named,
    or those that meet all conditions."""
    from laminar_py.ledger.audit.queries import Filters

    if ids and (order or wanted != Filters()):
        raise ConfigError(f"{ids[0]}: named beside conditions; give one of the two")
    found = ids or _find(run, wanted, order, limit)
    if as_json:
        _write(_read(run, found, model))
        return
    _print(_read(run, found, model), colour, whole=full)
    if not ids:
        _say_count(run, wanted, len(found))


def _find(run: Path, wanted: "Filters", order: SampleOrder | None, limit: int) -> list[str]:
    """Ids; where nothing is asked for, of contrasts of training, and of an evaluation where nothing trains."""
    from laminar_py.ledger.audit.queries import Filters
    from laminar_py.observe.sample_reader import list_samples

    trained = Filters(kind=Kind.TRAIN)
    if wanted != Filters() or order:
        found = list_samples(run, wanted, order=order or SampleOrder.NEWEST, limit=limit)
    else:
        found = list_samples(run, trained, order=SampleOrder.CONTRAST, limit=limit) or list_samples(
            run, wanted, order=SampleOrder.CONTRAST, limit=limit
        )
    return [row.id for row in found]


def _read(run: Path, ids: Sequence[str], model: Path | None) -> Iterator["FullSample"]:
    from laminar_py.observe.sample_reader import read_samples

    for at in range(0, len(ids), _AT_ONCE):
        yield from read_samples(run, ids[at : at + _AT_ONCE], model=model)


def _write(found: Iterable["FullSample"]) -> None:
    for sample in found:
        console.file.write(json.dumps(msgspec.to_builtins(sample)) + "\n")  # ASCII: a terminal obeys none of it


def _print(found: Iterable["FullSample"], colour: Colour, *, whole: bool) -> None:
    from laminar_py.observe.sample_lines import tell_colours, tell_sample

    for place, sample in enumerate(found):
        if not place:
            say_model(sample)
            print_lines(filter(None, [tell_colours(colour)]))
        print_lines([*tell_sample(sample, colour=colour, whole=whole), Text()])


def say_model(sample: "FullSample") -> None:
    """Say it where tokens are shown as ids."""
    if sample.ids_only:
        say(f"tokens are shown as ids: {sample.ids_only} (--model)")


def print_lines(lines: Iterable[Text]) -> None:
    """Print lines unwrapped."""
    for line in lines:
        console.print(line, soft_wrap=True)


def _say_count(run: Path, wanted: "Filters", shown: int) -> None:
    from laminar_py.ledger.audit.queries import count

    total = count(run, wanted)
    if shown:
        say(f"{shown} of {total:,} trajectories; conditions, --order and --limit choose others, see --help")
    elif total:
        say(f"{total:,} trajectories, none with a score yet; --order newest shows what there is")
    else:
        say("0 trajectories; `laminar audit RUN list` lists all")
