"""Requests to a running controller for a fleet of another size, and its answers: files in the run's folder.

The folder is its owner's alone, and may be on a network, so whoever can write there may ask, from any host. A
request passes these states; each transition is a rename or a deletion, which one side alone can make:

    ASKED (`<id>.asked`)  -> WITHDRAWN   whoever asked deletes it: it got no answer in time
    ASKED                 -> TAKEN (`<id>.taken`)     the controller has read it, and answers
    TAKEN                 -> ANSWERED (`<id>.answer`) whoever asked reads and deletes it

Invariant: what a controller finds when it starts was asked of an earlier one, and is answered and not done. An
answer that nobody fetched is deleted by the next controller. What was done is on record; a resumed run has it from
there.
"""

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import decode_event
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.disk import write_file
from laminar_py.records.events import Scaled

FOLDER = "scale"
FLEET_SETTINGS = ("rollout.replicas=", "rollout.engine.", "rollout.engine=", "rollout=")
Record = TypeVar("Record", "ScaleRequest", "ScaleAnswer")


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Wish for another fleet, e.g. `ScaleRequest(id="1763...-node1-4711", replicas=6)`."""

    id: str
    replicas: int | None = None
    urls: tuple[str, ...] | None = None  # of all servers, where the run attaches to some


class ScaleAnswer(msgspec.Struct, frozen=True):
    """Answer of a controller: what it does, or why not."""

    done: bool
    line: str


class ScaleRequests:
    """Requests to the controller of one run, e.g. `ScaleRequests(Path("runs/quickstart-3"))`."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    # ---- of whoever asks

    def ask(self, *, replicas: int | None, urls: tuple[str, ...] | None) -> ScaleRequest:
        """Ask; the answer is to be fetched, or the request withdrawn."""
        name = f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}"
        request = ScaleRequest(id=name, replicas=replicas, urls=urls)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._write(f"{name}.asked", request)
        return request

    def fetch(self, request: ScaleRequest) -> ScaleAnswer | None:
        """The answer, once it is there."""
        path = self._folder / f"{request.id}.answer"
        answer = _read(path, ScaleAnswer)
        if answer is not None:
            path.unlink()
        return answer

    def withdraw(self, request: ScaleRequest) -> bool:
        """Take a request back; False where a controller has taken it already."""
        try:
            (self._folder / f"{request.id}.asked").unlink()
        except FileNotFoundError:
            return False
        return True

    # ---- of the controller

    def take(self) -> list[ScaleRequest]:
        """Requests that nobody took yet, in the order in which they were made."""
        taken = []
        for path in self._all("asked"):
            with contextlib.suppress(FileNotFoundError):  # withdrawn this moment
                request = _read(path.rename(path.with_suffix(".taken")), ScaleRequest)
                taken += [] if request is None else [request]
        return taken

    def answer(self, request: ScaleRequest, answer: ScaleAnswer) -> None:
        """Answer a request that was taken."""
        self._write(f"{request.id}.answer", answer)
        (self._folder / f"{request.id}.taken").unlink(missing_ok=True)

    def refuse_all(self, line: str) -> None:
        """Answer whatever is open, of this controller or an earlier one."""
        self.take()
        for path in self._all("taken"):
            request = _read(path, ScaleRequest)
            if request is None:
                path.unlink()
            else:
                self.answer(request, ScaleAnswer(False, line))

    def clear(self) -> None:
        """Delete answers that nobody fetched."""
        for path in self._all("answer"):
            path.unlink(missing_ok=True)

    # ---- files

    def _all(self, state: str) -> list[Path]:
        return sorted(self._folder.glob(f"*.{state}"))

    def _write(self, name: str, record: ScaleRequest | ScaleAnswer) -> None:
        partial = self._folder / f"{name}.tmp"
        write_file(partial, msgspec.json.encode(record))
        partial.rename(self._folder / name)


def last_fleet(run: Path) -> Scaled | None:
    """The fleet that a run was to have last; None where none is on record. Raises `ConfigError`."""
    with reading(run) as connection:
        body = connection.execute(
            "SELECT body FROM event WHERE kind = 'scaled' ORDER BY seq DESC LIMIT 1"
        ).fetchone()
    fleet = None if body is None else decode_event(body[0])
    return fleet if isinstance(fleet, Scaled) else None


def fleet_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Settings that give a run the fleet that it was to have last, unless `changes` say another one."""
    own = any(change.startswith(FLEET_SETTINGS) for change in changes)
    fleet = last_fleet(run.path) if run.has_ledger and not own else None
    if fleet is None:
        return []
    urls = [f"rollout.engine.urls=[{','.join(fleet.servers)}]"] if fleet.servers else []
    return [f"rollout.replicas={len(fleet.replicas)}", *urls]


def _read(path: Path, kind: type[Record]) -> Record | None:
    """Contents of a file; None where it is not there, or holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
