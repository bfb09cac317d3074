"""Files that environments are rebuilt from after their process has died: the last answer, and the state if saved.

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

    def load(self, trajectory_id: str) -> SavedTurn | None:
        """The last turn; None where there is none."""
        try:
            return decode(SavedTurn, self._path(trajectory_id).read_bytes())
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """Trajectories of which there is something."""
        return [path.name.removesuffix(SUFFIX) for path in self._folder.glob(f"*{SUFFIX}")]

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete what there is of these."""
        for name in trajectory_ids:
            self._path(name).unlink(missing_ok=True)

    def _path(self, trajectory_id: str) -> Path:
        return self._folder / f"{trajectory_id}{SUFFIX}"
