"""Storage of a replica's responses: reported tokens in its segment, running ones in its journal.

`rollout.replica` owns the store; `rollout.streams` uses it. Tokens are in a segment before a report names them,
and unreported tokens are in the journal within an interval, so a crash loses at most that interval
(`tests/runs/test_payload_run.py`).
"""

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from laminar_py.ledger.segments.payload import Payload
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import LEAST_FREE, Journal, SegmentWriter, make_folder, tokens_ref
from laminar_py.records.engine import EarlierText, StoreFullError
from laminar_py.records.pieces import PayloadLostError, Piece, TokensRef
from laminar_py.records.replica import Assignment, EarlierResponse

SYNC_S = 5.0  # between syncs to disk, against a loss of power


class ResponseStore(Protocol):
    """Storage of responses as a replica needs it; a run uses `SegmentStore`, and the simulator counts tokens."""

    def keep(self, piece: Piece) -> TokensRef:
        """Store a piece that will be reported, and return its place."""
        ...

    def journal(self, pieces: Sequence[Piece]) -> None:
        """Store unreported tokens of running trajectories, which the controller reads after a crash."""
        ...

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory's tokens from the journal, since all of them were reported."""
        ...

    async def read(self, assignment: Assignment) -> Payload:
        """Read the response so far, which an assignment continues. Raises `PayloadLostError`."""
        ...

    async def read_earlier(self, assignment: Assignment) -> tuple[EarlierText, ...]:
        """Read the earlier responses that an assignment names, as far as they can be read at once."""
        ...

    async def synced(self) -> None:
        """Return when every host of the run can read all kept pieces."""
        ...

    async def keep_synced(self) -> None:
        """Sync kept pieces to disk regularly, until cancelled."""
        ...


class SegmentStore:
    """Segment and journal of one replica in `folder`, and a reader for the responses that the replica continues.

    The constructor and every write raise `StoreFullError` if the disk is full or cannot be written.
    """

    def __init__(self, folder: Path, part: str, reader: PayloadReader, *, shared: bool = False) -> None:
        self._folder = folder
        self._segment = SegmentWriter(folder, part, shared=shared)
        self._journal = Journal(folder, part)
        self._reader = reader
        with self._writing():
            make_folder(folder)
            free = shutil.disk_usage(folder).free
        if free < LEAST_FREE:
            raise StoreFullError(f"segments={folder}: only {free / 2**20:.0f} MiB are free there; make room")

    def keep(self, piece: Piece) -> TokensRef:
        """Write a piece that will be reported, and return its place."""
        with self._writing():
            return tokens_ref(piece, self._segment.write(piece))

    def journal(self, pieces: Sequence[Piece]) -> None:
        """Write unreported tokens of running trajectories, which the controller reads after a crash."""
        with self._writing():
            self._journal.write(pieces)

    def forget(self, trajectory_id: str) -> None:
        """Drop a trajectory's tokens from the journal, since all of them were reported."""
        self._journal.forget(trajectory_id)

    async def read(self, assignment: Assignment) -> Payload:
        """Read the response so far, which an assignment continues. Raises `PayloadLostError`."""
        return await asyncio.to_thread(self._read, assignment)

    async def read_earlier(self, assignment: Assignment) -> tuple[EarlierText, ...]:
        """Read the earlier responses that an assignment names, as far as they can be read at once."""
        return await asyncio.to_thread(self._read_earlier, assignment.earlier)

    async def synced(self) -> None:
        """Return when every host of the run can read all written pieces."""
        with self._writing():
            await self._segment.synced()

    async def keep_synced(self) -> None:
        """Sync written pieces to disk every `SYNC_S`, until cancelled."""
        while True:
            await asyncio.sleep(SYNC_S)
            with self._writing():
                await self._segment.on_disk()

    def _read(self, assignment: Assignment) -> Payload:
        """Read an assignment's response so far. Raises `PayloadLostError` if it is lost or has another length."""
        loaded = self._reader.load(ref.at for ref in assignment.tokens)
        response = loaded.response(assignment.tokens)
        if len(response.ids) != assignment.length:
            segments = ", ".join(dict.fromkeys(ref.at.segment for ref in assignment.tokens))
            raise PayloadLostError(
                f"{len(response.ids)} tokens of {assignment.length} are in segments {segments or 'none'}"
            )
        return response

    def _read_earlier(self, earlier: Sequence[EarlierResponse]) -> tuple[EarlierText, ...]:
        """Read these responses, and leave out lost ones."""
        loaded = self._reader.load((ref.at for one in earlier for ref in one.tokens), waits=False)
        found: list[EarlierText] = []
        for one in earlier:
            with contextlib.suppress(PayloadLostError):
                found.append(EarlierText(one.trajectory_id, loaded.response(one.tokens).ids, one.version))
        return tuple(found)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Run the body; raise `StoreFullError` instead of an `OSError`."""
        try:
            yield
        except OSError as error:
            raise StoreFullError(
                f"segments={self._folder}: cannot be written ({error.strerror}); make room"
            ) from None
