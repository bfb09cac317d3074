"""Reads what the model wrote from the record of a run: lists of trajectories, and one with its text. Reads only.

Called by the command line, the report and the dashboard, also while a run goes on. `run` is a run folder (or a
ledger file); all raise a one-line `ConfigError` where there is no readable ledger. No table has an index on
prompts or groups, which would cost every append: a list, and the visits of a prompt, are one look at every
trajectory.
"""

import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from laminar_py.ledger.audit.queries import Filters, condition
from laminar_py.ledger.audit.stories import Story, read_story
from laminar_py.ledger.database import ledger_path, reading
from laminar_py.ledger.responses import StoredResponses
from laminar_py.observe.samples.models import RunModel, find_model
from laminar_py.observe.samples.records import FullSample, PromptVisit, SampleOrder, SampleRow, TokenSpan
from laminar_py.observe.samples.texts import token_texts
from laminar_py.records.columns import Array
from laminar_py.records.events import Scored
from laminar_py.records.scoring import TermValue
from laminar_py.records.trajectory import Kind

_NEAR = 4096  # of the newest trajectories with a score, among which groups are compared
_TRAINED = ("step", "staleness", "advantage")  # what evaluations have as 0 or -1, which says nothing
_COLUMNS = ", ".join(
    f"iif(kind = '{Kind.TRAIN}', {name}, NULL)" if name in _TRAINED else name
    for name in SampleRow.__struct_fields__
)
_SORTED = {  # what has the number that an order goes by, and how it is sorted
    SampleOrder.NEWEST: ("1", "number DESC"),
    SampleOrder.OLDEST: ("1", "number"),
    SampleOrder.BEST: ("reward IS NOT NULL", "reward DESC, number DESC"),
    SampleOrder.WORST: ("reward IS NOT NULL", "reward, number DESC"),
    SampleOrder.LONGEST: ("1", "length DESC, number DESC"),
    SampleOrder.SHORTEST: ("finish_reason IS NOT NULL", "length, number DESC"),
    SampleOrder.STALEST: (f"staleness IS NOT NULL AND kind = '{Kind.TRAIN}'", "staleness DESC, number DESC"),
}


def list_samples(
    run: Path, filters: Filters, *, order: SampleOrder = SampleOrder.NEWEST, limit: int = 100
) -> list[SampleRow]:
    """Trajectories that pass all filters, at most `limit`. Raises `ConfigError` on a bad comparison."""
    where, values = condition(filters)
    with reading(run) as connection:
        if order is SampleOrder.CONTRAST:
            return _contrasts(connection, where, values, limit=limit)
        known, by = _SORTED[order]
        # numbers alone are sorted: rows that are soon displaced by others are not worth reading
        first = f"SELECT number FROM trajectory WHERE {where} AND {known} ORDER BY {by} LIMIT ?"
        return list(_rows(connection, f"WHERE number IN ({first}) ORDER BY {by}", (*values, limit)))


def read_sample(run: Path, trajectory_id: str, *, model: Path | None = None) -> FullSample:
    """A trajectory with its text, by the tokenizer of the run's model or of the folder `model`.

    Raises `ConfigError` if it does not exist, or if that folder has no tokenizer.
    """
    return read_samples(run, [trajectory_id], model=model)[0]


def read_samples(run: Path, trajectory_ids: Sequence[str], *, model: Path | None = None) -> list[FullSample]:
    """Several trajectories, likewise, in this order, with one look for all their prompts."""
    found = find_model(ledger_path(run).parent, model)
    with reading(run) as connection:
        responses = StoredResponses(ledger_path(run).parent, connection)
        stories = [read_story(connection, responses, trajectory_id) for trajectory_id in trajectory_ids]
        prompts = list({told.row.prompt_id for told in stories})
        by_prompt: dict[str, list[SampleRow]] = {prompt: [] for prompt in prompts}
        asked = f"WHERE prompt_id IN ({', '.join('?' * len(prompts))}) ORDER BY number"
        for row in _rows(connection, asked, tuple(prompts)):
            by_prompt[row.prompt_id].append(row)
        return [_full(responses, told, by_prompt[told.row.prompt_id], found) for told in stories]


def _full(responses: StoredResponses, told: Story, of_prompt: Sequence[SampleRow], model: RunModel) -> FullSample:
    """A sample, given every trajectory of its prompt."""
    ids = told.response.ids
    return FullSample(
        row=next(row for row in of_prompt if row.number == told.row.number),
        prompt=told.prompt,
        answer=told.answer,
        task=told.task,
        tokens=[f"{id} " for id in ids.tolist()] if model.tokenizer is None else token_texts(model.tokenizer, ids),
        ids_only=model.why,
        ids=ids.tolist(),
        logprobs=_finite(told.response.logprobs),
        spans=_spans(told),
        terms=_terms(told),
        columns=_columns(responses, told),
        siblings=[row for row in of_prompt if row.group_id == told.row.group_id],
        history=_visits(of_prompt, solved_at=model.solved_at),
        lost=told.lost,
    )


def _rows(connection: sqlite3.Connection, tail: str, values: tuple[object, ...]) -> Iterator[SampleRow]:
    cursor = connection.execute(f"SELECT {_COLUMNS} FROM trajectory {tail}", values)
    names = SampleRow.__struct_fields__
    return (msgspec.convert(dict(zip(names, row, strict=True)), SampleRow) for row in cursor)


def _contrasts(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...], *, limit: int
) -> list[SampleRow]:
    """Best and worst of the newest groups; members of a group are issued near each other."""
    tail = f"WHERE {where} AND reward IS NOT NULL ORDER BY number DESC LIMIT ?"
    groups: dict[tuple[str, str], list[SampleRow]] = {}
    for row in _rows(connection, tail, (*values, _NEAR)):
        groups.setdefault((row.group_id, row.prompt_id), []).append(row)
    return list(islice((row for members in groups.values() for row in _extremes(members)), limit))


def _extremes(members: Sequence[SampleRow]) -> list[SampleRow]:
    """The best, and the worst if its reward is another; of equal ones the first issued."""
    ordered = sorted(members, key=lambda row: (-(row.reward or 0.0), row.number))
    best, worst = ordered[0], ordered[-1]
    return [best, worst] if best.reward != worst.reward else [best]


def _spans(told: Story) -> list[TokenSpan]:
    return [
        TokenSpan(
            version=stretch.span.version,
            replica=stretch.replica,
            start=stretch.span.start,
            end=stretch.span.end,
            kv_version=stretch.span.kv_version,
        )
        for stretch in told.stretches
    ]


def _terms(told: Story) -> list[TermValue]:
    """Terms of its last score: what was undone may be scored anew."""
    scores = [entry.event for entry in told.events if isinstance(entry.event, Scored)]
    return scores[-1].terms if scores else []


def _columns(responses: StoredResponses, told: Story) -> dict[str, list[float | None]]:
    """Columns of a response, which say nothing where that is lost."""
    found = {} if told.lost else responses.columns(told.row)
    return {name: _finite(values.array) for name, values in found.items()}


def _finite(values: Array) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _visits(of_prompt: Iterable[SampleRow], *, solved_at: float) -> list[PromptVisit]:
    groups: dict[str, list[SampleRow]] = {}
    for row in of_prompt:
        groups.setdefault(row.group_id, []).append(row)
    return [_visit(members, solved_at) for members in groups.values()]


def _visit(members: Sequence[SampleRow], solved_at: float) -> PromptVisit:
    first = members[0]
    rewards = [row.reward for row in members if row.reward is not None]
    return PromptVisit(
        group_id=first.group_id,
        kind=first.kind,
        number=first.number,
        step=max((row.step for row in members if row.step is not None), default=None),
        version=min((row.oldest_version for row in members if row.oldest_version is not None), default=None),
        samples=len(members),
        scored=len(rewards),
        mean_reward=sum(rewards) / len(rewards) if rewards else None,
        solved=sum(reward >= solved_at for reward in rewards) / len(rewards) if rewards else None,
        mean_length=sum(row.length for row in members) / len(members),
    )
