"""Life of a trajectory, from its prompt to the step that used it, for `laminar audit RUN show` and samples.

It only reads.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from laminar_lab.audit.stored import StoredResponses
from laminar_py.config.section import ConfigError
from laminar_py.ledger import (
    EVENT_KINDS,
    LedgerError,
    TrajectoryRow,
    decode_event,
    read_prompt,
    trajectory_rows,
)
from laminar_py.ledger.segments import Payload, join
from laminar_py.records.events import AnyEvent, Assigned, Scored
from laminar_py.records.host import visible
from laminar_py.records.scoring import TermValue
from laminar_py.records.spans import clip_spans

_HIDDEN_FIELDS = ("trajectory_id", "spans", "terms", "at_once")  # of events; terms have words of their own


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """Event of a trajectory, `since_s` seconds after its issue."""

    seq: int
    since_s: float
    host: str
    event: AnyEvent | str  # its kind, where a later release wrote it


class ReplicaSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Response tokens [start, end) that one replica sampled under one version.

    E.g. `ReplicaSpan(version=7, replica=2, start=0, end=41)`.
    """

    version: int | None  # None: an environment wrote the tokens
    replica: int | None  # None: not on record
    start: int
    end: int
    kv_version: int | None = None  # version of the KV cache, where it is older


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything on record about one trajectory; `row` has its reward, its step and the like."""

    row: TrajectoryRow
    prompt: str
    answer: str
    task: str
    events: tuple[StoryEvent, ...]
    response: Payload  # token ids, log-probabilities and their weight versions
    lost: str = ""  # why the response cannot be read

    @property
    def terms(self) -> list[TermValue]:
        """Terms of the last reward, with each verifier's words; undone work may be scored again."""
        scores = [entry.event for entry in self.events if isinstance(entry.event, Scored)]
        return scores[-1].terms if scores else []

    @property
    def spans(self) -> list[ReplicaSpan]:
        """Spans of the response, in order, divided where a replica handed over to another."""
        assigned = [entry.event for entry in self.events if isinstance(entry.event, Assigned)]
        bounds = [(event.replica, event.length) for event in assigned] + [(None, len(self.response.ids))]
        return [
            ReplicaSpan(
                version=span.version, replica=replica, start=span.start, end=span.end, kv_version=span.kv_version
            )
            for (replica, start), (_, end) in pairwise(bounds)
            for span in clip_spans(self.response.spans, start, end)
        ]


def read_story(connection: sqlite3.Connection, responses: StoredResponses, trajectory_id: str) -> Story:
    """Read the story of one trajectory over an open connection. Raises `ConfigError` if it does not exist."""
    row = next(iter(trajectory_rows(connection, "id = ?", (trajectory_id,))), None)
    if row is None:
        raise ConfigError(
            f"trajectory={trajectory_id}: not in {responses.run}; `laminar audit list` names them all"
        )
    lost = ""
    try:
        response = responses.response(row)
    except LedgerError as error:
        response, lost = join([]), str(error)
    prompt = read_prompt(connection, row.prompt_id)
    return Story(
        row=row,
        prompt="" if prompt is None else prompt.text,
        answer="" if prompt is None else prompt.answer,
        task="" if prompt is None else prompt.task,
        events=tuple(_read_events(connection, row)),
        response=response,
        lost=lost,
    )


def describe_events(story: Story) -> list[str]:
    """Return a line for each recording of the response, then a line for each event of the trajectory."""
    events = (f"  {entry.since_s:9.3f} s  {_describe_event(entry.event)}" for entry in story.events)
    return [visible(line) for line in (*_recording_lines(story.response), *events)]


def _recording_lines(response: Payload) -> Iterator[str]:
    mask, experts = response.sampling_mask, response.routed_experts
    if mask is not None:
        mean = len(mask.ids) / max(len(mask.counts), 1)
        yield f"sampling mask: {len(mask.counts)} tokens, each of {mean:.1f} on average"
    if experts is not None:
        shape = f"{experts.layers} layers, {experts.top_k} in each"
        yield f"routed experts: positions {experts.start} to {experts.start + experts.positions}, {shape}"


def _describe_event(event: AnyEvent | str) -> str:
    if isinstance(event, str):
        return f"{event} (of a later release)"
    fields = msgspec.to_builtins(event)
    name = fields.pop("event")
    details = [
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in fields.items()
        if value not in (None, "", []) and key not in _HIDDEN_FIELDS
    ]
    if isinstance(event, Scored):
        details += [f"{term.name} {term.value:g} in {term.elapsed_s:.3f} s {term.text}" for term in event.terms]
    return f"{name:<12} {'  '.join(details)}".rstrip()


def _read_events(connection: sqlite3.Connection, row: TrajectoryRow) -> Iterator[StoryEvent]:
    """Read the events of a trajectory between its first and its last event.

    There is no index on `subject`, since it would cost every append.
    """
    cursor = connection.execute(
        "SELECT seq, wall, mono, host, kind, body FROM event"
        " WHERE seq BETWEEN ? AND ? AND subject = ? ORDER BY seq",
        (row.first_seq, row.last_seq, row.id),
    )
    origin: tuple[float, float, str] | None = None
    for seq, wall, mono, host, kind, body in cursor:
        if origin is None:
            origin = wall, mono, host
        # monotonic clocks of two hosts, or of two boots of one host, cannot be compared
        same_clock = host == origin[2] and mono >= origin[1]
        since_s = mono - origin[1] if same_clock else wall - origin[0]
        yield StoryEvent(seq, since_s, host, decode_event(body) if kind in EVENT_KINDS else kind)
