"""Texts of the model for the page: a choice that a report embeds, and answers to queries of an open dashboard.

The page and the dashboard call it. A report embeds at most `MOST_BYTES`, a list has at most `MOST_ROWS` rows, and
a history at most `MOST_VISITS` visits. The page says how many texts a report left out.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, groupby, islice, zip_longest
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_lab.audit.queries import Filters, count
from laminar_lab.audit.samples import (
    FullSample,
    SampleOrder,
    SampleRow,
    best_and_worst,
    list_samples,
    read_sample,
    read_samples,
)
from laminar_py.config.section import ConfigError
from laminar_py.ledger import ledger_path
from laminar_py.records.trajectory import DropReason, Kind, Status

MOST_BYTES = 2_000_000  # of texts in a report
MOST_READ = 256  # trajectories that a report considers
MOST_ROWS = 500  # of a list
MOST_VISITS = 100  # newest visits of a prompt
NEAR = 2048  # newest trajectories of a kind, from which a report chooses
STEPS = 4  # newest steps from which a report shows texts
AT_ONCE = 16  # trajectories that one query reads
DIGITS = 4  # of numbers per token, since the page shows no more

_COMPARISONS = ("staleness", "step", "reward", "length")
_EQUALS = ("status", "reason", "kind", "set", "group", "prompt", "replica", "version")
_NAMES = (*_EQUALS, *_COMPARISONS, "order", "limit")

Choice = TypeVar("Choice", bound=StrEnum)


class TextList(msgspec.Struct, frozen=True):
    """Rows of a list, and the number of trajectories that pass its filters."""

    rows: list[SampleRow]
    matching: int


class EmbeddedTexts(msgspec.Struct, frozen=True):
    """Texts inside the page, each a `FullSample`, and the error that kept others out, if there was one."""

    samples: list[msgspec.Raw]
    trouble: str = ""


class TextsPanel(msgspec.Struct, frozen=True, kw_only=True):
    """Data of the panel "What the model wrote"."""

    total: int  # trajectories of the run
    command: str  # shows all of them
    choices: dict[str, list[str]]  # values of each filter that is a choice
    here: EmbeddedTexts | None  # None: the page queries its server


def make_texts(run: Path, *, total: int, here: EmbeddedTexts | None = None) -> TextsPanel:
    """Return the panel of a run with `total` trajectories, with embedded texts or for a server."""
    return TextsPanel(
        total=total,
        command=f"laminar samples {shlex.quote(str(ledger_path(run).parent))}",
        choices={
            "order": list(SampleOrder),
            "kind": list(Kind),
            "status": list(Status),
            "reason": list(DropReason),
        },
        here=here,
    )


def embed_texts(run: Path) -> EmbeddedTexts:
    """Return texts for a report, with their siblings, within `MOST_BYTES`.

    The choice is the best, worst and longest of the newest steps and evaluations, and dropped ones. An unreadable
    part of the record, such as a damaged archive, ends the list with a line about the error.
    """
    encoded: list[msgspec.Raw] = []
    room = MOST_BYTES
    try:
        for sample in islice(_chosen_samples(run), MOST_READ):
            body = msgspec.json.encode(fit_for_page(sample))
            size = len(body) + 5 * body.count(b"<")  # HTML escapes each
            if size <= room:  # a later, shorter one may still fit
                encoded.append(msgspec.Raw(body))
                room -= size
    except ValueError as error:  # a `ConfigError`, or a response whose pieces have a gap
        return EmbeddedTexts(encoded, str(error))
    return EmbeddedTexts(encoded)


def _chosen_samples(run: Path) -> Iterator[FullSample]:
    """Read the chosen samples, then their siblings."""
    chosen = _choose_ids(run)
    siblings: dict[str, None] = {}
    for sample in _read_in_parts(run, list(chosen)):
        siblings.update(dict.fromkeys(row.id for row in sample.siblings))
        yield sample
    yield from _read_in_parts(run, [id for id in siblings if id not in chosen])


def _read_in_parts(run: Path, ids: Sequence[str]) -> Iterator[FullSample]:
    for at in range(0, len(ids), AT_ONCE):
        yield from read_samples(run, ids[at : at + AT_ONCE])


def _choose_ids(run: Path) -> dict[str, None]:
    """Return ids of used, evaluated, dropped and new trajectories in turn, so a bound cuts all kinds alike."""
    used = list_samples(run, Filters(kind=Kind.TRAIN, status=Status.CONSUMED), limit=NEAR)
    steps = sorted({row.step for row in used if row.step is not None}, reverse=True)[:STEPS]
    evaluated = list_samples(run, Filters(kind=Kind.EVAL), limit=NEAR)
    newest = {row.set_name: row.group_id for row in reversed(evaluated)}  # pass of each set
    dropped = list_samples(run, Filters(status=Status.DROPPED), limit=NEAR)
    latest = list_samples(run, Filters(kind=Kind.TRAIN), limit=STEPS)
    turns = zip_longest(
        chain.from_iterable(_with_longest([row for row in used if row.step == step]) for step in steps),
        chain.from_iterable(
            _with_longest([row for row in evaluated if row.group_id == id]) for id in newest.values()
        ),
        _two_of_each_reason(dropped),
        latest,
    )
    return dict.fromkeys(row.id for row in chain.from_iterable(turns) if row is not None)


def _with_longest(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """Return the best, the worst and the longest."""
    return [*best_and_worst(rows), max(rows, key=lambda row: (row.length, row.number))]


def _two_of_each_reason(dropped: Sequence[SampleRow]) -> Iterator[SampleRow]:
    """Return the two newest of each drop reason, from rows with the newest first."""
    by_reason = sorted(dropped, key=lambda row: str(row.drop_reason))  # stable
    for _, rows in groupby(by_reason, key=lambda row: row.drop_reason):
        yield from islice(rows, 2)


def fit_for_page(sample: FullSample) -> FullSample:
    """Return a sample with rounded numbers and at most `MOST_VISITS` visits, its own visit among them."""
    newest = sample.history[-MOST_VISITS:]
    own = [visit for visit in sample.history[:-MOST_VISITS] if visit.group_id == sample.row.group_id]
    return msgspec.structs.replace(
        sample,
        logprobs=_rounded(sample.logprobs),
        columns={name: _rounded(values) for name, values in sample.columns.items()},
        history=[*own, *newest],
    )


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, DIGITS) for value in values]


def answer_list(run: Path, query: Mapping[str, str]) -> bytes:
    """Return the trajectories that pass the filters of a URL's query, as JSON. Raises a one-line `ConfigError`."""
    unknown = next((name for name in query if name not in _NAMES), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}={query[unknown]}: no such filter; there are {', '.join(_NAMES)}")
    limit = _number(query, "limit")
    if limit is not None and not 1 <= limit <= MOST_ROWS:
        raise ConfigError(f"limit={limit}: out of bounds; ask for 1 to {MOST_ROWS}")
    wanted = Filters(
        status=_one_of(Status, query, "status"),
        reason=_one_of(DropReason, query, "reason"),
        kind=_one_of(Kind, query, "kind"),
        eval_set=_text(query, "set"),
        group=_text(query, "group"),
        prompt=_text(query, "prompt"),
        replica=_number(query, "replica"),
        version=_number(query, "version"),
        **{name: query.get(name) for name in _COMPARISONS},
    )
    order = _one_of(SampleOrder, query, "order") or SampleOrder.NEWEST
    rows = list_samples(run, wanted, order=order, limit=limit or 100)
    return msgspec.json.encode(TextList(rows, count(run, wanted)))


def answer_sample(run: Path, query: Mapping[str, str]) -> bytes:
    """Return the trajectory `id` of the query with its text, as JSON. Raises a one-line `ConfigError`."""
    id = _text(query, "id")
    if id is None or len(query) > 1:
        raise ConfigError("id: not named, or not alone; ask for one trajectory, e.g. sample.json?id=g17.3")
    return msgspec.json.encode(fit_for_page(read_sample(run, id)))


def _text(query: Mapping[str, str], name: str) -> str | None:
    """Return a value as SQLite accepts it, since a URL may hold bytes without a character."""
    found = query.get(name)
    return None if found is None else found.encode("utf-8", "replace").decode()


def _one_of(kind: type[Choice], query: Mapping[str, str], name: str) -> Choice | None:
    found = query.get(name)
    if found is not None and found not in list(kind):
        raise ConfigError(f"{name}={found}: no such {name}; name one of {', '.join(kind)}")
    return None if found is None else kind(found)


def _number(query: Mapping[str, str], name: str) -> int | None:
    found = query.get(name)
    if found is not None and not re.fullmatch("[0-9]{1,18}", found):  # as many digits as SQLite takes
        raise ConfigError(f"{name}={found}: not a whole number; write for example {name}=3")
    return None if found is None else int(found)
