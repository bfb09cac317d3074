"""The live ledger of a run whose folder lies on a network file system, where SQLite's write-ahead log cannot work.

The controller writes the live ledger on a disk of its own host. It copies the ledger into the run's folder at the
start, at each checkpoint and at the end; other readers read the copy. A resume continues from one of them:

live ledger with the last event of the copy (the controller was killed)  -> the live ledger
no live ledger (the run ended, or ran on another host)                   -> the copy
live ledger without the last event of the copy (another host resumed)    -> the copy; the live ledger is renamed

The run's folder always holds a complete ledger and the newest checkpoint that is recorded in it
(`tests/ledger/test_live.py`).
"""

import os
import shutil
import stat
from itertools import count
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import LEDGER_NAME, LedgerError, is_copy, log_path, reading, write_copy
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.local import link_local
from laminar_py.records.host import sync

_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "auristorfs", "coda", "ncpfs", "davfs"),
    *("lustre", "gpfs", "mmfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "glusterfs", "orangefs", "pvfs2"),
    *("panfs", "gfs", "gfs2", "ocfs2", "acfs"),  # the last four: disks that several hosts share
}
_FUSE = "fuse."
_LOCAL_FUSE = {
    "fuse-overlayfs",
    "mergerfs",
    "unionfs",
    "bindfs",
    "ntfs-3g",
    "gocryptfs",
    "encfs",
    "cryfs",
    "lxcfs",
}


def ledger_disk(folder: Path, disk: Path) -> Path | None:
    """Return the disk for the live ledger of a run in `folder`; None if the run's folder can hold it.

    Raises `ConfigError` if a live ledger is needed and cannot be on `disk`.
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


def place_ledger(run: RunFolder, disk: Path | None) -> list[str]:
    """Set `run.live_ledger` of a run that this process owns, and restore the file from the copy if need be.

    With a `disk` the ledger is there, and segments are on the disk of each host; without, both are in the run's
    folder. Returns lines for the user about a renamed ledger and about lost events. Raises `ConfigError`.
    """
    lines = []
    if disk is not None:
        folder = _private_folder(run.live_folder(disk))
        run.live_ledger = live = folder / LEDGER_NAME
        if live.is_file() and live.stat().st_size > 0:
            if run.has_ledger and _continues(live, run.ledger):
                _link_segments(run, disk)
                return []
            lines.append(_rename_folder(folder, run))
        _restore(run, live)
        run.went_back = run.has_ledger
        _link_segments(run, disk)
    if run.has_ledger and (host := _killed_host(run.ledger)):
        lines.append(f"{run.ledger}: is a copy that {host} made before it ended; later events are lost")
    return lines


def copy_ledger(live: Path, ledger: Path) -> None:
    """Copy a live ledger into the run's folder; return when the copy is on disk.

    Until then the earlier copy stays. SQLite's files beside it come from a run that wrote the ledger in place.
    """
    unfinished = ledger.with_name(f"{ledger.name}.tmp")
    write_copy(live, unfinished)
    for end in ("-wal", "-shm"):
        ledger.with_name(f"{ledger.name}{end}").unlink(missing_ok=True)
    unfinished.replace(ledger)
    sync(ledger.parent)


def network_kind(folder: Path, mounts: str | None = None) -> str | None:
    """Return the type of a folder's network file system, e.g. "nfs4"; None for a disk of this host.

    The folder need not exist. `mounts` replaces the kernel's `/proc/self/mountinfo`.
    """
    kind = _kind(folder, _MOUNTS.read_text() if mounts is None else mounts)
    is_remote = kind in _NETWORK or (kind.startswith(_FUSE) and kind.removeprefix(_FUSE) not in _LOCAL_FUSE)
    return kind if is_remote else None


def _kind(folder: Path, mounts: str) -> str:
    """Find the type by device number, which no later mount hides; "" if no line has the number, as in Btrfs."""
    place = folder.resolve()
    device = next(path for path in (place, *place.parents) if path.exists()).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            return source.split()[0]
    return ""


def _link_segments(run: RunFolder, disk: Path) -> None:
    """Make `segments` of the run's folder a link to the same path on each host's own disk.

    Every host resolves the link to its own disk, so tokens stay on the host that wrote them. `disk` is the setting
    `runs_local`. Raises `ConfigError` if the disk cannot be written.
    """
    place = run.local_segments(disk.resolve())
    try:
        link_local(run.segments, place)
    except OSError as error:
        raise ConfigError(
            f"runs_local={disk}: segments cannot be written in {place} ({error.strerror}); make room, or name"
            " another folder"
        ) from None


def _private_folder(folder: Path) -> Path:
    """Return a folder of this user alone, which is created if missing. Raises `ConfigError`."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"runs_local={folder.parent}: cannot create {folder.name} there ({error.strerror}); name another"
            " folder"
        ) from None
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigError(
            f"runs_local={folder.parent}: {folder.name} in it belongs to another user; name another folder"
        )
    return folder


def _continues(live: Path, copy: Path) -> bool:
    """Whether the live ledger has the last event of the copy, whose hash covers all events before it."""
    with reading(copy) as connection:
        last = connection.execute("SELECT seq, hash FROM head").fetchone()
    try:
        with reading(live) as connection:
            found = connection.execute("SELECT 1 FROM event WHERE seq = ? AND hash = ?", last).fetchone()
    except LedgerError:  # the disk lost something
        return False
    return found is not None


def _rename_folder(folder: Path, run: RunFolder) -> str:
    """Rename the folder of another live ledger, and create an empty one; return a line for the user."""
    names = (folder.with_name(f"{folder.name}.{number}") for number in count(1))
    aside = next(name for name in names if not name.exists())
    folder.rename(aside)
    folder.mkdir(mode=0o700)
    why = "does not continue" if run.has_ledger else "belongs to another run than"
    return f"{folder / LEDGER_NAME}: {why} {run.ledger}, so it is not used; it is kept in {aside}"


def _restore(run: RunFolder, live: Path) -> None:
    """Copy the run's ledger, if it has one, to the live ledger; the file gets its name when it is complete."""
    for old in live.parent.iterdir():
        old.unlink()
    if run.has_ledger:
        if log_path(run.ledger).is_file():  # an earlier controller wrote the ledger in place
            shutil.copyfile(log_path(run.ledger), log_path(live))
        unfinished = live.with_name(f"{live.name}.tmp")
        shutil.copyfile(run.ledger, unfinished)
        sync(unfinished)
        unfinished.rename(live)
        sync(live.parent)


def _killed_host(ledger: Path) -> str:
    """Return the host whose killed controller left a copy; "" if the controller ended or this is no copy."""
    if not is_copy(ledger):
        return ""
    with reading(ledger) as connection:
        last = connection.execute(
            "SELECT host, ended FROM incarnation ORDER BY incarnation DESC LIMIT 1"
        ).fetchone()
    return "" if last is None or last[1] is not None else str(last[0])
