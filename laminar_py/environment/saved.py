"""Files that environments are rebuilt from after a death: the last answer, and the state if that is saved.

Written by `environment.host`; the controller deletes what is of trajectories that are on record as ended.
Invariant: an answer is in the file before anybody hears of it, so whoever asks again hears the same, whatever died
meanwhile, and no turn that was answered is taken twice.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.records.environment import EnvironmentTurn

SUFFIX = ".environment"
ATTEMPT = ".attempt"


def environments_path(run: Path) -> Path:
    """Folder of these files in a run's folder."""
    return run / "environments"


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The last turn that was answered, with what the environment was told until then."""

    told: bytes  # digest of the response that it was told
    answer: EnvironmentTurn
    state: bytes | None = None  # after that turn; None where the environment cannot be restored


class SavedTurns:
    """Files of one process in `folder`, one for each trajectory that goes on. Raises `OSError`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, trajectory_id: str, saved: SavedTurn) -> None:
        """Write the last turn in place of the one before, whole or not at all."""
        path = self._path(trajectory_id)
        partial = path.with_name(f"{path.name}.new")
        partial.write_bytes(encode(saved))
        os.replace(partial, path)
        path.with_suffix(ATTEMPT).unlink(missing_ok=True)

    def attempt(self, trajectory_id: str, told: bytes) -> int:
        """Note that a turn is about to be taken; how often it was noted since the last one that was saved."""
        path = self._path(trajectory_id).with_suffix(ATTEMPT)
        before = path.read_bytes() if path.is_file() else b""
        count = 1 + (before[-1] if before[:-1] == told else 0)
        path.write_bytes(told + bytes([min(count, 255)]))
        return count

    def load(self, trajectory_id: str) -> SavedTurn | None:
        """The last turn; None where there is none."""
        try:
            return decode(SavedTurn, self._path(trajectory_id).read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):  # a loss of power may leave half a file
            return None

    def names(self) -> list[str]:
        """Trajectories of which there is something."""
        found = {path.stem for suffix in (SUFFIX, ATTEMPT) for path in self._folder.glob(f"*{suffix}")}
        return sorted(found)

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete what there is of these."""
        for name in trajectory_ids:
            for path in (self._path(name), self._path(name).with_suffix(ATTEMPT)):
                path.unlink(missing_ok=True)

    def _path(self, trajectory_id: str) -> Path:
        return self._folder / f"{trajectory_id}{SUFFIX}"
