"""The journal of a replica: what its running trajectories have so far and nobody was told yet.

Written every so often, so that a death costs little; read by `segments.salvage` after one. A trajectory that
leaves the replica has all of its tokens in a segment by then, and its entries count for nothing. Journals are
files of frames as segments are; one in which nothing counts any more is deleted by the replica itself. Invariant:
what a running trajectory has that no reference tells of, and an interval ago had already, is in the journals.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from laminar_py.ledger.segments.frames import make_frame
from laminar_py.ledger.segments.local import make_folder
from laminar_py.ledger.segments.writer import append, new_name
from laminar_py.records.pieces import Piece

ROLL_BYTES = 16 * 2**20
JOURNAL = ".journal"


class Journal:
    """Journals of one part, e.g. `Journal(folder, "replica-3")`; the first is made with the first entry."""

    def __init__(self, folder: Path, part: str, *, roll_bytes: int = ROLL_BYTES) -> None:
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
