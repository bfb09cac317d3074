"""Writers of segments and journals: files of pieces to which one process appends, in the run's folder.

Replicas, scorers and the reference model have a writer each. The bytes of a piece are written to the file before
its reference exists, so a killed process loses no referenced piece (law 1). `sync` brings the bytes to disk,
against a loss of power. In a run on several hosts, a process syncs before it sends a reference. A failed write is
undone, so frames always lie end to end. No segment is ever deleted.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from laminar_py.ledger.segments.frames import AnyPiece, Buffer, make_frame
from laminar_py.records.pieces import Piece, PieceRef, TokensRef, unpack_experts

JOURNAL_ROLL_BYTES = 16 * 2**20
LEAST_FREE = 16 * 2**20  # free bytes of a disk, below which no writer starts
SEGMENT, JOURNAL = ".segment", ".journal"
_AT_ONCE = 512  # buffers per call; the kernel takes 1,024


class SegmentWriter:
    """Writes the segment of one process, e.g. `SegmentWriter(folder, "replica-3")`.

    The first piece creates the file, so a process without pieces leaves no file. With `shared`, for a run on
    several hosts, `synced` brings pieces to the shared disk, where every host can read them.
    """

    def __init__(self, folder: Path, part: str, *, shared: bool = False, suffix: str = SEGMENT) -> None:
        self.size = 0  # bytes
        self.path = folder / f"{new_name(part)}{suffix}"
        self.shared = shared
        self._num_synced = 0  # bytes that `on_disk` has brought to disk
        self._syncing = asyncio.Lock()
        self._sync_thread = ThreadPoolExecutor(1, "sync")  # patient readers may use up the loop's threads
        self._fault: OSError | None = None  # of a failed sync
        self._file: int | None = None

    def write(self, piece: AnyPiece) -> PieceRef:
        """Append a piece and return its place. Raises `OSError`."""
        return self.write_all([piece])[0]

    def write_all(self, pieces: Sequence[AnyPiece]) -> list[PieceRef]:
        """Append pieces and return their places. Raises `OSError`, e.g. without room."""
        if not pieces:
            return []
        if self._file is None:
            make_folder(self.path.parent)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        frames = [make_frame(piece) for piece in pieces]
        buffers = [buffer for frame in frames for buffer in frame.buffers]
        append(self._file, buffers, at=self.size)
        refs = []
        for frame in frames:
            refs.append(PieceRef(self.path.stem, self.size, frame.num_bytes, frame.digest))
            self.size += frame.num_bytes
        return refs

    def sync(self) -> None:
        """Sync all written pieces to disk. A failed sync raises `OSError`, and so do all later calls."""
        if self._fault is not None:
            raise self._fault
        if self._file is not None:
            try:
                os.fdatasync(self._file)
            except OSError as error:
                self._fault = error  # Linux reports lost bytes once; the next sync would succeed
                raise

    async def synced(self) -> None:
        """Return when other hosts, if there are any, can read all pieces written so far. Raises `OSError`."""
        if self.shared:
            await self.on_disk()

    async def on_disk(self) -> None:
        """Return when all pieces written so far are on disk. Raises `OSError`.

        One sync at a time runs, in a thread, and serves all callers that wait for it.
        """
        written = self.size
        if self._num_synced < written:
            async with self._syncing:
                if self._num_synced < written:
                    size = self.size
                    await asyncio.get_running_loop().run_in_executor(self._sync_thread, self.sync)
                    self._num_synced = size

    def close(self, *, sync: bool = True) -> None:
        """Close the file, by default after a sync; nothing can be written afterwards. Raises `OSError`."""
        if self._file is not None:
            if sync:
                self.sync()
            os.close(self._file)
            self._file = None


class Journal:
    """Writes journals of one process, e.g. `Journal(folder, "replica-3")`; an entry creates the first file.

    Journals hold unreported tokens of running trajectories. The replica writes them every interval, so that a
    crash loses at most one interval; `segments.salvage` reads them after a crash. When a trajectory leaves the
    replica, all of its tokens are in a segment, and the replica deletes journals without a running trajectory.
    """

    def __init__(self, folder: Path, part: str, *, roll_bytes: int = JOURNAL_ROLL_BYTES) -> None:
        self._folder, self._part, self._roll_bytes = folder, part, roll_bytes
        self._files: list[tuple[SegmentWriter, set[str]]] = []  # with running trajectories, the current file last

    def write(self, pieces: Sequence[Piece]) -> None:
        """Append tokens of running trajectories since their last entry. Raises `OSError`."""
        if not pieces:
            return
        if not self._files or self._files[-1][0].size >= self._roll_bytes:
            if self._files:
                self._files[-1][0].close(sync=False)  # a power cut may take journals
            self._files.append((SegmentWriter(self._folder, self._part, suffix=JOURNAL), set()))
        writer, running = self._files[-1]
        writer.write_all(pieces)
        running.update(piece.trajectory_id for piece in pieces)

    def forget(self, trajectory_id: str) -> None:
        """Forget a trajectory that left, and delete older files without running trajectories."""
        for _, running in self._files:
            running.discard(trajectory_id)
        unneeded = [writer for writer, running in self._files[:-1] if not running]
        self._files = [entry for entry in self._files if entry[0] not in unneeded]
        for writer in unneeded:
            writer.path.unlink(missing_ok=True)


def tokens_ref(piece: Piece, at: PieceRef) -> TokensRef:
    """Return the reference to the tokens of a piece that was written at `at`."""
    experts = None if piece.experts is None else unpack_experts(piece.experts)
    routed = 0 if experts is None else experts.start + experts.positions
    return TokensRef(piece.start, piece.end, at, routed)


def make_folder(folder: Path) -> None:
    """Create a folder of this user alone, if it is missing. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def new_name(part: str) -> str:
    """Return a file name that is unique in the run, over all hosts, e.g. `replica-3.18f2a4c1b.9e41`."""
    return f"{part}.{time.time_ns():x}.{secrets.token_hex(2)}"


def segments_in(folder: Path) -> list[Path]:
    """Return the segments in a folder; segments of one process are in order of creation."""
    return sorted(folder.glob(f"*{SEGMENT}"))


def append(file: int, buffers: Sequence[Buffer], *, at: int) -> None:
    """Append buffers to a file of `at` bytes. On `OSError`, cut the file back to `at` bytes and raise."""
    try:
        write_whole(file, buffers)
    except OSError:
        os.ftruncate(file, at)
        os.lseek(file, at, os.SEEK_SET)
        raise


def write_whole(file: int, buffers: Sequence[Buffer]) -> None:
    """Write all buffers in order. Raises `OSError`."""
    for first in range(0, len(buffers), _AT_ONCE):
        rest: list[Buffer] = [buffer for buffer in buffers[first : first + _AT_ONCE] if len(buffer)]
        while rest:
            written = os.writev(file, rest)
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest:
                rest[0] = memoryview(rest[0])[written:]
