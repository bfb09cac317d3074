"""The live ledger of a run whose folder lies on a file system over a network, where SQLite's log does not work.

Its controller writes it on a disk of its own host, and copies it into the run's folder when it starts, at each
checkpoint and when it ends; whoever else reads the run reads that copy. What a resume finds, and goes on from:

live ledger that goes on from the copy (its controller was killed) -> the live one
no live ledger (it ended, or ran on another host)                  -> the copy
live ledger that does not (the run went on elsewhere meanwhile)    -> the copy; the other is put aside

Invariant: the run's folder holds a whole ledger at any moment, and the newest checkpoint on record in it is there.
"""

import os
import shutil
import stat
from itertools import count
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LEDGER_NAME, LedgerError, is_copy, log_path, reading, write_copy
from laminar_py.ledger.file_systems import network_kind
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.local import link_local
from laminar_py.records.host import sync


def own_disk(folder: Path, disk: Path) -> Path | None:
    """The disk for the live ledger of a run in `folder`; None where that is written in the run's folder itself.

    Raises `ConfigError` where it cannot be on `disk`.
    """
    kind = network_kind(folder)
    if kind is None:
        return None
    if not (disk.is_dir() and os.access(disk, os.W_OK | os.X_OK)):
        fault = "is no folder that can be written"
    elif (other := network_kind(disk)) is not None:
        fault = f"lies on {other}"
    else:
        return disk
    raise ConfigError(
        f"runs_local={disk}: {fault}, and no ledger can be written in {folder}, which lies on {kind}; set it to a"
        " folder on a disk of this host"
    )


def settle(run: RunFolder, disk: Path | None) -> list[str]:
    """Have the `live_ledger` of a run that this process owns on `disk`; without one it is in the run's folder.

    Segments are on `disk` of each host then. Lines for the user on what is put aside, and on what is lost. Raises
    `ConfigError`.
    """
    told = []
    if disk is not None:
        folder = _own_folder(run.live_folder(disk))
        run.live_ledger = live = folder / LEDGER_NAME
        if _is_laid_out(live):
            if run.has_ledger and _goes_on(live, run.ledger):
                _link_segments(run, disk)
                return []
            told.append(_put_aside(folder, run))
        _restore(run, live)
        run.went_back = run.has_ledger
        _link_segments(run, disk)
    if run.has_ledger and (host := _left_by(run.ledger)):
        told.append(f"{run.ledger}: is a copy that {host} made before it ended; what came after it is lost")
    return told


def _link_segments(run: RunFolder, disk: Path) -> None:
    """Have segments on the disk of each host."""
    place = run.local_segments(disk.resolve())
    try:
        link_local(run.segments, place)
    except OSError as error:
        raise ConfigError(
            f"runs_local={disk}: segments cannot be written in {place} ({error.strerror}); make room, or name"
            " another folder"
        ) from None


def copy_ledger(live: Path, ledger: Path) -> None:
    """Put what a live ledger holds into the run's folder; return when it is on disk.

    Until then the copy before it is there. What SQLite left beside that is of a run that was written in place.
    """
    unfinished = ledger.with_name(f"{ledger.name}.tmp")
    write_copy(live, unfinished)
    for end in ("-wal", "-shm"):
        ledger.with_name(f"{ledger.name}{end}").unlink(missing_ok=True)
    unfinished.replace(ledger)
    sync(ledger.parent)


def _own_folder(folder: Path) -> Path:
    """A folder of this user alone, made if need be."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"runs_local={folder.parent}: {folder.name} cannot be made there ({error.strerror}); name another"
            " folder"
        ) from None
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(
            f"runs_local={folder.parent}: {folder.name} in it is another user's; name another folder"
        )
    return folder


def _is_laid_out(ledger: Path) -> bool:
    return ledger.is_file() and ledger.stat().st_size > 0


def _goes_on(live: Path, copy: Path) -> bool:
    """True where the last event of the copy is one of the live ledger: its hash covers all before it."""
    with reading(copy) as connection:
        last = connection.execute("SELECT seq, hash FROM head").fetchone()
    try:
        with reading(live) as connection:
            found = connection.execute("SELECT 1 FROM event WHERE seq = ? AND hash = ?", last).fetchone()
    except LedgerError:  # a disk that lost something
        return False
    return found is not None


def _put_aside(folder: Path, run: RunFolder) -> str:
    """Keep a live ledger under another name, and make room for the one that the run goes on with."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    folder.rename(aside)
    folder.mkdir(mode=0o700)
    why = "does not go on from" if run.has_ledger else "is of another run, not of"
    return f"{folder / LEDGER_NAME}: {why} {run.ledger}, so it is not taken; it is kept in {aside}"


def _restore(run: RunFolder, live: Path) -> None:
    """Have the run's ledger on the own disk, if it has one; whole once it is there, with the log beside it."""
    for left in live.parent.iterdir():
        left.unlink()
    if run.has_ledger:
        if log_path(run.ledger).is_file():  # it was written in place
            shutil.copyfile(log_path(run.ledger), log_path(live))
        unfinished = live.with_name(f"{live.name}.tmp")
        shutil.copyfile(run.ledger, unfinished)
        sync(unfinished)
        unfinished.rename(live)
        sync(live.parent)


def _left_by(ledger: Path) -> str:
    """Host whose controller had not ended when a copy was made; "" for one that ended, and for no copy."""
    if not is_copy(ledger):
        return ""
    with reading(ledger) as connection:
        last = connection.execute(
            "SELECT host, ended FROM incarnation ORDER BY incarnation DESC LIMIT 1"
        ).fetchone()
    return "" if last is None or last[1] is not None else str(last[0])
