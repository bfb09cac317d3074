"""Opens ledger files. Owns their place in a run folder, their schema and what is said about a bad one.

Called by the ledger (its one writer) and by every reader. A file that cannot be used is a `LedgerError` of one
line that names the file, what is wrong with it and what to do. A ledger of an older schema is migrated by its
writer, and left as it is by readers, which see the newest columns all the same.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from laminar_py.ledger.migrations import NEWEST, OLDEST, layout_differences, migrate, show_as_newest
from laminar_py.records.digests import CHAIN_START

SCHEMA_VERSION = NEWEST
LEDGER_NAME = "ledger.sqlite"
ARCHIVE_NAME = "archive"
SEAL_NAME = "seal.json"

_APPLICATION_ID = 0x6C616D69  # "lami", where SQLite files say whose they are
_SCHEMA = Path(__file__).with_name("schema.sql")
_BUSY_S = 30.0  # a reader waits so long for the writer's checkpoint, the writer for a dying predecessor


class LedgerError(ValueError):
    """A ledger that cannot be used; one line that says why and what to do."""


def ledger_path(run: Path) -> Path:
    """The ledger of a run folder; a path that is a file is taken for the ledger itself."""
    return run if run.is_file() else run / LEDGER_NAME


def log_path(ledger: Path) -> Path:
    """What SQLite has written and not yet folded into the file."""
    return ledger.with_name(f"{ledger.name}-wal")


def open_writer(path: Path) -> sqlite3.Connection:
    """The writing connection, with an empty ledger laid out if there is no file yet, an old one migrated."""
    is_new = not path.exists()
    with _complaints(path):
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        if is_new:
            create(connection)
        schema = _check(connection, path)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        # 64 MiB of log between two checkpoints: each one syncs the whole file
        connection.execute("PRAGMA wal_autocheckpoint = 16384")
        if schema != SCHEMA_VERSION:
            migrate(connection, schema, _SCHEMA.read_text())
    return connection


def create(connection: sqlite3.Connection) -> None:
    """Lay out an empty ledger, all or nothing."""
    script = _SCHEMA.read_text()
    connection.executescript(
        f"BEGIN; {script} INSERT INTO head VALUES (0, x'{CHAIN_START.hex()}');"
        f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
    )


def open_reader(path: Path, *, immutable: bool = False) -> sqlite3.Connection:
    """A read-only connection; every statement sees what is committed by then.

    With `immutable` nobody writes, so no locks are taken and no files made beside it.
    """
    if not path.is_file():
        raise LedgerError(f"ledger={path}: no such file; name the folder of a run")
    with _complaints(path):
        uri = f"file:{quote(str(path.resolve()))}?mode=ro{'&immutable=1' if immutable else ''}"
        connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        schema = _check(connection, path)
        if schema != SCHEMA_VERSION:
            show_as_newest(connection, schema)
    return connection


@contextmanager
def reading(run: Path) -> Iterator[sqlite3.Connection]:
    """A read-only connection that sees one state of the ledger throughout, whatever is written meanwhile."""
    path = ledger_path(run)
    with closing(open_reader(path, immutable=_is_closed(path))) as connection, _complaints(path):
        connection.execute("BEGIN")
        yield connection


def schema_of(connection: sqlite3.Connection) -> int:
    """The version of the schema that the file itself has."""
    schema: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return schema


def unlike_schema(connection: sqlite3.Connection) -> list[str]:
    """Tables and indexes of a ledger of the newest schema that are not laid out as that says."""
    return layout_differences(connection, _SCHEMA.read_text())


def _is_closed(ledger: Path) -> bool:
    """Whether it was sealed and nobody has written since."""
    log = log_path(ledger)
    return (ledger.parent / SEAL_NAME).is_file() and not (log.is_file() and log.stat().st_size)


def _check(connection: sqlite3.Connection, path: Path) -> int:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != _APPLICATION_ID:
        raise LedgerError(f"ledger={path}: not a ledger; name the folder of a run, or start a new one")
    schema = schema_of(connection)
    if not OLDEST <= schema <= NEWEST:
        raise LedgerError(
            f"ledger={path}: written with schema {schema}, this version reads {OLDEST} to {NEWEST};"
            " use the release that wrote it"
        )
    connection.execute("SELECT seq FROM head").fetchone()
    return schema


@contextmanager
def _complaints(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        reason = " ".join(str(error).split())  # it may quote what was damaged
        raise LedgerError(
            f"ledger={path}: cannot be read ({reason}); restore the file with its -wal file, or start a new run"
        ) from error
