"""Files that environments are rebuilt from after a death: the last answer, and the state if that is saved.

Written by `environment.host`, one for each trajectory, of frames that lie end to end: a turn that is about to be
taken, and a turn that was. The controller deletes what is of trajectories that are on record as ended. Invariant:
an answer is in the file before anybody hears of it, so whoever asks again hears the same, whatever died meanwhile,
and no turn that was answered is taken twice.
"""

import errno
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from laminar_py.records.codec import decode, encode
from laminar_py.records.digests import DIGEST_BYTES
from laminar_py.records.environment import EnvironmentTurn

SUFFIX = ".environment"
KEPT_BYTES = 65_536  # of a file, and as many times its last frame as `KEPT_FRAMES`; then that alone is kept
KEPT_FRAMES = 4
_HEAD = struct.Struct(f"<I{DIGEST_BYTES}s")  # bytes of a frame behind it, and their digest


def environments_path(run: Path) -> Path:
    """Folder of these files in a run's folder."""
    return run / "environments"


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that was answered, with what the environment was told until then."""

    told: bytes  # digest of the response that it was told
    answer: EnvironmentTurn
    state: bytes | None = None  # after that turn; None where the environment cannot be restored


class TurnEntry(msgspec.Struct, frozen=True):
    """Entry of a file: a turn that was answered, or else one that is about to be taken, by what was told."""

    saved: SavedTurn | None = None
    attempted: bytes = b""


class TurnsOnFile(msgspec.Struct, frozen=True):
    """Entries of a trajectory: the last turn that was answered, and attempts at one since then."""

    saved: SavedTurn | None = None
    attempts: int = 0


class SavedTurns:
    """Files of one process in `folder`, one for each trajectory that goes on. Raises `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, trajectory_id: str, saved: SavedTurn) -> None:
        """Write a turn that was answered."""
        frame, path = _frame(TurnEntry(saved)), self._path(trajectory_id)
        if _append(path, frame) > max(KEPT_BYTES, KEPT_FRAMES * len(frame)):
            partial = _partial(path)
            partial.write_bytes(frame)
            os.replace(partial, path)

    def attempt(self, trajectory_id: str, told: bytes) -> None:
        """Note that a turn is about to be taken."""
        _append(self._path(trajectory_id), _frame(TurnEntry(attempted=told)))

    def load(self, trajectory_id: str, told: bytes) -> TurnsOnFile:
        """Entries of a trajectory that came from a process before, and attempts at the turn of this digest.

        A frame that a death has cut off is taken off the file, so that others can follow.
        """
        path, found = self._path(trajectory_id), TurnsOnFile()
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return found
        whole = 0
        for entry, end in _entries(data):
            whole = end
            if entry.saved is not None:
                found = TurnsOnFile(entry.saved)
            else:
                found = TurnsOnFile(found.saved, found.attempts + (entry.attempted == told))
        if whole < len(data):
            os.truncate(path, whole)
        return found

    def names(self) -> list[str]:
        """Trajectories of which there is something."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}"))

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete what there is of these."""
        for name in trajectory_ids:
            for path in (self._path(name), _partial(self._path(name))):
                path.unlink(missing_ok=True)

    def _path(self, trajectory_id: str) -> Path:
        return self._folder / f"{trajectory_id}{SUFFIX}"


def _partial(path: Path) -> Path:
    """File that is about to take the place of another."""
    return path.with_name(f"{path.name}.new")


def _frame(entry: TurnEntry) -> bytes:
    body = encode(entry)
    return _HEAD.pack(len(body), blake3(body).digest(length=DIGEST_BYTES)) + body


def _append(path: Path, frame: bytes) -> int:
    """Write at the end of a file, whole or not at all; its bytes then. Raises `OSError`."""
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        if file.write(frame) != len(frame):  # the disk is full
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return file.tell()


def _entries(data: bytes) -> Iterator[tuple[TurnEntry, int]]:
    """Entries from the beginning on, as far as frames are whole, each with where it ends."""
    place = 0
    while place + _HEAD.size <= len(data):
        size, digest = _HEAD.unpack_from(data, place)
        body = data[place + _HEAD.size : place + _HEAD.size + size]
        if len(body) < size or blake3(body).digest(length=DIGEST_BYTES) != digest:
            return
        place += _HEAD.size + size
        yield decode(TurnEntry, body), place
