"""The number of replicas that a user wants of a running run, and the number that its record has.

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
    """Return and delete the wanted number of replicas; None if no command wrote one."""
    try:
        wanted = msgspec.json.decode((run / WANTED).read_bytes(), type=int)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    (run / WANTED).unlink(missing_ok=True)
    return wanted


def last_fleet(run: Path) -> Scaled | None:
    """Return the last fleet on record, None without any. Raises `ConfigError`."""
    with reading(run) as connection:
        fleets = list(read_events(connection, Scaled))
    return fleets[-1] if fleets else None


def fleet_on_record(run: RunFolder, changes: Sequence[str]) -> list[str]:
    """Return settings that restore the last recorded fleet, none if `changes` name a fleet."""
    names_fleet = any(change.startswith(FLEET_SETTINGS) for change in changes)
    fleet = last_fleet(run.path) if run.has_ledger and not names_fleet else None
    if fleet is None:
        return []
    urls = [f"rollout.engine.urls=[{','.join(fleet.servers)}]"] if fleet.servers else []
    return [f"rollout.replicas={len(fleet.replicas)}", *urls]
