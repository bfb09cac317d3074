"""The ledger: the record of a run in one SQLite file, which only the controller writes.

It holds responses by reference. `append` and `store_*` only touch memory and never wait. After `FLUSH_S` a thread
writes all that gathered, in order and in one transaction. A transaction never splits events that were appended
without an `await` between them, or inside `together`. So issued = consumed + dropped + live, in memory at every
moment and on disk after every crash (law 1).
"""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from laminar_py.ledger.database import SEAL_NAME, open_reader, open_writer
from laminar_py.ledger.machine import IllegalEventError, Machine, Marks, RunClock
from laminar_py.ledger.pieces import NO_COLUMN, PieceRow
from laminar_py.ledger.recovery import unpublished
from laminar_py.ledger.rows import Accounting, read_accounting, read_replays, row_values
from laminar_py.ledger.seal import seal_digest
from laminar_py.ledger.trajectory import LiveTrajectory, live_rows
from laminar_py.ledger.writer import Stamped, Unwritten, Writer
from laminar_py.records.events import AnyEvent, SealBroken
from laminar_py.records.host import Clock
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.spans import Span, encode_spans
from laminar_py.records.trajectory import Prompt
from laminar_py.records.weights import Published

FLUSH_S = 0.2


class Ledger:
    """Records one run. Use it from one event loop: `start`, appends and commits, `close`.

    Memory holds the events of about one flush interval, and the controller commits at each learner step. A slow
    disk therefore shows as slow commits, not as growing memory.
    """

    def __init__(
        self,
        path: Path,
        *,
        host: str,
        clock: Clock,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._path = path
        self._host = host
        self._clock = clock
        self._wall = wall or (lambda: time.time())  # seconds since 1970
        self.machine = Machine(recall=self._recall)
        self._batch = Unwritten()
        self._prompts: set[str] = set()  # ids in the batch
        self._dirty: dict[str, LiveTrajectory] = {}  # rows that the next batch writes
        self._in_flight: dict[str, LiveTrajectory] = {}  # rows of the batch being written
        self._waiters: list[asyncio.Future[None]] = []  # commits that wait for the next batch
        self._served: list[asyncio.Future[None]] = []  # commits that wait for the batch being written
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._complete = asyncio.Event()  # cleared inside `together`
        self.observe: Callable[[AnyEvent, LiveTrajectory | None], None] = lambda event, row: None
        self._complete.set()

    async def start(self) -> None:
        """Open or create the file, and load its live trajectories into `machine`. Raises `LedgerError`.

        If the run has a seal, commit `SealBroken`, and then delete the seal.
        """
        self._writer = Writer(await asyncio.to_thread(open_writer, self._path), host=self._host)
        self._reader = open_reader(self._path)
        self._seq: int = self._writer.seq
        await asyncio.to_thread(_restore, self.machine, self._reader)
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._write_batches(), name="ledger")
        self._task.add_done_callback(self._writing_ended)
        seal = await asyncio.to_thread(seal_digest, self._path.parent)
        if seal is not None:
            self.append(SealBroken(seal))
            await self.commit()
            (self._path.parent / SEAL_NAME).unlink()

    async def close(self) -> None:
        """Write the last batch and close. Raises the error that ended the ledger early."""
        self._closing = True
        self._wake.set()
        await asyncio.wait({self._task})
        self._reader.close()
        self._writer.close()
        if self._failure is not None:
            raise self._failure

    @property
    def newest_version(self) -> int:
        """The highest version that any event names, -1 before the first; a learner publishes above it."""
        return self.machine.marks.seen_version

    @property
    def newest_published(self) -> int:
        """The highest version on record as published, -1 before the first."""
        return self.machine.marks.version

    def append(self, event: AnyEvent) -> None:
        """Record an event. Raises `IllegalEventError`, an AssertionError, if it cannot happen now."""
        self._check_open()
        wall, mono = self._wall(), self._clock.now()
        row = self.machine.apply(self._seq + 1, event, wall=wall, mono=mono)
        self._seq += 1
        if row is not None:
            self._dirty[row.id] = row
        self._batch.events.append(Stamped(self._seq, wall, mono, event))
        self._schedule()
        self.observe(event, row)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write everything appended inside the block in one transaction, even across `await`s.

        An exception inside the block ends the ledger, which then writes no pending event.
        """
        assert self._complete.is_set(), "`together` does not nest"
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
        """Record events in one transaction, all or none.

        An illegal event raises `IllegalEventError` and ends the ledger, which then writes no pending event.
        """
        try:
            for event in events:
                self.append(event)
        except IllegalEventError as error:
            self._failure = error
            self._wake.set()
            raise

    def store_prompt(self, prompt: Prompt) -> None:
        """Store a prompt, unless the batch has its id already."""
        self._check_open()
        if prompt.id not in self._prompts:
            self._prompts.add(prompt.id)
            self._batch.prompts.append(prompt)
            self._schedule()

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Store the reference to response tokens [start, end); `spans` cover these tokens.

        Raises `IllegalEventError` unless the trajectory runs and has `start` tokens.
        """
        self._check_open()
        row = self.machine.store_tokens(trajectory_id, tokens, spans)
        self._dirty[row.id] = row
        at, contents = tokens.at, (NO_COLUMN, "", tokens.start, tokens.end, encode_spans(spans), tokens.routed)
        self._batch.pieces.append(PieceRow(row.number, *contents, at.segment, at.offset, at.num_bytes, at.digest))
        self._schedule()

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Store the references to the columns that scoring gave a finished response, by name."""
        self._check_open()
        row = self.machine.store_columns(trajectory_id, columns)
        for name, column in columns.items():
            at, contents = column.at, (row.number, name, column.dtype.value, 0, row.length, "[]", 0)
            self._batch.pieces.append(PieceRow(*contents, at.segment, at.offset, at.num_bytes, at.digest))
        self._schedule()

    async def commit(self) -> None:
        """Return when everything appended so far is on disk. Raises the error that ended the ledger."""
        self._check_open()
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        self._wake.set()
        await waiter

    def accounting(self) -> Accounting:
        """Return counts of issued, consumed, dropped and live trajectories."""
        return self.machine.accounting()

    def unpublished(self) -> list[Published]:
        """Return versions that relays or replicas have above the highest published version, ascending.

        Their learner crashed before `VersionPublished` was on record. The size is 0 if only a replica named the
        version.
        """
        return sorted(self.machine.marks.unpublished.values(), key=lambda published: published.version)

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._wake.set)

    def _cut(self) -> Unwritten:
        """Return everything that waits to be written as one batch, and start an empty batch."""
        if self._timer is not None:
            self._timer.cancel()
        batch, self._batch, self._timer = self._batch, Unwritten(), None
        # columns now, plain strings for enums: binding an enum costs SQLite a search for its adapter
        batch.rows = [msgspec.to_builtins(row_values(row)) for row in self._dirty.values()]
        self._in_flight, self._dirty = self._dirty, {}
        self._prompts.clear()
        return batch

    async def _write_batches(self) -> None:
        """Write batches in a thread until closed, and complete the commits that wait for each batch.

        Raises the error of a failed write, or `_failure` once `together` or `append_all` has set it.
        """
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

    def _writing_ended(self, task: "asyncio.Task[None]") -> None:
        """Keep the error that ended the writing task, and raise it in all waiting commits."""
        if task.cancelled():
            self._failure = RuntimeError(f"the writing of {self._path} was cancelled")
        elif task.exception() is not None:
            self._failure = task.exception()
        for waiter in self._served + self._waiters:
            if not waiter.done() and self._failure is not None:
                waiter.set_exception(self._failure)

    def _recall(self, trajectory_id: str) -> LiveTrajectory | None:
        return next(iter(live_rows(self._reader, "id = ?", (trajectory_id,))), None)

    def _check_open(self) -> None:
        """Raise the error that ended the ledger, or `AssertionError` after `close`."""
        if self._failure is not None:
            raise self._failure
        assert not self._closing, f"{self._path} is closed"


def _restore(machine: Machine, connection: sqlite3.Connection) -> None:
    """Load live trajectories, counts, marks and clock from disk into a fresh machine."""
    rows = live_rows(connection, "status NOT IN ('consumed', 'dropped')")
    machine.live.update({row.id: row for row in rows})
    machine.counts, machine.replays = read_accounting(connection), read_replays(connection)
    marks = connection.execute(
        "SELECT (SELECT coalesce(max(number), 0) FROM trajectory),"
        " (SELECT coalesce(max(incarnation), 0) FROM incarnation),"
        " (SELECT coalesce(max(version), -1) FROM version),"
        " (SELECT coalesce(max(step), 0) FROM step WHERE NOT undone)"
    ).fetchone()
    number, incarnation, version, step = marks
    later = {published.version: published for published in unpublished(connection)}
    machine.marks = Marks(number=number, incarnation=incarnation, version=version, unpublished=later, step=step)
    clock = connection.execute(
        "SELECT wall, mono FROM event WHERE seq = (SELECT coalesce(max(seq), 1) FROM incarnation)"
    ).fetchone()
    if clock is not None:
        machine.clock = RunClock(*clock)
