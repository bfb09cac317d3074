"""The state machine of trajectories: `Machine.apply` is the only code that changes a trajectory's status.

The ledger applies each event before it stores it. The control plane reads the same `live` objects, and the audit
replays a whole log through the same function. The machine holds only live trajectories, so its memory is bounded
by the work in flight. An event that is illegal in the current state raises `IllegalEventError` with the ids and
changes nothing; that is a bug, and it ends the run (law 1).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import isfinite
from typing import NoReturn
from weakref import WeakValueDictionary

from laminar_py.ledger.rows import Accounting
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records import events as e
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.spans import (
    Span,
    clip_spans,
    covers,
    encode_spans,
    merge_spans,
    replace_spans,
    sampled_versions,
)
from laminar_py.records.trajectory import Kind, Status
from laminar_py.records.weights import Published


class IllegalEventError(AssertionError):
    """An event is illegal in the state that the earlier events led to."""


@dataclass(slots=True, kw_only=True)
class Marks:
    """The highest numbers on record; later events must exceed them."""

    number: int = 0  # of a trajectory
    incarnation: int = 0
    version: int = -1  # the highest published
    unpublished: dict[int, Published] = field(default_factory=dict)  # later versions on relays or replicas
    step: int = 0  # a rollback lowers it

    @property
    def seen_version(self) -> int:
        """The highest version that any event names, published or not."""
        return max(self.unpublished, default=self.version)

    def published(self, version: int) -> None:
        """Note that the learner published a version."""
        self.version = version
        self.unpublished = {number: one for number, one in self.unpublished.items() if number > version}

    def note_unpublished(self, version: int, digest: str, *, num_bytes: int) -> None:
        """Note that a relay or replica has a version; replicas do not know its size."""
        known = self.unpublished.get(version)
        if version > self.version and (known is None or num_bytes > known.num_bytes):
            self.unpublished[version] = Published(version, digest, num_bytes, 0.0)


@dataclass(slots=True)
class RunClock:
    """Time of events, in seconds since 1970, by the monotonic clock of their controller.

    The first event of each controller sets it by the wall clock, so that its time never goes back.
    """

    wall: float | None = None  # of the event that set it, None before the first
    mono: float = 0.0

    def at(self, wall: float, mono: float, event: e.AnyEvent) -> float:
        """Return the time of an event from its two stamps; the first event and each `RunStarted` set the clock."""
        if self.wall is None or type(event) is e.RunStarted:
            self.wall, self.mono = wall, mono
        return self.wall + (mono - self.mono)


class Machine:
    """Live trajectories by id, counts of the others, and the highest numbers on record.

    `recall(id)` reads a consumed trajectory from the record when its step is undone, or another step replays it,
    unless an object of it is still in memory.
    """

    def __init__(self, *, recall: Callable[[str], LiveTrajectory | None] = lambda _: None) -> None:
        self.live: dict[str, LiveTrajectory] = {}
        self._ended = WeakValueDictionary[str, LiveTrajectory]()  # consumed, while other code refers to them
        self.counts = Accounting()  # without live ones, which are counted separately, so that law 1 can be checked
        self.replays = Counter[int]()  # by step, without undone ones
        self._replayed = set[str]()  # since the last step
        self.marks = Marks()
        self.clock = RunClock()
        self._now = 0.0  # time of the event being applied
        self._recall = recall
        self._handlers: dict[type[e.Event], Callable[..., LiveTrajectory | None]] = {
            e.Issued: self._issued,
            e.Assigned: self._assigned,
            e.Interrupted: self._interrupted,
            e.StreamLost: self._stream_lost,
            e.Restamped: self._restamped,
            e.Finished: self._finished,
            e.Cut: self._cut,
            e.Scored: self._scored,
            e.Ready: self._ready,
            e.Consumed: self._consumed,
            e.Replayed: self._record_replay,
            e.Undone: self._undone,
            e.Dropped: self._dropped,
            e.RunStarted: self._run_started,
            e.VersionPublished: self._version_published,
            e.VersionLoaded: self._version_seen,
            e.Relayed: self._version_seen,
            e.Stepped: self._stepped,
            e.RolledBack: self._rolled_back,
            e.Evaluated: self._evaluated,
        }

    def apply(self, seq: int, event: e.AnyEvent, *, wall: float, mono: float) -> LiveTrajectory | None:
        """Apply event number `seq`, stamped by wall and monotonic clock; return the changed trajectory or None.

        Raises `IllegalEventError` if the event contradicts the state.
        """
        self._now = self.clock.at(wall, mono, event)
        handler = self._handlers.get(type(event))
        if handler is None:
            return None
        row = handler(event)
        if row is not None:
            row.last_seq = seq
            if not row.first_seq:
                row.first_seq = seq
        return row

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> LiveTrajectory:
        """Append response tokens, which `spans` cover, to a running trajectory. Raises `IllegalEventError`."""
        row = self.live.get(trajectory_id)
        if row is None or row.status is not Status.RUNNING or row.length != tokens.start:
            state = f"is {row.status} with {row.length} tokens" if row else "is not live"
            raise IllegalEventError(
                f"cannot store tokens [{tokens.start}, {tokens.end}) of {trajectory_id}: it {state}"
            )
        if not covers(spans, tokens.start, tokens.end):
            raise IllegalEventError(
                f"spans {spans} of {trajectory_id} do not cover [{tokens.start}, {tokens.end})"
            )
        row.length = tokens.end
        row.tokens = (*row.tokens, tokens)
        row.token_spans = replace_spans(row.token_spans, spans)
        _widen_versions(row, spans)
        return row

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> LiveTrajectory:
        """Add references to columns of a live trajectory's response, by name; return the trajectory."""
        row = self.live.get(trajectory_id)
        assert row is not None, f"columns of {trajectory_id}, which is not live"
        row.columns = {**row.columns, **columns}
        return row

    def adopt(self, recovered: LiveTrajectory) -> None:
        """Replace a live trajectory by the complete row from recovery, but keep the number of its last event."""
        recovered.last_seq = self.live.pop(recovered.id, recovered).last_seq
        self.live[recovered.id] = recovered

    def find_consumed(self, trajectory_id: str) -> LiveTrajectory | None:
        """Return a consumed trajectory, from the record if no code refers to it; None if it is not consumed."""
        row = self._ended.get(trajectory_id) or self._recall(trajectory_id)
        return row if row is not None and row.status is Status.CONSUMED else None

    def hold(self, rows: Iterable[LiveTrajectory]) -> None:
        """Know consumed trajectories of an earlier controller without reading them, as long as the caller does."""
        self._ended.update({row.id: row for row in rows})

    def accounting(self) -> Accounting:
        """Return counts of issued, consumed, dropped and live trajectories; each call counts `live` again."""
        accounting = deepcopy(self.counts)
        for kind in Kind:
            accounting.of_kind(kind).live = sum(row.kind is kind for row in self.live.values())
        return accounting

    # ---- trajectories

    def _issued(self, event: e.Issued) -> LiveTrajectory:
        """Add a queued trajectory with the next number."""
        if event.trajectory_id in self.live:
            _refuse(event, "it is live already")
        self.marks.number += 1
        row = LiveTrajectory(
            number=self.marks.number,
            id=event.trajectory_id,
            group_id=event.group_id,
            prompt_id=event.prompt_id,
            prompt_index=event.prompt_index,
            sample_index=event.sample_index,
            kind=event.kind,
            status=Status.QUEUED,
            first_seq=0,
            last_seq=0,
            issued_s=self._now,
        )
        self.live[event.trajectory_id] = row
        self.counts.of_kind(row.kind).issued += 1
        return row

    def _assigned(self, event: e.Assigned) -> LiveTrajectory:
        """Let a trajectory run on a replica; a new epoch adds its time on the earlier replica to `used_s`."""
        row = self._find(event, Status.QUEUED, Status.INTERRUPTED)
        if event.epoch < row.epoch:
            _refuse(event, f"its epoch is {row.epoch}")
        _require_length(event, event.length, row)
        if event.epoch > row.epoch:
            row.used_s, row.here_s = row.used_s + row.here_s, 0.0
        row.status, row.epoch, row.replica = Status.RUNNING, event.epoch, event.replica
        if row.started_s is None:
            row.started_s = self._now
        return row

    def _interrupted(self, event: e.Interrupted) -> LiveTrajectory:
        """Stop a running trajectory, which keeps its tokens."""
        row = self._find(event, Status.RUNNING)
        _require_epoch(event, event.epoch, row)
        _require_length(event, event.length, row)
        row.status = Status.INTERRUPTED
        return row

    def _stream_lost(self, event: e.StreamLost) -> LiveTrajectory:
        """Check an event about a running trajectory, whose state stays the same."""
        row = self._find(event, Status.RUNNING)
        _require_length(event, event.length, row)
        return row

    def _restamped(self, event: e.Restamped) -> LiveTrajectory:
        """Replace a running trajectory's spans, and so the weight versions of its tokens."""
        row = self._find(event, Status.RUNNING)
        if not covers(event.spans, 0, row.length):
            _refuse(event, f"its spans do not cover its {row.length} tokens")
        _note_versions(row, event.spans)
        row.token_spans = merge_spans(event.spans)
        row.spans, row.restamped = encode_spans(row.token_spans), row.length
        return row

    def _finished(self, event: e.Finished) -> LiveTrajectory:
        """Finish a running trajectory with the final spans and digest of its response."""
        row = self._find(event, Status.RUNNING)
        _require_epoch(event, event.epoch, row)
        _require_length(event, event.length, row)
        if not covers(event.spans, 0, event.length):
            _refuse(event, f"its spans do not cover its {event.length} tokens")
        if row.restamped is not None and encode_spans(clip_spans(event.spans, 0, row.restamped)) != row.spans:
            _refuse(event, f"it was restamped with {row.spans}")
        _note_versions(row, event.spans)
        row.status = Status.FINISHED
        row.token_spans, row.spans = event.spans, encode_spans(event.spans)
        row.finish_reason, row.digest = event.finish_reason, event.digest
        row.queue_s, row.generate_s = event.queue_s, event.generate_s
        row.finished_s = self._now
        return row

    def _cut(self, event: e.Cut) -> LiveTrajectory:
        """Note the cap that ends or ended a response."""
        row = self._find(event, Status.RUNNING, Status.FINISHED)
        row.cap = event.cap
        return row

    def _scored(self, event: e.Scored) -> LiveTrajectory:
        """Give a finished trajectory its reward."""
        row = self._find(event, Status.FINISHED)
        _require_finite(event, event.reward, *(credit.reward for credit in event.roles))
        row.status, row.reward, row.score_s = Status.SCORED, event.reward, event.elapsed_s
        row.scorer_s, row.scored_s = event.elapsed_s / event.at_once, self._now
        row.answer, row.earned, row.roles = event.answer, event.earned, event.roles
        if row.kind is Kind.EVAL:
            row.term_values = event.term_values
        return row

    def _ready(self, event: e.Ready) -> LiveTrajectory:
        """Give a scored trajectory its advantage."""
        row = self._find(event, Status.SCORED)
        _require_finite(
            event, event.advantage, event.advantage_scale, *(credit.advantage for credit in event.roles)
        )
        row.status, row.ready_s = Status.READY, self._now
        row.advantage, row.advantage_scale, row.roles = event.advantage, event.advantage_scale, event.roles
        return row

    def _consumed(self, event: e.Consumed) -> LiveTrajectory:
        """End a ready trajectory on which a learner step trained."""
        row = self._find(event, Status.READY)
        _require_finite(event, event.weight)
        row.status, row.ended_s = Status.CONSUMED, self._now
        row.step, row.version = event.step, event.version
        row.staleness, row.weight = event.staleness, event.weight
        self._ended[row.id] = self.live.pop(row.id)
        self.counts.of_kind(row.kind).consumed += 1
        return row

    def _record_replay(self, event: e.Replayed) -> None:
        """Count a replay of a trajectory that an earlier step consumed, at most one in a step; its row stays."""
        row = self._require_consumed(event)
        _require_finite(event, event.weight)
        last = self.marks.step
        if row.kind is not Kind.TRAIN or row.step is None or not row.step <= last < event.step:
            _refuse(event, f"step {row.step} consumed it for {row.kind}, and the last step was {last}")
        if row.id in self._replayed:
            _refuse(event, "the step replayed it before")
        self._replayed.add(row.id)
        self.replays[event.step] += 1
        self.counts.train.replayed += 1

    def _undone(self, event: e.Undone) -> LiveTrajectory:
        """Make a consumed trajectory ready again, since its step is undone."""
        row = self._require_consumed(event)
        if row.step != event.step:
            _refuse(event, f"step {row.step} consumed it")
        self._ended.pop(row.id, None)
        undo(row)
        self.live[row.id] = row
        self.counts.of_kind(row.kind).consumed -= 1
        return row

    def _dropped(self, event: e.Dropped) -> LiveTrajectory:
        """End a live trajectory without training on it."""
        row = self.live.pop(event.trajectory_id, None)
        if row is None:
            _refuse(event, "it is not live")
        row.status, row.ended_s = Status.DROPPED, self._now
        row.drop_reason, row.drop_detail = event.reason, event.detail
        dropped = self.counts.of_kind(row.kind).dropped
        dropped[event.reason] = dropped.get(event.reason, 0) + 1
        return row

    # ---- the rest of the run

    def _run_started(self, event: e.RunStarted) -> None:
        """Note a controller's start; its incarnation must exceed all earlier ones."""
        if event.incarnation <= self.marks.incarnation:
            _refuse(event, f"incarnation {self.marks.incarnation} is on record")
        self.marks.incarnation = event.incarnation

    def _version_published(self, event: e.VersionPublished) -> None:
        """Note a version that the learner published; it must exceed all earlier ones."""
        if event.version <= self.marks.version:
            _refuse(event, f"version {self.marks.version} was published before; numbers are never reused")
        self.marks.published(event.version)

    def _version_seen(self, event: e.VersionLoaded | e.Relayed) -> None:
        num_bytes = event.num_bytes if isinstance(event, e.Relayed) else 0
        self.marks.note_unpublished(event.version, event.digest, num_bytes=num_bytes)

    def _stepped(self, event: e.Stepped) -> None:
        """Note a learner step; its number must exceed all earlier ones that no rollback undid."""
        if event.step <= self.marks.step:
            _refuse(event, f"step {self.marks.step} is done")
        _require_finite(event, event.loss or 0.0, event.grad_norm or 0.0, event.reward or 0.0)
        self._replayed.clear()
        self.marks.step = event.step

    def _rolled_back(self, event: e.RolledBack) -> None:
        """Set the last step back, and forget the replays of later steps."""
        if event.step > self.marks.step:
            _refuse(event, f"the last step is {self.marks.step}")
        for step in [step for step in self.replays if step > event.step]:
            self.counts.train.replayed -= self.replays.pop(step)
        self._replayed.clear()
        self.marks.step = event.step

    def _evaluated(self, event: e.Evaluated) -> None:
        _require_finite(event, event.figures.mean.value)

    def _find(self, event: e.TrajectoryEvent, *allowed: Status) -> LiveTrajectory:
        """Return the live trajectory of an event. Raises `IllegalEventError` if its status is not `allowed`."""
        row = self.live.get(event.trajectory_id)
        if row is None:
            _refuse(event, "it is not live")
        if row.status not in allowed:
            _refuse(event, f"it is {row.status}")
        return row

    def _require_consumed(self, event: e.Undone | e.Replayed) -> LiveTrajectory:
        """Return the consumed trajectory of an event. Raises `IllegalEventError`."""
        row = self.find_consumed(event.trajectory_id)
        if row is None:
            _refuse(event, "it is not consumed")
        return row


def undo(row: LiveTrajectory) -> None:
    """Set a trajectory back from CONSUMED to READY."""
    row.status = Status.READY
    row.step = row.version = row.staleness = row.weight = row.ended_s = None


def _refuse(event: e.AnyEvent, why: str) -> NoReturn:
    raise IllegalEventError(f"{event} cannot happen: {why}")


def _require_epoch(event: e.AnyEvent, epoch: int, row: LiveTrajectory) -> None:
    if epoch != row.epoch:
        _refuse(event, f"its epoch is {row.epoch}")


def _require_length(event: e.AnyEvent, length: int, row: LiveTrajectory) -> None:
    if length != row.length:
        _refuse(event, f"{row.length} of its tokens are stored")


def _require_finite(event: e.AnyEvent, *values: float) -> None:
    """Raise `IllegalEventError` for NaN and infinity, which JSON cannot express."""
    for value in values:
        if not isfinite(value):
            _refuse(event, "it holds a number that is not finite")


def _note_versions(row: LiveTrajectory, spans: tuple[Span, ...]) -> None:
    """Set the oldest and newest version of a response, all of whose spans are given."""
    versions = sampled_versions(spans)
    row.oldest_version, row.newest_version = min(versions, default=None), max(versions, default=None)


def _widen_versions(row: LiveTrajectory, spans: tuple[Span, ...]) -> None:
    """Widen the range from oldest to newest version of a response to the versions in further spans."""
    for version in sampled_versions(spans):
        if row.oldest_version is None or version < row.oldest_version:
            row.oldest_version = version
        if row.newest_version is None or version > row.newest_version:
            row.newest_version = version
