"""Writers of segments and journals: files of pieces to which one process appends, on its own host.

Replicas, scorers and the reference model have a writer each. The bytes of a piece are written to the file before
its reference exists, so a killed process loses no referenced piece (law 1). `sync` brings the bytes to
disk, against a loss of power. A segment of `ROLL_BYTES` is full; `discard` deletes it when no piece of it is
needed. A failed write is undone, so frames always lie end to end. A deleted file gets no further pieces.
"""

import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from laminar_py.ledger.segments.frames import AnyPiece, Buffer, make_frame
from laminar_py.ledger.segments.local import make_folder
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import Piece, PieceRef, TokensRef, unpack_experts

ROLL_BYTES, JOURNAL_ROLL_BYTES = 64 * 2**20, 16 * 2**20
SEGMENT, JOURNAL = ".segment", ".journal"
_AT_ONCE = 512  # buffers per call; the kernel takes 1,024


class SegmentWriter:
    """Writes segments of one process, e.g. `SegmentWriter(folder, "replica-3")`; with another suffix a `Journal`.

    The first piece creates the first file, so a process without pieces leaves no file.
    """

    def __init__(self, folder: Path, part: str, *, roll_bytes: int = ROLL_BYTES, suffix: str = SEGMENT) -> None:
        self._folder = folder
        self._part = part
        self._roll_bytes = roll_bytes
        self._suffix = suffix
        self._file: int | None = None
        self._name = ""
        self._size = 0
        self._unsynced: list[int] = []  # full files since the last `sync`

    def write(self, piece: AnyPiece) -> PieceRef:
        """Append a piece and return its place. Raises `OSError`."""
        return self.write_all([piece])[0]

    def write_all(self, pieces: Sequence[AnyPiece]) -> list[PieceRef]:
        """Append pieces to one file and return their places. Raises `OSError`, e.g. without room."""
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
        """Sync all written pieces to disk; another thread may write meanwhile. Raises `OSError`."""
        full, self._unsynced = self._unsynced, []
        for file in full:
            os.fdatasync(file)
            os.close(file)
        present = self._file  # the other thread may end it meanwhile, but not close it
        if present is not None:
            os.fdatasync(present)

    def close(self) -> None:
        """Sync all to disk and end the file; a later piece creates another. Raises `OSError`."""
        self._end_file()
        self.sync()

    def _open(self) -> int:
        if self._file is not None and (self._size >= self._roll_bytes or not os.fstat(self._file).st_nlink):
            self._end_file()
        if self._file is None:
            self._name, self._size = new_name(self._part), 0
            make_folder(self._folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._folder / f"{self._name}{self._suffix}", flags, 0o600)
        return self._file

    def _end_file(self) -> None:
        if self._file is None:
            return
        if self._suffix == SEGMENT:
            self._unsynced.append(self._file)
        else:
            os.close(self._file)  # a crash of the process leaves the bytes, and a loss of power may take journals
        self._file = None


class Journal:
    """Writes journals of one process, e.g. `Journal(folder, "replica-3")`; an entry creates the first file.

    Journals hold unreported tokens of running trajectories. The replica writes them every interval, so that a
    crash loses at most one interval; `segments.salvage` reads them after a crash. When a trajectory leaves the
    replica, all of its tokens are in a segment, and the replica deletes journals without a running trajectory.
    """

    def __init__(self, folder: Path, part: str, *, roll_bytes: int = JOURNAL_ROLL_BYTES) -> None:
        self._folder = folder
        self._writer = SegmentWriter(folder, part, roll_bytes=roll_bytes, suffix=JOURNAL)
        self._entries: dict[Path, set[str]] = {}  # running trajectories in each file, the current file last

    def write(self, pieces: Sequence[Piece]) -> None:
        """Append tokens of running trajectories since their last entry. Raises `OSError`."""
        if refs := self._writer.write_all(pieces):
            path = self._folder / f"{refs[0].segment}{JOURNAL}"
            self._entries.setdefault(path, set()).update(piece.trajectory_id for piece in pieces)

    def forget(self, trajectory_id: str) -> None:
        """Forget a trajectory that left, and delete older files without running trajectories."""
        present = next(reversed(self._entries), None)
        for path, trajectories in list(self._entries.items()):
            trajectories.discard(trajectory_id)
            if not trajectories and path != present:
                del self._entries[path]
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Delete all journals, since the process ends and has reported everything."""
        self._writer.close()
        for path in self._entries:
            path.unlink(missing_ok=True)
        self._entries.clear()


def tokens_ref(piece: Piece, at: PieceRef) -> TokensRef:
    """Return the reference to tokens that were written at a place."""
    experts = None if piece.experts is None else unpack_experts(piece.experts)
    routed = 0 if experts is None else experts.start + experts.positions
    return TokensRef(piece.start, piece.end, at, routed)


def new_name(part: str) -> str:
    """Return a file name that is unique in the run, over all hosts, e.g. `replica-3.18f2a4c1b.9e41`."""
    return f"{part}.{time.time_ns():x}.{secrets.token_hex(2)}"


def part_of(segment: str) -> str:
    """Return the name of the process that wrote a segment."""
    return segment.split(".", 1)[0]


def append(file: int, buffers: Sequence[Buffer], *, at: int) -> None:
    """Append all buffers to a file that ends at byte `at`, or none. Raises `OSError`."""
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


# ---- files of a host: the controller calls these functions on it (`workers.payload`)


class SegmentFile(msgspec.Struct, frozen=True, array_like=True):
    """A segment of a host, e.g. `SegmentFile("replica-3-1-17.18f2a.9e41", 65536, 2.5)`."""

    name: str
    num_bytes: int
    age_s: float  # since the last write to it


def segments_in(folder: Path) -> list[Path]:
    """Return the segments in a folder; segments of one process are in order of creation."""
    return sorted(folder.glob(f"*{SEGMENT}"))


def segments_here(folder: str) -> bytes:
    """Return the segments of this host as `list[SegmentFile]`, in the order of `segments_in`."""
    now = time.time()
    found = ((path, path.stat()) for path in segments_in(Path(folder)))
    return encode(
        [SegmentFile(path.name.removesuffix(SEGMENT), stat.st_size, now - stat.st_mtime) for path, stat in found]
    )


def labels_here(folder: str) -> bytes:
    """Return the labels with a segment or a journal on this host, as `list[str]`."""
    paths = (*Path(folder).glob(f"*{SEGMENT}"), *Path(folder).glob(f"*{JOURNAL}"))
    return encode(sorted({part_of(path.name) for path in paths}))


def discard(folder: str, names: bytes) -> bytes:
    """Delete files that match a `list[str]` of patterns, if they still exist; return their number."""
    paths = [path for name in decode(list[str], names) for path in Path(folder).glob(Path(name).name)]
    for path in paths:
        path.unlink(missing_ok=True)
    return encode(len(paths))


def segment_files(names: Iterable[str]) -> list[str]:
    """Return the file names of segments."""
    return [f"{name}{SEGMENT}" for name in names]
