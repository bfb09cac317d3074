"""Storage of a replica's responses: what it has of them goes to segment and journal, what it goes on with is read.

Owned by `replica`; used by `streams`. Invariant: what is told of a response lies in a segment already, and what is
not told is in the journal an interval later, so that a death of the process costs no more than that.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from laminar_py.ledger.segments.local import LEAST_FREE, make_folder
from laminar_py.ledger.segments.payload import Payload
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import Journal, SegmentWriter, tokens_ref
from laminar_py.records.pieces import PayloadLostError, Piece, TokensRef
from laminar_py.records.protocols import StoreFullError
from laminar_py.records.replica import Assignment

SYNC_S = 5.0  # after so long what was written is on disk, for what a loss of power must not take


class ResponseStore(Protocol):
    """Storage of responses, as a replica needs it; `SegmentStore` is that of a run."""

    def keep(self, piece: Piece) -> TokensRef:
        """Keep a piece that is to be told."""
        ...

    def note(self, pieces: Sequence[Piece]) -> None:
        """Keep for salvage what running trajectories have got and nobody is told yet."""
        ...

    def forget(self, trajectory_id: str) -> None:
        """Note that a trajectory has left, and all of it was told."""
        ...

    async def read(self, assignment: Assignment) -> Payload:
        """The response that an assignment goes on from. Raises `PayloadLostError`."""
        ...

    async def keep_synced(self) -> None:
        """Bring what was kept to where it lasts, until cancelled."""
        ...


class SegmentStore:
    """Segment and journal of one replica in `folder`, and a reader for the responses that it goes on with.

    Raises `StoreFullError` where nothing can be written, also when it is made.
    """

    def __init__(self, folder: Path, part: str, reader: PayloadReader) -> None:
        self._folder = folder
        self._segment = SegmentWriter(folder, part)
        self._journal = Journal(folder, part)
        self._reader = reader
        with self._writing():
            make_folder(folder)
            free = shutil.disk_usage(folder).free
        if free < LEAST_FREE:
            raise StoreFullError(f"segments={folder}: {free / 2**20:.0f} MiB are free there; make room")

    def keep(self, piece: Piece) -> TokensRef:
        """Write a piece that is to be told."""
        with self._writing():
            return tokens_ref(piece, self._segment.write(piece))

    def note(self, pieces: Sequence[Piece]) -> None:
        """Write what running trajectories have got and nobody is told yet."""
        with self._writing():
            self._journal.write(pieces)

    def forget(self, trajectory_id: str) -> None:
        """Note that a trajectory has left, and all of it was told."""
        self._journal.forget(trajectory_id)

    async def read(self, assignment: Assignment) -> Payload:
        """The response that an assignment goes on from. Raises `PayloadLostError`."""
        return await asyncio.to_thread(self._read, assignment)

    async def keep_synced(self) -> None:
        """Bring what was written to the disk now and then, until cancelled."""
        while True:
            await asyncio.sleep(SYNC_S)
            with self._writing():
                await asyncio.to_thread(self._segment.sync)

    def _read(self, assignment: Assignment) -> Payload:
        loaded = self._reader.load((one.at for one in assignment.tokens), stores=assignment.stores)
        response = loaded.response(assignment.tokens)
        if len(response.ids) != assignment.length:
            raise PayloadLostError(f"{len(response.ids)} tokens of {assignment.length}")
        return response

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreFullError(
                f"segments={self._folder}: cannot be written ({error.strerror}); make room"
            ) from None
