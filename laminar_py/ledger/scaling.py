"""A request to a running controller for another fleet size, and its answer: two files in the run's folder.

The folder is private to its user and may be on a network, so a user may send a request from any host. There is at
most one request: a second command waits until the first has its answer. The client writes `scale-request.json`.
The controller writes `scale-answer.json`, then deletes the request. A client that gives up deletes its
request.

A controller refuses a request that it finds when it starts or ends. The fleet size is on record, so a resumed run
reads it there (`tests/runs/test_elastic_run.py`).
"""

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

REQUEST, ANSWER = "scale-request.json", "scale-answer.json"
FLEET_SETTINGS = ("rollout.replicas=", "rollout.engine.", "rollout.engine=", "rollout=")
Record = TypeVar("Record", "ScaleRequest", "ScaleAnswer")


class ScaleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for another fleet, e.g. `ScaleRequest(id="1763...-node1-4711", replicas=6)`."""

    id: str
    replicas: int | None = None
    urls: tuple[str, ...] | None = None  # of all servers, if the run attaches to servers


class ScaleAnswer(msgspec.Struct, frozen=True):
    """The controller's answer: the change that it makes, or why it refuses."""

    done: bool
    line: str
    id: str = ""  # of the request


# ---- client


def send_request(run: Path, *, replicas: int | None, urls: tuple[str, ...] | None) -> ScaleRequest | None:
    """Write a request, and return it; None while there is another one."""
    request = ScaleRequest(
        id=f"{time.time_ns()}-{socket.gethostname()}-{os.getpid()}", replicas=replicas, urls=urls
    )
    complete = run / f"{REQUEST}.{request.id}"
    write_file(complete, msgspec.json.encode(request))
    try:
        (run / REQUEST).hardlink_to(complete)  # fails if there is another one, also on a network's disk
    except FileExistsError:
        return None
    finally:
        complete.unlink()
    return request


def read_answer(run: Path, request: ScaleRequest) -> ScaleAnswer | None:
    """Return the answer to a request, None while there is none."""
    answer = _read(run / ANSWER, ScaleAnswer)
    return answer if answer is not None and answer.id == request.id else None


def withdraw_request(run: Path, request: ScaleRequest) -> None:
    """Delete a request, unless the controller has answered it."""
    if _read(run / REQUEST, ScaleRequest) == request:
        (run / REQUEST).unlink(missing_ok=True)


# ---- controller


def read_request(run: Path) -> ScaleRequest | None:
    """Return the open request, None if there is none; delete a file that holds something else."""
    request = _read(run / REQUEST, ScaleRequest)
    if request is None:
        (run / REQUEST).unlink(missing_ok=True)
    return request


def answer_request(run: Path, request: ScaleRequest, answer: ScaleAnswer) -> None:
    """Write the answer to a request, and delete the request."""
    partial = run / f"{ANSWER}.tmp"
    write_file(partial, msgspec.json.encode(msgspec.structs.replace(answer, id=request.id)))
    partial.rename(run / ANSWER)
    withdraw_request(run, request)


def refuse_request(run: Path, line: str) -> None:
    """Refuse the open request, if there is one."""
    request = read_request(run)
    if request is not None:
        answer_request(run, request, ScaleAnswer(False, line))


# ---- the record


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
