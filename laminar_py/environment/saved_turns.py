"""Saved turns: files by which an environment survives a crash of its process.

Each trajectory has a file with its last answered turn and the environment's state after it, if the state can be
saved. A second file counts attempts at the next turn. `environment.host` writes both; the controller deletes them
once the ledger has the trajectory's end.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from laminar_py.records.codec import DIGEST_BYTES, decode, encode
from laminar_py.records.environment import EnvironmentTurn

log = logging.getLogger(__name__)

SUFFIX, ATTEMPTS = ".environment", ".attempts"  # of a trajectory's files


def environments_path(run: Path) -> Path:
    """Return the folder of saved turns in a run's folder."""
    return run / "environments"


class SavedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The last answered turn of a trajectory."""

    response_digest: bytes  # of the response up to that turn
    answer: EnvironmentTurn
    state: bytes | None = None  # of the environment after that turn; None if it is not `Restorable`


class SavedTurns:
    """Files of saved turns of one process, two for each running trajectory. All methods raise `OSError`.

    A crash of the process leaves either the old content of a file or the new one. A digest at the start of a file
    shows damage by a crash of the host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def save(self, trajectory_id: str, saved: SavedTurn) -> None:
        """Replace the saved turn of a trajectory, and forget its attempts."""
        path, attempts = self._paths(trajectory_id)
        unfinished = path.with_name(f"{path.name}.new")
        body = encode(saved)
        unfinished.write_bytes(_digest_of_file(body) + body)
        with suppress(FileNotFoundError):  # the controller may forget a dropped trajectory at this moment
            os.replace(unfinished, path)
        attempts.unlink(missing_ok=True)

    def count_attempt(self, trajectory_id: str, digest: bytes) -> None:
        """Count an attempt to answer the last turn of the response with this digest."""
        _, attempts = self._paths(trajectory_id)
        with attempts.open("a", encoding="ascii") as file:
            file.write(f"{digest.hex()}\n")

    def load(self, trajectory_id: str, digest: bytes) -> tuple[SavedTurn | None, int]:
        """Read the saved turn of a trajectory, and the number of attempts to answer the response `digest`.

        An earlier process may have written both. A file that a crash of the host has damaged counts as missing.
        """
        path, attempts = self._paths(trajectory_id)
        saved = None
        if path.exists():
            data = path.read_bytes()
            body = data[DIGEST_BYTES:]
            if _digest_of_file(body) == data[:DIGEST_BYTES]:
                saved = decode(SavedTurn, body)
            else:
                log.warning("%s is damaged, so the environment answers its turn again", path)
        return saved, attempts.read_text().split().count(digest.hex()) if attempts.exists() else 0

    def names(self) -> list[str]:
        """Return the ids of trajectories that have a file, sorted."""
        return sorted({path.stem for suffix in (SUFFIX, ATTEMPTS) for path in self._folder.glob(f"*{suffix}")})

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Delete the files of these trajectories."""
        for name in trajectory_ids:
            path, attempts = self._paths(name)
            for file in (path, path.with_name(f"{path.name}.new"), attempts):
                file.unlink(missing_ok=True)

    def _paths(self, trajectory_id: str) -> tuple[Path, Path]:
        """Return the files of a trajectory: of its saved turn, and of attempts at the next one."""
        return self._folder / f"{trajectory_id}{SUFFIX}", self._folder / f"{trajectory_id}{ATTEMPTS}"


def _digest_of_file(body: bytes) -> bytes:
    """Return the digest that stands before a saved turn's bytes in its file."""
    return blake3(body).digest(length=DIGEST_BYTES)
