"""Segments: files of pieces that one process appends to, on the host that it runs on.

Replicas, scorers and the reference model each have a writer. Invariant: a reference exists only once its bytes are
in the file, in the kernel's hands: whoever is killed after that has lost nothing. `sync` brings them to the disk,
for what a loss of power must not take. A file that has reached `ROLL_BYTES` gets no more, and is deleted whole
(`segments.folder`) when nobody needs a piece of it any more. A write that fails in the middle is taken back, so
that frames always lie end to end; a file that somebody deleted gets no more.
"""

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from laminar_py.ledger.segments.frames import AnyPiece, Buffer, make_frame
from laminar_py.ledger.segments.local import make_folder
from laminar_py.records.pieces import Piece, PieceRef, TokensRef, unpack_experts

ROLL_BYTES, JOURNAL_ROLL_BYTES = 64 * 2**20, 16 * 2**20
SEGMENT, JOURNAL = ".segment", ".journal"
_AT_ONCE = 512  # buffers of one call; the kernel takes 1,024


class SegmentWriter:
    """Segments of one part, e.g. `SegmentWriter(folder, "replica-3")`; the first is made with the first piece."""

    def __init__(self, folder: Path, part: str, *, roll_bytes: int = ROLL_BYTES) -> None:
        self._folder = folder
        self._part = part
        self._roll_bytes = roll_bytes
        self._file: int | None = None
        self._name = ""
        self._size = 0
        self._unsynced: list[int] = []  # full files; as many as are filled between two calls of `sync`

    def write(self, piece: AnyPiece) -> PieceRef:
        """Append a piece; see `write_all`."""
        return self.write_all([piece])[0]

    def write_all(self, pieces: Sequence[AnyPiece]) -> list[PieceRef]:
        """Append pieces, all to one file; where each lies. Raises `OSError` where there is no room."""
        if not pieces:
            return []
        file = self._open()
        frames = [make_frame(piece) for piece in pieces]
        append(file, [buffer for frame in frames for buffer in frame.buffers], at=self._size)
        refs = []
        for frame in frames:
            refs.append(PieceRef(self._name, self._size, frame.num_bytes, frame.digest))
            self._size += frame.num_bytes
        return refs

    def sync(self) -> None:
        """Have all that was written on disk; another thread may write meanwhile. Raises `OSError`."""
        full, self._unsynced = self._unsynced, []
        for file in full:
            os.fdatasync(file)
            os.close(file)
        present = self._file  # which the other thread may end meanwhile, but not close
        if present is not None:
            os.fdatasync(present)

    def close(self) -> None:
        """Have all on disk; what comes after it is in another file. Raises `OSError`."""
        self._end_file()
        self.sync()

    def _open(self) -> int:
        if self._file is not None and (self._size >= self._roll_bytes or not os.fstat(self._file).st_nlink):
            self._end_file()
        if self._file is None:
            self._name, self._size = new_name(self._part), 0
            make_folder(self._folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._folder / f"{self._name}{SEGMENT}", flags, 0o600)
        return self._file

    def _end_file(self) -> None:
        if self._file is not None:
            self._unsynced.append(self._file)
            self._file = None


class Journal:
    """Journals of one part, e.g. `Journal(folder, "replica-3")`; the first is made with the first entry.

    Journals hold tokens of running trajectories that nobody was told of yet. The replica writes them now and then,
    so that a death costs little; `segments.salvage` reads them after one. A trajectory that leaves the replica has
    all of its tokens in a segment by then, and its entries count for nothing; the replica deletes a file in which
    nothing counts. Invariant: tokens that a running trajectory had an interval ago are there, or a reference tells
    of them.
    """

    def __init__(self, folder: Path, part: str, *, roll_bytes: int = JOURNAL_ROLL_BYTES) -> None:
        self._folder = folder
        self._part = part
        self._roll_bytes = roll_bytes
        self._file: int | None = None
        self._size = 0
        self._entries: dict[Path, set[str]] = {}  # trajectories of each file, the present one last

    def write(self, pieces: Sequence[Piece]) -> None:
        """Append what running trajectories have got since the last entry. Raises `OSError`."""
        if pieces:
            frames = [make_frame(piece) for piece in pieces]
            file = self._open()
            append(file, [buffer for frame in frames for buffer in frame.buffers], at=self._size)
            self._size += sum(frame.num_bytes for frame in frames)
            next(reversed(self._entries.values())).update(piece.trajectory_id for piece in pieces)

    def forget(self, trajectory_id: str) -> None:
        """Note that a trajectory has left; files without others are deleted, but for the present one."""
        present = next(reversed(self._entries), None)
        for path, trajectories in list(self._entries.items()):
            trajectories.discard(trajectory_id)
            if not trajectories and path != present:
                del self._entries[path]
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """End it and delete its files: its part ends in peace, and has told everything."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        for path in self._entries:
            path.unlink(missing_ok=True)
        self._entries.clear()

    def _open(self) -> int:
        if self._file is not None and (self._size >= self._roll_bytes or not os.fstat(self._file).st_nlink):
            os.close(self._file)
            self._file = None
        if self._file is None:
            make_folder(self._folder)
            path = self._folder / f"{new_name(self._part)}{JOURNAL}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file, self._size = os.open(path, flags, 0o600), 0
            self._entries[path] = set()
        return self._file


def tokens_ref(piece: Piece, at: PieceRef) -> TokensRef:
    """Reference to tokens that were written there."""
    experts = None if piece.experts is None else unpack_experts(piece.experts)
    routed = 0 if experts is None else experts.start + experts.positions
    return TokensRef(piece.start, piece.end, at, routed)


def new_name(part: str) -> str:
    """A name that no other file of the run has, on whatever host, e.g. `replica-3.18f2a4c1b.9e41`."""
    return f"{part}.{time.time_ns():x}.{secrets.token_hex(2)}"


def part_of(segment: str) -> str:
    """The part that wrote a segment, by the name of that."""
    return segment.split(".", 1)[0]


def append(file: int, buffers: Sequence[Buffer], *, at: int) -> None:
    """Write buffers to the end of a file, which is at this byte, or none of them. Raises `OSError`."""
    try:
        write_whole(file, buffers)
    except OSError:
        os.ftruncate(file, at)
        os.lseek(file, at, os.SEEK_SET)
        raise


def write_whole(file: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers one after the other, all of them. Raises `OSError`."""
    for first in range(0, len(buffers), _AT_ONCE):
        rest: list[Buffer] = [buffer for buffer in buffers[first : first + _AT_ONCE] if len(buffer)]
        while rest:
            written = os.writev(file, rest)
            while rest and written >= len(rest[0]):
                written -= len(rest.pop(0))
            if rest:
                rest[0] = memoryview(rest[0])[written:]
