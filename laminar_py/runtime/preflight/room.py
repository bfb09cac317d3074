"""Room on each host for the segments that its parts write. Looked at before a run, and by `laminar doctor`."""

import os
import shutil
from pathlib import Path

from laminar_py.config.run import RunConfig
from laminar_py.ledger.live import own_disk
from laminar_py.ledger.segments.local import LEAST_FREE


def store_field(config: RunConfig) -> str:
    """Field with the folder in which segments of a run that begins will lie, on each of its hosts.

    Raises `ConfigError` where that cannot be on this one.
    """
    return "runs" if own_disk(config.runs, config.runs_local) is None else "runs_local"


def room_fault(field: str, folder: Path, *, where: str = "") -> str | None:
    """Complaint, in one line, about this host's folder for segments; `where` names the host."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
        return f"{field}={folder}: cannot be written{where}; make it writable, or name another folder"
    free = shutil.disk_usage(place).free
    if free >= LEAST_FREE:
        return None
    return (
        f"{field}={folder}: {free / 2**20:.0f} MiB are free{where}, and responses are stored there; make room for"
        f" {LEAST_FREE / 2**20:.0f} MiB at least, or name another folder"
    )
