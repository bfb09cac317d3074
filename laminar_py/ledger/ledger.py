"""The record of a run: one SQLite file, written by the controller alone.

Responses stand in it by reference. `append` and `store_*` only touch memory and never wait; `FLUSH_S` later what
has gathered is written by a thread, in the order of the appends and in one transaction. A batch is cut between two
turns of the event loop, so what is appended without an `await` in between, or `together`, is never split.
Invariant (law 1): issued = consumed + dropped + live, in memory at every moment and on disk after every crash.
"""

import asyncio
import contextlib
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from laminar_py.ledger.archive import SETTLED
from laminar_py.ledger.database import SEAL_NAME, open_reader, open_writer, reading
from laminar_py.ledger.live import copy_ledger
from laminar_py.ledger.machine import IllegalEventError, Machine, Marks, RunClock, Tally
from laminar_py.ledger.pieces import NO_COLUMN, PieceRow, piece_rows
from laminar_py.ledger.recovery import unpublished
from laminar_py.ledger.rows import (
    Accounting,
    KindAccount,
    column_values,
    read_accounting,
)
from laminar_py.ledger.seal import seal_digest
from laminar_py.ledger.trajectory import LiveTrajectory, live_rows
from laminar_py.ledger.writer import Stamped, Unwritten, Writer, end_of
from laminar_py.records.events import AnyEvent, Archived, SealBroken, TokensLost
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.protocols import Clock
from laminar_py.records.spans import Span, encode_spans
from laminar_py.records.trajectory import Prompt, Status
from laminar_py.records.weights import Published

FLUSH_S = 0.2
ENDED = frozenset({Status.CONSUMED, Status.DROPPED})
_FORGET = 4096  # trajectories whose references one transaction deletes


class Ledger:
    """Records one run. Use it from one event loop: `start`, appends and commits, `close`.

    What waits in memory is what one flush interval brings, and the controller commits at each learner step; a
    disk that cannot keep up therefore shows as slow commits, not as memory.
    """

    def __init__(
        self,
        path: Path,
        *,
        host: str,
        clock: Clock,
        copy: Path | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._copy = copy  # in the run's folder, where the ledger itself lies elsewhere
        self._run = (copy or path).parent
        self._copying = threading.Lock()
        self._host = host
        self._clock = clock
        self._wall = wall or (lambda: time.time())  # seconds since 1970
        self.machine = Machine(recall=self._recall)
        self._batch = Unwritten()
        self._prompts: set[str] = set()  # ids in the batch
        self._dirty: dict[str, LiveTrajectory] = {}  # rows that the batch will write
        self._ends: dict[str, LiveTrajectory] = {}  # rows of which it will write the end alone
        self._in_flight: dict[str, LiveTrajectory] = {}  # rows that are being written
        self._waiters: list[asyncio.Future[None]] = []  # commits that the next cut satisfies
        self._served: list[asyncio.Future[None]] = []  # those that the cut being written satisfies
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._complete = asyncio.Event()  # cleared while what belongs together is being appended
        self._complete.set()

    async def start(self) -> None:
        """Open the file, or lay it out; take up the trajectories that are live in it. Raises `ValueError`.

        A run that was sealed goes on: that is on record before its seal is gone.
        """
        self._writer = Writer(await asyncio.to_thread(open_writer, self._path), host=self._host)
        self._reader = open_reader(self._path)
        self._seq = self._writer.seq
        await asyncio.to_thread(_restore, self.machine, self._reader)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._write_batches(), name="ledger")
        self._task.add_done_callback(self._ended)
        seal = await asyncio.to_thread(seal_digest, self._run)
        if seal is not None:
            self.append(SealBroken(seal))
            await self.commit()
            await self.copy()
            (self._run / SEAL_NAME).unlink()

    async def close(self) -> None:
        """Write what is left, also into the run's folder, and close. Raises what ended the ledger early."""
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._task})
        self._reader.close()
        self._writer.close()
        if self._failure is not None:
            raise self._failure
        if self._copy is not None:
            await self.copy()
            await asyncio.to_thread(shutil.rmtree, self._path.parent, ignore_errors=True)

    @property
    def newest_version(self) -> int:
        """The highest weight version on record, whoever spoke of it, -1 before the first; the next is above it."""
        return self.machine.marks.seen_version

    @property
    def newest_published(self) -> int:
        """The highest weight version that is on record as published, -1 before the first."""
        return self.machine.marks.version

    # ---- in

    def append(self, event: AnyEvent) -> None:
        """Record an event. Raises `IllegalEventError`, an AssertionError, if it cannot happen now."""
        self._check_open()
        wall, mono = self._wall(), self._clock.now()
        row = self.machine.apply(self._seq + 1, event, wall=wall, mono=mono)
        self._seq += 1
        if row is not None:
            self._note_changed(row)
        self._batch.events.append(Stamped(self._seq, wall, mono, event))
        self._schedule()

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Have all that is appended meanwhile written in one transaction, also over turns of the event loop.

        What fails in between ends the ledger: nothing that waits is written.
        """
        assert self._complete.is_set(), "one at a time"
        self._complete.clear()
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or error
            self._wake.set()
            raise
        finally:
            self._complete.set()

    def append_all(self, events: Sequence[AnyEvent]) -> None:
        """Record events that belong together: on disk there are all of them or none.

        If one is illegal the others must not stay, so the ledger ends: nothing that waits is written.
        """
        try:
            for event in events:
                self.append(event)
        except IllegalEventError as error:
            self._failure = error
            self._wake.set()
            raise

    def store_prompt(self, prompt: Prompt) -> None:
        """Keep a prompt; it is stored once, however often it is given."""
        self._check_open()
        if prompt.id not in self._prompts:
            self._prompts.add(prompt.id)
            self._batch.prompts.append(prompt)
            self._schedule()

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Keep where response tokens [start, end) lie, which `spans` cover, and whatever was recorded with them.

        Raises `IllegalEventError` unless the trajectory runs and has `start` tokens so far.
        """
        self._check_open()
        row = self.machine.store_tokens(trajectory_id, tokens, spans)
        self._dirty[row.id] = row
        at, what = tokens.at, (NO_COLUMN, "", tokens.start, tokens.end, encode_spans(spans), tokens.routed)
        self._batch.pieces.append(PieceRow(row.number, *what, at.segment, at.offset, at.num_bytes, at.digest))
        self._schedule()

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Keep where the columns lie that a finished response was scored with."""
        self._check_open()
        row = self.machine.store_columns(trajectory_id, columns)
        for name, column in columns.items():
            at, where = column.at, (row.number, name, column.dtype.value, 0, row.length, "[]", 0)
            self._batch.pieces.append(PieceRow(*where, at.segment, at.offset, at.num_bytes, at.digest))
        self._schedule()

    async def commit(self) -> None:
        """Return when everything appended so far is on disk. Raises what ended the ledger, if anything did."""
        self._check_open()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    async def copy(self) -> None:
        """Have the run's folder hold what is on disk by now, for all who read it there and go on from it."""
        if self._copy is not None:
            await asyncio.to_thread(self._copy_now, self._copy)

    # ---- out

    def accounting(self) -> Accounting:
        """Counts of trajectories by where they are now."""
        return self.machine.accounting()

    def unpublished(self) -> list[Published]:
        """Versions that relays or replicas have above all published ones, ascending.

        Their learner died before its own word was on record. Nobody knows the size of one that was only loaded: 0.
        """
        return sorted(self.machine.marks.unpublished.values(), key=lambda one: one.version)

    async def settled_pieces(self, step: int) -> list[PieceRow]:
        """References to all that nobody needs who goes back to `step` or a later one, by trajectory."""
        await self.commit()
        return await asyncio.to_thread(_settled, self._path, step)

    @property
    def seq(self) -> int:
        """Number of the last event."""
        seq: int = self._seq
        return seq

    async def archived(self, files: Sequence[Archived], numbers: Sequence[int]) -> None:
        """Put files on record that have the pieces of trajectories, and forget where these were."""
        for event in files:
            self.append(event)
        await self._forget(numbers)

    async def lose(self, numbers: Collection[int], reason: str) -> None:
        """Put on record that pieces of these trajectories can be read no more."""
        if numbers:
            ids = await asyncio.to_thread(_ids_of, self._path, numbers)
            self.append(TokensLost(trajectory_ids=tuple(ids), reason=reason))
            self._batch.lost += numbers
            await self.commit()

    async def holders(self, segments: Collection[str]) -> list[int]:
        """Numbers of trajectories of which something is in one of these segments."""
        await self.commit()
        return await asyncio.to_thread(_holders, self._path, segments)

    async def segments(self) -> set[str]:
        """Segments that references lead to."""
        await self.commit()
        return await asyncio.to_thread(_segments, self._path)

    async def _forget(self, numbers: Sequence[int]) -> None:
        for first in range(0, len(numbers), _FORGET):
            self._batch.forgotten += numbers[first : first + _FORGET]
            await self.commit()

    # ---- behind

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._wake.set)

    def _cut(self) -> Unwritten:
        if self._timer is not None:
            self._timer.cancel()
        batch, self._batch, self._timer = self._batch, Unwritten(), None
        # columns now, plain strings for enums: binding an enum costs SQLite a search for its adapter
        batch.rows = [msgspec.to_builtins(column_values(row)) for row in self._dirty.values()]
        batch.ends = [end_of(row) for row in self._ends.values()]
        self._in_flight, self._dirty, self._ends = self._ends | self._dirty, {}, {}
        self._prompts.clear()
        return batch

    async def _write_batches(self) -> None:
        while not (self._closing and not self._wake.is_set()):
            await self._wake.wait()
            await self._complete.wait()
            self._wake.clear()
            if self._failure is not None:
                raise self._failure
            self._served, self._waiters = self._waiters, []
            await asyncio.to_thread(self._writer.write, self._cut())
            self._in_flight = {}
            for waiter in self._served:
                if not waiter.done():  # done: its commit was cancelled
                    waiter.set_result(None)

    def _copy_now(self, copy: Path) -> None:
        with self._copying:  # one that was cancelled may still be at it
            copy_ledger(self._path, copy)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled():
            self._failure = RuntimeError(f"the writing of {self._path} was cancelled")
        elif task.exception() is not None:
            self._failure = task.exception()
        for waiter in self._served + self._waiters:
            if not waiter.done() and self._failure is not None:
                waiter.set_exception(self._failure)

    def _note_changed(self, row: LiveTrajectory) -> None:
        """The next batch writes it: all of it, or how it ended if nothing else of it is new."""
        ends = row.status in ENDED and row.id not in self._dirty
        (self._ends if ends else self._dirty)[row.id] = row

    def _recall(self, trajectory_id: str) -> LiveTrajectory | None:
        return next(iter(live_rows(self._reader, "id = ?", (trajectory_id,))), None)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert not self._closing, f"{self._path} is closed"


def _settled(ledger: Path, step: int) -> list[PieceRow]:
    with reading(ledger) as connection:
        return list(piece_rows(connection, f"({SETTLED}) AND segment != ''", (step,)))


def _holders(ledger: Path, segments: Collection[str]) -> list[int]:
    with reading(ledger) as connection:
        found = connection.execute("SELECT DISTINCT trajectory, segment FROM piece WHERE segment != ''")
        return sorted({number for number, segment in found if segment in segments})


def _ids_of(ledger: Path, numbers: Collection[int]) -> list[str]:
    with reading(ledger) as connection:
        query = "SELECT id FROM trajectory WHERE number = ?"
        return [id for number in numbers for (id,) in connection.execute(query, (number,))]


def _segments(ledger: Path) -> set[str]:
    with reading(ledger) as connection:
        return {
            segment for (segment,) in connection.execute("SELECT DISTINCT segment FROM piece WHERE segment != ''")
        }


def _restore(machine: Machine, connection: sqlite3.Connection) -> None:
    """Bring a fresh machine to the state on disk."""
    rows = live_rows(connection, "status NOT IN ('consumed', 'dropped')")
    machine.live.update({row.id: row for row in rows})
    accounting = read_accounting(connection)
    machine.train, machine.eval = _tally(accounting.train), _tally(accounting.eval)
    marks = connection.execute(
        "SELECT (SELECT coalesce(max(number), 0) FROM trajectory),"
        " (SELECT coalesce(max(incarnation), 0) FROM incarnation),"
        " (SELECT coalesce(max(version), -1) FROM version),"
        " (SELECT coalesce(max(step), 0) FROM step WHERE NOT undone)"
    ).fetchone()
    number, incarnation, version, step = marks
    spoken_of = {one.version: one for one in unpublished(connection)}
    machine.marks = Marks(
        number=number, incarnation=incarnation, version=version, unpublished=spoken_of, step=step
    )
    clock = connection.execute(
        "SELECT wall, mono FROM event WHERE seq = (SELECT coalesce(max(seq), 1) FROM incarnation)"
    ).fetchone()
    if clock is not None:
        machine.clock = RunClock(*clock)


def _tally(account: KindAccount) -> Tally:
    tally = Tally(account.issued, account.consumed)
    tally.dropped.update(account.dropped)
    return tally
