"""Texts that the model wrote, for the page: a choice for a report, and answers to what a dashboard is asked.

Called by the page and the dashboard. Everything is bounded: a report embeds `MOST_BYTES`, a list has `MOST_ROWS`
rows, a prompt's history `MOST_VISITS` visits; whatever a bound leaves out is said.
"""

import base64
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, groupby, islice, zip_longest
from math import nan
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.config.section import ConfigError
from laminar_py.ledger.audit.queries import Filters, count
from laminar_py.ledger.database import ledger_path
from laminar_py.observe.sample_reader import list_samples, read_sample, read_samples
from laminar_py.observe.samples import FullSample, PromptVisit, SampleOrder, SampleRow, TokenSpan
from laminar_py.records.scoring import TermValue
from laminar_py.records.trajectory import DropReason, Kind, Status

MOST_BYTES = 2_000_000  # of texts in a report
MOST_READ = 256  # trajectories of which these are chosen
MOST_ROWS = 500  # of a list
MOST_VISITS = 100  # of a prompt
NEAR = 2048  # of the newest trajectories of a kind, among which a report chooses
STEPS = 4  # the newest ones of which it shows texts
AT_ONCE = 16  # trajectories that one look at the ledger reads

_COMPARISONS = ("staleness", "step", "reward", "length")
_EQUALS = ("status", "reason", "kind", "set", "group", "prompt", "replica", "version")
_NAMES = (*_EQUALS, *_COMPARISONS, "order", "limit")

Choice = TypeVar("Choice", bound=StrEnum)


class PackedArray(msgspec.Struct, frozen=True):
    """An array in base64, e.g. `PackedArray("uint32", "AQAAAA==")`, little-endian; None would be NaN."""

    type: str  # of the view that the page makes of it: uint8, uint16, uint32, int32, float32
    data: str


def pack(array: npt.NDArray[np.generic], kind: str) -> PackedArray:
    """`array` [n] as numbers of that type."""
    return PackedArray(kind, base64.b64encode(array.astype(np.dtype(kind).newbyteorder("<")).tobytes()).decode())


class TextView(msgspec.Struct, frozen=True, kw_only=True):
    """Response as `FullSample` has it, but packed: L tokens, of which each kind stands once in `words`."""

    row: SampleRow
    prompt: str
    answer: str
    task: str
    ids_only: str
    words: list[tuple[int, str]]  # (id, text), each once
    places: PackedArray  # [L] in `words`
    logprobs: PackedArray  # [L] NaN where not known
    spans: list[TokenSpan]
    terms: list[TermValue]
    columns: dict[str, PackedArray]  # numbers per token by name, each [L]
    siblings: list[SampleRow]
    history: list[PromptVisit]
    visits: int  # of which `history` shows at most `texts.MOST_VISITS`
    lost: str = ""


class TextList(msgspec.Struct, frozen=True):
    """Rows of a list, and how many trajectories pass its filters."""

    rows: list[SampleRow]
    matching: int


class EmbeddedTexts(msgspec.Struct, frozen=True):
    """Texts that are in the page itself, each a `TextView`, and the error that kept others out, if one did."""

    samples: list[msgspec.Raw]
    trouble: str = ""


class TextsPanel(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the model wrote: the texts that are here, or None where the server is asked for them."""

    total: int  # trajectories of the run
    command: str  # that shows all of them
    choices: dict[str, list[str]]  # values of a filter, by its name
    here: EmbeddedTexts | None


def make_texts(run: Path, *, total: int, here: EmbeddedTexts | None = None) -> TextsPanel:
    """The panel of a run with `total` trajectories: with the texts that are here, or to be asked for."""
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
    """Texts for a report: best, worst and longest of the newest steps and evaluations, dropped ones; siblings.

    A record that cannot be read any further, such as an archive that is damaged, leaves a line that says so.
    """
    views: list[msgspec.Raw] = []
    room = MOST_BYTES
    try:
        for view in islice(_views(run), MOST_READ):
            encoded = msgspec.json.encode(view)
            size = len(encoded) + 5 * encoded.count(b"<")  # each of which is escaped in HTML
            if size <= room:  # a shorter one may fit yet
                views.append(msgspec.Raw(encoded))
                room -= size
    except ValueError as error:  # a `ConfigError`, or pieces of a response that do not join
        return EmbeddedTexts(views, str(error))
    return EmbeddedTexts(views)


def _views(run: Path) -> Iterator[TextView]:
    """Texts in the order in which a report would have them: those that it chooses, then their siblings."""
    chosen = _choose(run)
    siblings: dict[str, None] = {}
    for sample in _read(run, list(chosen)):
        siblings.update(dict.fromkeys(row.id for row in sample.siblings))
        yield view_sample(sample)
    yield from map(view_sample, _read(run, [id for id in siblings if id not in chosen]))


def _read(run: Path, ids: Sequence[str]) -> Iterator[FullSample]:
    for at in range(0, len(ids), AT_ONCE):
        yield from read_samples(run, ids[at : at + AT_ONCE])


def _choose(run: Path) -> dict[str, None]:
    """Ids: of used, evaluated, dropped and new trajectories in turn, so that a bound cuts all of them alike."""
    used = list_samples(run, Filters(kind=Kind.TRAIN, status=Status.CONSUMED), limit=NEAR)
    steps = sorted({row.step for row in used if row.step is not None}, reverse=True)[:STEPS]
    evaluated = list_samples(run, Filters(kind=Kind.EVAL), limit=NEAR)
    newest = {row.set_name: row.group_id for row in reversed(evaluated)}  # pass of each set
    dropped = list_samples(run, Filters(status=Status.DROPPED), limit=NEAR)
    latest = list_samples(run, Filters(kind=Kind.TRAIN), limit=STEPS)
    turns = zip_longest(
        chain.from_iterable(_extremes([row for row in used if row.step == step]) for step in steps),
        chain.from_iterable(_extremes([row for row in evaluated if row.group_id == id]) for id in newest.values()),
        _of_each_reason(dropped),
        latest,
    )
    return dict.fromkeys(row.id for row in chain.from_iterable(turns) if row is not None)


def _extremes(rows: Sequence[SampleRow]) -> list[SampleRow]:
    """The best, the worst and the longest; of equal ones the newest."""
    scored = [row for row in rows if row.reward is not None]
    if not scored:
        return list(rows[:1])
    by_reward = sorted(scored, key=lambda row: (row.reward or 0.0, row.number))
    return [by_reward[-1], by_reward[0], max(rows, key=lambda row: (row.length, row.number))]


def _of_each_reason(dropped: Sequence[SampleRow]) -> Iterator[SampleRow]:
    """Two that were dropped for each reason, the newest."""
    by_reason = sorted(dropped, key=lambda row: str(row.drop_reason))  # stable: still the newest first
    for _, rows in groupby(by_reason, key=lambda row: row.drop_reason):
        yield from islice(rows, 2)


def view_sample(sample: FullSample) -> TextView:
    """A sample as the page gets it."""
    words: dict[tuple[int, str], int] = {}
    pairs = zip(sample.ids, sample.tokens, strict=True)
    places = np.array([words.setdefault(pair, len(words)) for pair in pairs], np.int64)
    return TextView(
        row=sample.row,
        prompt=sample.prompt,
        answer=sample.answer,
        task=sample.task,
        ids_only=sample.ids_only,
        words=list(words),
        places=pack(places, "uint16" if len(words) < 2**16 else "uint32"),
        logprobs=_floats(sample.logprobs),
        spans=sample.spans,
        terms=sample.terms,
        columns={name: _floats(values) for name, values in sample.columns.items()},
        siblings=sample.siblings,
        history=_thin(sample.history, sample.row.group_id),
        visits=len(sample.history),
        lost=sample.lost,
    )


def _floats(values: Sequence[float | None]) -> PackedArray:
    return pack(np.array([nan if value is None else value for value in values], np.float64), "float32")


def _thin(history: Sequence[PromptVisit], own: str) -> list[PromptVisit]:
    """Visits at even distances, back from the newest, and its own."""
    every = -(-len(history) // MOST_VISITS)
    last = len(history) - 1
    return [visit for at, visit in enumerate(history) if (last - at) % every == 0 or visit.group_id == own]


def find_texts(run: Path, query: Mapping[str, str]) -> bytes:
    """List of what passes the filters in the query of an address, as JSON. Raises a one-line `ConfigError`."""
    unknown = next((name for name in query if name not in _NAMES), None)
    if unknown is not None:
        raise ConfigError(f"{unknown}={query[unknown]}: no such filter; there are {', '.join(_NAMES)}")
    limit = _whole(query, "limit")
    if limit is not None and not 1 <= limit <= MOST_ROWS:
        raise ConfigError(f"limit={limit}: out of bounds; ask for 1 to {MOST_ROWS}")
    wanted = Filters(
        status=_one_of(Status, query, "status"),
        reason=_one_of(DropReason, query, "reason"),
        kind=_one_of(Kind, query, "kind"),
        eval_set=_text(query, "set"),
        group=_text(query, "group"),
        prompt=_text(query, "prompt"),
        replica=_whole(query, "replica"),
        version=_whole(query, "version"),
        **{name: query.get(name) for name in _COMPARISONS},
    )
    order = _one_of(SampleOrder, query, "order") or SampleOrder.NEWEST
    rows = list_samples(run, wanted, order=order, limit=limit or 100)
    return msgspec.json.encode(TextList(rows, count(run, wanted)))


def find_text(run: Path, query: Mapping[str, str]) -> bytes:
    """The trajectory `id` of the query with its text, as JSON. Raises a one-line `ConfigError`."""
    id = _text(query, "id")
    if id is None or len(query) > 1:
        raise ConfigError("id: not named, or not alone; ask for one trajectory, e.g. sample.json?id=g17.3")
    return msgspec.json.encode(view_sample(read_sample(run, id)))


def _text(query: Mapping[str, str], name: str) -> str | None:
    """Text as SQLite takes it: an address may hold bytes that are no character."""
    found = query.get(name)
    return None if found is None else found.encode("utf-8", "replace").decode()


def _one_of(kind: type[Choice], query: Mapping[str, str], name: str) -> Choice | None:
    found = query.get(name)
    if found is not None and found not in list(kind):
        raise ConfigError(f"{name}={found}: no such {name}; name one of {', '.join(kind)}")
    return None if found is None else kind(found)


def _whole(query: Mapping[str, str], name: str) -> int | None:
    found = query.get(name)
    if found is not None and not re.fullmatch("[0-9]{1,18}", found):  # as many as fit SQLite
        raise ConfigError(f"{name}={found}: not a whole number; write for example {name}=3")
    return None if found is None else int(found)
