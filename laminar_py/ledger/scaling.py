"""Requests to a running controller for another fleet size, and its answers: files in the run's folder.

The folder is private to its user and may be on a network, so a user may send requests from any host. A request
passes these states; each transition is a rename or deletion that only one side makes:

    ASKED (`<id>.asked`)  -> WITHDRAWN                the client deletes it, since no answer came in time
    ASKED                 -> TAKEN (`<id>.taken`)     the controller reads it
    TAKEN                 -> ANSWERED (`<id>.answer`) the client reads and deletes the answer

A controller that starts refuses requests to an earlier one, and deletes answers that no client fetched. The fleet
size is on record, so a resumed run reads it there (`tests/runs/test_elastic_run.py`).
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
from laminar_py.records.events import Scaled
from laminar_py.records.host import write_file

FOLDER = "scale"
FLEET_SETTINGS = ("rollout.replicas=", "rollout.engine.", "rollout.engine=", "rollout=")
Record = TypeVar("Record", "ScaleRequest", "ScaleAnswer")


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for another fleet, e.g. `ScaleRequest(id="1763...-node1-4711", replicas=6)`."""

    id: str
    replicas: int | None = None
    urls: tuple[str, ...] | None = None  # of all servers, if the run attaches to servers


class ScaleAnswer(msgspec.Struct, frozen=True):
    """The controller's answer: what it does, or why it refuses."""

    done: bool
    line: str


class ScaleRequests:
    """Requests to the controller of one run, e.g. `ScaleRequests(Path("runs/quickstart-3"))`."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    # ---- client

    def send(self, *, replicas: int | None, urls: tuple[str, ...] | None) -> ScaleRequest:
        """Write a request; the client then fetches the answer, or withdraws the request."""
        name = f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}"
        request = ScaleRequest(id=name, replicas=replicas, urls=urls)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._write(f"{name}.asked", request)
        return request

    def fetch(self, request: ScaleRequest) -> ScaleAnswer | None:
        """Return and delete the answer, None while there is none."""
        path = self._folder / f"{request.id}.answer"
        answer = _read(path, ScaleAnswer)
        if answer is not None:
            path.unlink()
        return answer

    def withdraw(self, request: ScaleRequest) -> bool:
        """Delete a request; return False if the controller has taken it."""
        try:
            (self._folder / f"{request.id}.asked").unlink()
        except FileNotFoundError:
            return False
        return True

    # ---- controller

    def take_requests(self) -> list[ScaleRequest]:
        """Mark all open requests as taken, and return them in order."""
        taken = []
        for path in self._all("asked"):
            with contextlib.suppress(FileNotFoundError):  # withdrawn this moment
                request = _read(path.rename(path.with_suffix(".taken")), ScaleRequest)
                taken += [] if request is None else [request]
        return taken

    def answer(self, request: ScaleRequest, answer: ScaleAnswer) -> None:
        """Write the answer to a taken request."""
        self._write(f"{request.id}.answer", answer)
        (self._folder / f"{request.id}.taken").unlink(missing_ok=True)

    def refuse_all(self, line: str) -> None:
        """Answer all open requests, also of an earlier controller, with a refusal."""
        self.take_requests()
        for path in self._all("taken"):
            request = _read(path, ScaleRequest)
            if request is None:
                path.unlink()
            else:
                self.answer(request, ScaleAnswer(False, line))

    def clear(self) -> None:
        """Delete answers that no client fetched."""
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
    """Return the last fleet size on record, None without any. Raises `ConfigError`."""
    with reading(run) as connection:
        body = connection.execute(
            "SELECT body FROM event WHERE kind = 'scaled' ORDER BY seq DESC LIMIT 1"
        ).fetchone()
    fleet = None if body is None else decode_event(body[0])
    return fleet if isinstance(fleet, Scaled) else None


def fleet_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return settings that restore the last recorded fleet, none if `changes` name a fleet."""
    own = any(change.startswith(FLEET_SETTINGS) for change in changes)
    fleet = last_fleet(run.path) if run.has_ledger and not own else None
    if fleet is None:
        return []
    urls = [f"rollout.engine.urls=[{','.join(fleet.servers)}]"] if fleet.servers else []
    return [f"rollout.replicas={len(fleet.replicas)}", *urls]


def _read(path: Path, kind: type[Record]) -> Record | None:
    """Read a record; None if the file is missing or holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
