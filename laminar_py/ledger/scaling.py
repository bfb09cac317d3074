"""The number of replicas that a user wants for a running run, and the number on record.

`laminar scale` writes the wanted number into `scale.json` in the run's folder, which may be on a network. The
controller takes the file and records its new fleet. A resumed run has the fleet on record
(`tests/runs/test_elastic_run.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import read_events
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Scaled
from laminar_py.records.host import write_file

WANTED = "scale.json"
FLEET_SETTINGS = ("rollout.replicas=", "rollout.engine.", "rollout.engine=", "rollout=")


def write_wanted(run: Path, replicas: int) -> None:
    """Write the wanted number of replicas; a later number replaces an earlier one."""
    partial = run / f"{WANTED}.tmp"
    write_file(partial, msgspec.json.encode(replicas))
    partial.replace(run / WANTED)


def take_wanted(run: Path) -> int | None:
    """Return and delete the wanted number of replicas; None without one, or if it cannot be read."""
    taken = run / f"{WANTED}.taken"
    try:
        (run / WANTED).replace(taken)  # a number that is written from now on is the next
        written = taken.read_bytes()
        taken.unlink()
        return msgspec.json.decode(written, type=int)
    except (OSError, msgspec.DecodeError):  # the network may fail for a moment
        return None


def fleet_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return settings that restore the last recorded fleet, none if `changes` name a fleet."""
    if not run.has_ledger or any(change.startswith(FLEET_SETTINGS) for change in changes):
        return []
    with reading(run.ledger) as connection:
        fleet = next(read_events(connection, Scaled, newest_first=True), None)
    if fleet is None:
        return []
    urls = [f"rollout.engine.urls=[{','.join(fleet.servers)}]"] if fleet.servers else []
    return [f"rollout.replicas={len(fleet.replicas)}", *urls]
