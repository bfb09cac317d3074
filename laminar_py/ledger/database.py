"""Opening of ledger files: their place in a run's folder, their schema, and messages about bad files.

The ledger, its only writer, and every reader call it. A file that cannot be used, or has the schema of another
release, raises a `LedgerError` of one line with the file, the fault and the remedy.
"""

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import CHAIN_START

SCHEMA_VERSION = 9
LEDGER_NAME = "ledger.sqlite"
ARCHIVE_NAME = "archive"
SEGMENTS_NAME = "segments"
SEAL_NAME = "seal.json"

_APPLICATION_ID = 0x6C616D69  # "lami", in the header of the SQLite file
_SCHEMA = Path(__file__).with_name("schema.sql")
_MODES = 18, b"\x01\x01"  # offset of the read and write modes in the file, and their bytes without a WAL
_BUSY_S = 30.0  # for a reader, on the writer's checkpoint; for the writer, on an earlier controller that ends


class LedgerError(ConfigError):
    """A ledger cannot be used; the line says why and what to do."""


def ledger_path(run: Path) -> Path:
    """Return the ledger of a run's folder; a path to a file is the ledger itself."""
    return run if run.is_file() else run / LEDGER_NAME


def segments_path(run: Path) -> Path:
    """Return the folder with a run's segments of this host."""
    return run / SEGMENTS_NAME


def log_path(ledger: Path) -> Path:
    """Return SQLite's write-ahead log of a ledger."""
    return ledger.with_name(f"{ledger.name}-wal")


def is_copy(ledger: Path) -> bool:
    """Whether a file is a copy of a ledger on another disk; a copy is replaced, never written to."""
    place, modes = _MODES
    with ledger.open("rb") as file:
        file.seek(place)
        has_no_log = file.read(len(modes)) == modes
    return has_no_log and not ledger.with_name(f"{ledger.name}-journal").is_file()  # else it is being laid out


def write_copy(ledger: Path, copy: Path) -> None:
    """Write what a ledger holds by now into a new file, without locks; return when it is on disk."""
    copy.unlink(missing_ok=True)
    uri = f"file:{quote(str(copy.resolve()))}?nolock=1"
    with closing(open_reader(ledger)) as source, closing(sqlite3.connect(uri, uri=True)) as target:
        target.execute("PRAGMA journal_mode = OFF")
        source.backup(target)
    place, modes = _MODES
    with copy.open("r+b") as file:
        file.seek(place)
        file.write(modes)
        file.flush()
        os.fsync(file.fileno())


def open_writer(path: Path) -> sqlite3.Connection:
    """The writing connection, with an empty ledger laid out if there is no file yet. Raises `LedgerError`."""
    is_new = not path.exists() or path.stat().st_size == 0  # its making was interrupted
    with _complaints(path):
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        if is_new:
            create_tables(connection)
        _check(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        # 64 MiB of log between two checkpoints, since each syncs the whole file
        connection.execute("PRAGMA wal_autocheckpoint = 16384")
    return connection


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of an empty ledger, in one transaction."""
    script = _SCHEMA.read_text()
    connection.executescript(
        f"BEGIN; {script} INSERT INTO head VALUES (0, x'{CHAIN_START.hex()}');"
        f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def open_reader(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """Open a read-only connection; each statement sees everything committed before it.

    With `immutable`, for a file without a writer, SQLite takes no locks and creates no files beside it.
    """
    if not path.is_file():
        raise LedgerError(f"ledger={path}: no such file; name the folder of a run")
    with _complaints(path):
        uri = f"file:{quote(str(path.resolve()))}?mode=ro{'&immutable=1' if immutable else ''}"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        _check(connection, path)
    return connection


@contextmanager
def reading(run: Path) -> Iterator[sqlite3.Connection]:
    """Open a read-only connection that sees one state of the ledger while others write."""
    path = ledger_path(run)
    with closing(open_reader(path, immutable=_is_fixed(path))) as connection, _complaints(path):
        connection.execute("BEGIN")
        yield connection


def unlike_schema(connection: sqlite3.Connection) -> list[str]:
    """Return names of tables and indexes that differ from the schema, apart from comments and spaces."""
    everything = "SELECT name, type, tbl_name, sql FROM main.sqlite_master"
    with closing(sqlite3.connect(":memory:")) as empty:
        empty.executescript(_SCHEMA.read_text())
        found, expected = (
            {name: (kind, table, _plain(sql or "")) for name, kind, table, sql in one.execute(everything)}
            for one in (connection, empty)
        )
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def _plain(sql: str) -> str:
    return " ".join(re.sub(r"--[^\n]*", "", sql).split())


def _is_fixed(ledger: Path) -> bool:
    """Whether nobody writes to a ledger: it is a copy, or sealed and unchanged since."""
    if not os.access(ledger, os.R_OK):
        return False
    log = log_path(ledger)
    has_log = log.is_file() and log.stat().st_size > 0
    return not has_log and (is_copy(ledger) or (ledger.parent / SEAL_NAME).is_file())


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
def _complaints(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        reason = " ".join(str(error).split())  # it may quote damaged text
        raise LedgerError(
            f"ledger={path}: cannot be read ({reason}); restore the file with its -wal file, or start a new run"
        ) from error
