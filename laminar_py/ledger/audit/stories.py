"""Life of a trajectory, from its prompt to the step that used it. Reads only.

Called by `laminar audit RUN show`. `run` is a run folder (or a ledger file).
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LedgerError, reading
from laminar_py.ledger.responses import StoredResponses
from laminar_py.ledger.rows import KINDS, TrajectoryRow, decode_event, read_rows
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.records.events import AnyEvent, Assigned, Consumed, Finished, Interrupted, Scored
from laminar_py.records.host import visible
from laminar_py.records.scoring import TermValue
from laminar_py.records.spans import Span, clip_spans, num_turns

_NEAR = 4096  # trajectories on either side among which those of a group are looked for

UNTOLD = ("spans", "terms", "at_once")  # of an event: told elsewhere


@dataclass(frozen=True, slots=True)
class StoryEvent:
    """Event of a trajectory, `since_s` seconds after its issue."""

    seq: int
    since_s: float
    host: str
    event: AnyEvent | str  # its kind, where a later release wrote it


@dataclass(frozen=True, slots=True)
class Stretch:
    """Response tokens that one replica made under one version, e.g. `Stretch(2, Span(7, 0, 41))`."""

    replica: int | None  # None: not on record
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything about one trajectory; which step used it, its reward and the like are in `row`."""

    row: TrajectoryRow
    prompt: str
    answer: str
    task: str
    group: tuple[str, ...]  # statuses of all members of its group, in the order of issue, its own among them
    events: tuple[StoryEvent, ...]
    response: Payload  # token ids, log-probabilities and the versions they came from
    lost: str = ""  # why there is no response

    @property
    def stretches(self) -> list[Stretch]:
        """Stretches of the response, in order."""
        assigned = [entry.event for entry in self.events if isinstance(entry.event, Assigned)]
        bounds = [(event.replica, event.length) for event in assigned] + [(None, len(self.response.ids))]
        return [
            Stretch(replica, span)
            for (replica, start), (_, end) in pairwise(bounds)
            for span in clip_spans(self.response.spans, start, end)
        ]


def story(run: Path, trajectory_id: str) -> Story:
    """Story of one trajectory. Raises `ConfigError` if it does not exist."""
    with reading(run) as connection:
        return read_story(connection, StoredResponses(run, connection), trajectory_id)


def read_story(connection: sqlite3.Connection, responses: StoredResponses, trajectory_id: str) -> Story:
    """Story of one trajectory, from a run that is being read. Raises `ConfigError` if it does not exist."""
    row = next(iter(read_rows(connection, "id = ?", (trajectory_id,))), None)
    if row is None:
        raise ConfigError(
            f"trajectory={trajectory_id}: not in {responses.run}; `laminar audit list` names them all"
        )
    lost = ""
    try:
        response = responses.response(row)
    except LedgerError as error:
        response, lost = join([]), str(error)
    query = "SELECT text, answer, task FROM prompt WHERE id = ?"
    text, answer, task = connection.execute(query, (row.prompt_id,)).fetchone() or ("", "", "")
    return Story(
        row=row,
        prompt=text,
        answer=answer,
        task=task,
        group=tuple(_group(connection, row)),
        events=tuple(_events(connection, row)),
        response=response,
        lost=lost,
    )


def tell_story(told: Story) -> list[str]:
    """Lines of a story, but for the texts in it."""
    row = told.row
    fates = ", ".join(f"{count} {status}" for status, count in Counter(told.group).items())
    task = f" of {told.task}" if told.task else ""
    lines = [
        f"{row.id}: sample {row.sample_index} of group {row.group_id} ({fates}), for {row.kind}",
        f"prompt {row.prompt_id}{task}, place {row.prompt_index}, answer {told.answer!r}",
        f"{row.status}: {_fate(row)}",
        f"{row.length} response tokens{_end(row)}",
        *(f"  {line}" for line in tell_response(told)),
        *(f"  {entry.since_s:9.3f} s  {line}" for entry, line in _tell_events(told)),
    ]
    return [visible(line) for line in lines]


def tell_response(told: Story) -> list[str]:
    """Lines about a response: one for each stretch of it, and one for each kind of recording it has."""
    response = told.response
    lines = [told.lost] if told.lost else []
    has_turns = any(span.version is None for span in response.spans)
    for stretch in told.stretches:
        span = stretch.span
        cache = "" if span.kv_version is None else f", on a KV cache from version {span.kv_version} on"
        turn = f"turn {num_turns(clip_spans(response.spans, 0, span.end))}, " if has_turns else ""
        by = f"{turn}version {span.version}, replica {stretch.replica}{cache}"
        lines.append(f"tokens {span.start} to {span.end}: {'the environment' if span.version is None else by}")
    mask, experts = response.sampling_mask, response.routed_experts
    if mask is not None:
        mean = len(mask.ids) / max(len(mask.counts), 1)
        lines.append(f"sampling mask: {len(mask.counts)} tokens, each of {mean:.1f} on average")
    if experts is not None:
        shape = f"{experts.layers} layers, {experts.top_k} in each"
        lines.append(f"routed experts: positions {experts.start} to {experts.start + experts.positions}, {shape}")
    return lines


def _tell_term(term: TermValue) -> str:
    said = f" ({term.text})" if term.text else ""
    return f"{term.name} {term.value:g} in {term.elapsed_s:.3f} s{said}"


def _fate(row: TrajectoryRow) -> str:
    reward = "no reward yet" if row.reward is None else f"reward {row.reward:g}"
    advantage = "" if row.advantage is None else f", advantage {row.advantage:g}"
    if row.drop_reason is not None:
        detail = f" ({row.drop_detail})" if row.drop_detail else ""
        return f"{row.drop_reason}{detail}; {reward}{advantage}"
    if row.step is None:
        return f"{reward}{advantage}"
    used = f"learner step {row.step} used it at version {row.version}"
    return f"{used}, staleness {row.staleness}, weight {row.weight:g}; {reward}{advantage}"


def _end(row: TrajectoryRow) -> str:
    if row.finish_reason is None:
        return " so far"
    return f", ended by {row.finish_reason}" + (f", cut by the cap on {row.cap}" if row.cap else "")


def _tell_events(told: Story) -> Iterator[tuple[StoryEvent, str]]:
    """Each event with its line; what lies between two of them is told where it says something."""
    stopped: Interrupted | None = None
    since: dict[str, float] = {}
    for entry in told.events:
        event = entry.event
        if isinstance(event, str):
            yield entry, f"{event} (of a later release)"
            continue
        fields = msgspec.to_builtins(event)
        name = fields.pop("event")
        del fields["trajectory_id"]
        shown = {key: value for key, value in fields.items() if value not in (None, "", []) and key not in UNTOLD}
        details = [
            f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
        ]
        match event:
            case Assigned() if stopped is not None:
                moved = "moved there by a repack" if stopped.reason == "repacked" else "goes on"
                details.append(f"[{moved}, {entry.since_s - since['stopped']:.3f} s after it stopped]")
                stopped = None
            case Assigned():
                details.append(f"[queued {entry.since_s:.3f} s before it]")
            case Interrupted():
                stopped, since["stopped"] = event, entry.since_s
            case Finished():
                since["finished"] = entry.since_s
            case Scored():
                details += [_tell_term(term) for term in event.terms if term.text or len(event.terms) > 1]
                details.append(f"[{entry.since_s - since.get('finished', 0.0):.3f} s after it finished]")
                since["scored"] = entry.since_s
            case Consumed() if "scored" in since:
                waited = entry.since_s - since["scored"]
                details.append(f"[{waited:.3f} s after its score, for its group and in the buffer]")
        yield entry, f"{name:<12} {'  '.join(details)}".rstrip()


def _group(connection: sqlite3.Connection, row: TrajectoryRow) -> Iterator[str]:
    # members are issued near each other: there is no index on `group_id`, which would cost every append
    near = connection.execute(
        "SELECT group_id, status FROM trajectory WHERE number BETWEEN ? AND ? ORDER BY number",
        (row.number - _NEAR, row.number + _NEAR),
    )
    return (status for group, status in near if group == row.group_id)


def _events(connection: sqlite3.Connection, row: TrajectoryRow) -> Iterator[StoryEvent]:
    # between its first and last event: there is no index on `subject`, which would cost every append
    cursor = connection.execute(
        "SELECT seq, wall, mono, host, kind, body FROM event"
        " WHERE seq BETWEEN ? AND ? AND subject = ? ORDER BY seq",
        (row.first_seq, row.last_seq, row.id),
    )
    origin: tuple[float, float, str] | None = None
    for seq, wall, mono, host, kind, body in cursor:
        if origin is None:
            origin = wall, mono, host
        # monotonic clocks of two hosts have nothing in common, nor have those of two boots of one
        same_clock = host == origin[2] and mono >= origin[1]
        since_s = mono - origin[1] if same_clock else wall - origin[0]
        yield StoryEvent(seq, since_s, host, decode_event(body) if kind in KINDS else kind)
