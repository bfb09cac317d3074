"""Opening of ledger files: their place in a run's folder, their schema, and messages about bad files.

The ledger, its only writer, and every reader call it. A file that cannot be used, or has the schema of another
release, raises a `LedgerError` of one line with the file, the fault and the remedy.

A ledger on a disk of this host has a write-ahead log. SQLite's log needs memory that all users of the file share,
which a network file system lacks; there the ledger has a rollback journal, and a commit waits for readers.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import CHAIN_START

SCHEMA_VERSION = 14
LEDGER_NAME = "ledger.sqlite"
SEGMENTS_NAME = "segments"
SEAL_NAME = "seal.json"

_APPLICATION_ID = 0x6C616D69  # "lami", in the header of the SQLite file
_SCHEMA = Path(__file__).with_name("schema.sql")
_BUSY_S = 30.0  # for a reader, on the writer's checkpoint; for the writer, on an earlier controller that ends
_SHARED_BUSY_S = 3600.0  # for the writer on a network file system, on a reader, e.g. an audit
_LOG_BYTES = 1 << 26  # of the write-ahead log between two checkpoints, since each syncs the whole file
_MOUNTS = Path("/proc/self/mountinfo")
_NETWORK = {
    *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "auristorfs", "coda", "ncpfs", "davfs"),
    *("lustre", "gpfs", "mmfs", "beegfs", "beegfs_nodev", "ceph", "wekafs", "glusterfs", "orangefs", "pvfs2"),
    *("panfs", "gfs", "gfs2", "ocfs2", "acfs"),  # the last four: disks that several hosts share
}
_LOCAL_FUSE = {
    *("fuse-overlayfs", "mergerfs", "unionfs", "bindfs", "ntfs-3g", "gocryptfs", "encfs", "cryfs", "lxcfs"),
}


class LedgerError(ConfigError):
    """A ledger cannot be used; the line says why and what to do."""


def ledger_path(run: Path) -> Path:
    """Return the ledger of a run's folder; a path to a file is the ledger itself."""
    return run if run.is_file() else run / LEDGER_NAME


def segments_path(run: Path) -> Path:
    """Return the folder with a run's segments."""
    return run / SEGMENTS_NAME


def logs_of(ledger: Path) -> list[Path]:
    """Return SQLite's write-ahead log and rollback journal of a ledger, each if it has bytes."""
    paths = [ledger.with_name(f"{ledger.name}-{kind}") for kind in ("wal", "journal")]
    return [path for path in paths if path.is_file() and path.stat().st_size]


def open_writer(path: Path) -> sqlite3.Connection:
    """Open the connection that writes; create the ledger if its file is missing or empty. Raises `LedgerError`."""
    is_new = not path.exists() or path.stat().st_size == 0  # a crash left an empty file
    has_log = not on_network(path.parent)
    with _as_ledger_error(path):
        busy_s = _BUSY_S if has_log else _SHARED_BUSY_S
        connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
        if is_new:
            create_tables(connection)
        _check(connection, path)
        connection.execute(f"PRAGMA journal_mode = {'WAL' if has_log else 'TRUNCATE'}")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_BYTES // 4096}")  # pages
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")  # once a long reader made the log grow
    return connection


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of an empty ledger, in one transaction."""
    script = _SCHEMA.read_text()
    connection.executescript(
        f"BEGIN; {script} INSERT INTO head VALUES (0, x'{CHAIN_START.hex()}');"
        f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def open_reader(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Open a read-only connection; each statement sees everything committed before it. Raises `LedgerError`.

    With `immutable`, for a file without a writer, SQLite takes no locks and creates no files beside it.
    """
    if not path.is_file():
        raise LedgerError(f"ledger={path}: no such file; name the folder of a run")
    with _as_ledger_error(path):
        # only a connection that may write can roll back a transaction of a killed controller
        mode = "rw" if any(log.name.endswith("-journal") for log in logs_of(path)) else "ro"
        uri = f"file:{quote(str(path.resolve()))}?mode={mode}{'&immutable=1' if immutable else ''}"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA query_only = ON")
        _check(connection, path)
    return connection


@contextmanager
def reading(run: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection that sees one state of the ledger. Raises `LedgerError`, also in the block."""
    path = ledger_path(run)
    # a sealed ledger without logs is unchanged, so no process writes to it
    is_sealed = (path.parent / SEAL_NAME).is_file() and not logs_of(path)
    with closing(open_reader(path, immutable=is_sealed)) as connection, _as_ledger_error(path):
        connection.execute("BEGIN")
        yield connection


def on_network(folder: Path, mounts: str | None = None) -> bool:
    """Return whether a folder is on a network file system; the folder need not exist.

    `mounts` replaces the text of `/proc/self/mountinfo`. The function looks for the folder's device number, which
    no later mount hides; a folder whose number is in no line, as in Btrfs, is local.
    """
    place = folder.resolve()
    device = next(path for path in (place, *place.parents) if path.exists()).stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in (_MOUNTS.read_text() if mounts is None else mounts).splitlines():
        mount, _, source = line.partition(" - ")
        if mount.split()[2] == number:
            kind = source.split()[0]
            return kind in _NETWORK or (kind.startswith("fuse.") and kind.removeprefix("fuse.") not in _LOCAL_FUSE)
    return False


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise `LedgerError` if the file is no ledger, or has the schema of another release."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != _APPLICATION_ID:
        raise LedgerError(f"ledger={path}: not a ledger; name the folder of a run, or start a new one")
    schema = connection.execute("PRAGMA user_version").fetchone()[0]
    if schema != SCHEMA_VERSION:
        age = "an older" if schema < SCHEMA_VERSION else "a later"
        raise LedgerError(
            f"ledger={path}: {age} release wrote it with schema {schema}, this one has schema {SCHEMA_VERSION};"
            " use the release that wrote it"
        )
    connection.execute("SELECT seq FROM head").fetchone()


@contextmanager
def _as_ledger_error(path: Path) -> Iterator[None]:
    """Raise errors of SQLite within the block as LedgerError, with a remedy."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise LedgerError(
                f"ledger={path}: another process holds it; try again when that process ends"
            ) from error
        reason = " ".join(str(error).split())  # it may quote damaged text
        raise LedgerError(
            f"ledger={path}: cannot be read ({reason}); restore the file with its -wal file, or start a new run"
        ) from error
