"""The parts of the proof, each of which one process does with a connection of its own. Driven by `audit.verify`.

Invariant: a part reads one state of the ledger, and what it says holds of that state.
"""

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from laminar_py.audit import log
from laminar_py.audit.checks import Check, ChecksumCheck, DrainCheck, StalenessCheck, StepCheck, WeightsCheck
from laminar_py.audit.findings import Finding, Law
from laminar_py.audit.replay import Replay
from laminar_py.audit.responses import ResponseCheck
from laminar_py.ledger.archive import archive_files
from laminar_py.ledger.database import SCHEMA_VERSION, LedgerError, ledger_path, reading, schema_of, unlike_schema
from laminar_py.ledger.migrations import mistyped
from laminar_py.ledger.rows import decode_event
from laminar_py.records.digests import file_digest, prompt_digest, token_reward_digest
from laminar_py.records.events import Archived, Event

_NAMED = 20  # trajectories whose loss is told one by one


class Part(msgspec.Struct, frozen=True):
    """What one of them came to."""

    findings: list[Finding] = []
    notes: list[str] = []
    missing: list[int] = []  # trajectories that have tokens, and none in SQLite
    seen: list[int] = []  # trajectories that have some in the archive


def check_file(run: Path) -> Part:
    """Whether SQLite finds the file whole, and its tables laid out as they should be."""
    with reading(run) as connection:
        said = [message for (message,) in connection.execute("PRAGMA integrity_check(10)") if message != "ok"]
        found = [Finding(Law.LOG, "file", message) for message in said]
        found += [
            Finding(Law.LOG, table, "has values of other types than its columns") for table in mistyped(connection)
        ]
        schema = schema_of(connection)
        if schema != SCHEMA_VERSION:
            note = f"of schema {schema}, before {SCHEMA_VERSION}: what the newer one adds is not compared"
            return Part(found, [note])
        found += [Finding(Law.LOG, name, "is not laid out as it should be") for name in unlike_schema(connection)]
        return Part(found)


def check_events(run: Path) -> Part:
    """Replay all events: every law along the log, and the tables that follow from it."""
    checks: list[Check] = [StalenessCheck(), DrainCheck(), WeightsCheck(), ChecksumCheck(), StepCheck()]
    watching: dict[type[Event], list[Check]] = {}
    for check in checks:
        for kind in check.sees:
            watching.setdefault(kind, []).append(check)
    found: list[Finding] = []
    with reading(run) as connection:
        replay, entries = Replay(connection), log.Log(connection)
        for seq, wall, mono, event in entries:
            for check in watching.get(type(event), ()):
                found += check.see(event, replay.row_before(event))
            replay.see(seq, event, wall=wall, mono=mono)
        replay.end()
        found += _check_archived(run, connection)
    for check in checks:
        found += check.end()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(entries.unknown.items()))
    notes = [f"events of a later release, passed over: {kinds}"] if kinds else []
    return Part(entries.findings + found + replay.findings, notes)


def check_chain(run: Path, first: int, last: int | None) -> Part:
    """The hashes of events `first` to `last`."""
    with reading(run) as connection:
        return Part(list(log.check_chain(connection, first, last)))


def check_prompts(run: Path) -> Part:
    """Prompts and scores of tokens against their digests."""
    with reading(run) as connection:
        return Part([*_check_prompts(connection), *_check_token_rewards(connection)])


def check_stored(run: Path, first: int, last: int) -> Part:
    """Responses in SQLite of trajectories `first` to `last`."""
    with reading(run) as connection:
        check = ResponseCheck(connection)
        missing = check.see_stored(first, last)
        return Part(check.findings, missing=missing)


def check_archive(run: Path, path: Path) -> Part:
    """Responses in one file of the archive."""
    with reading(run) as connection:
        check = ResponseCheck(connection)
        try:
            check.see_file(path)
        except LedgerError as error:
            check.findings.append(Finding(Law.ARCHIVE, path.name, str(error)))
        return Part(check.findings, seen=check.numbers)


def files_of(run: Path) -> list[Path]:
    """The files of the archive."""
    return archive_files(ledger_path(run).parent)


def nowhere(run: Path, missing: Collection[int]) -> Iterator[Finding]:
    """Findings about trajectories no piece of which is anywhere."""
    with reading(run) as connection:
        for number in islice(sorted(missing), _NAMED):
            query = "SELECT id, length FROM trajectory WHERE number = ?"
            for id, length in connection.execute(query, (number,)):
                yield Finding(Law.SPANS, id, f"none of its {length} tokens is stored")
    if len(missing) > _NAMED:
        yield Finding(Law.SPANS, "archive", f"has no tokens of {len(missing) - _NAMED} more trajectories either")


def _check_archived(run: Path, connection: sqlite3.Connection) -> Iterator[Finding]:
    """The files of the archive that are on record."""
    folder = ledger_path(run).parent
    for (body,) in connection.execute("SELECT CAST(body AS BLOB) FROM event WHERE kind = 'archived'"):
        try:
            event = decode_event(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue  # the log says so
        if not isinstance(event, Archived):
            continue
        path = folder / event.path
        if not path.is_file():
            yield Finding(Law.ARCHIVE, event.path, f"is missing, with {event.num_trajectories} trajectories")
        elif path.stat().st_size != event.num_bytes or file_digest(path) != event.digest:
            yield Finding(Law.ARCHIVE, event.path, "was changed")


def _check_prompts(connection: sqlite3.Connection) -> Iterator[Finding]:
    for id, ids, text, answer, task, digest in connection.execute(
        "SELECT id, ids, text, answer, task, digest FROM prompt"
    ):
        if prompt_digest(id, text, ids, answer, task) != digest:
            yield Finding(Law.ROWS, f"prompt {id}", "was changed")
    missing = connection.execute(
        "SELECT id, prompt_id FROM trajectory WHERE prompt_id NOT IN (SELECT id FROM prompt)"
    )
    for id, prompt_id in missing:
        yield Finding(Law.ROWS, id, f"its prompt {prompt_id} is not stored")
    misplaced = connection.execute(
        "SELECT id, idx, first FROM prompt JOIN"
        " (SELECT prompt_id, prompt_index AS first, min(number) FROM trajectory GROUP BY prompt_id)"
        " ON prompt_id = id WHERE idx != first"
    )
    for id, index, first in misplaced:
        yield Finding(Law.ROWS, f"prompt {id}", f"stands at place {index}, it was first issued from {first}")


def _check_token_rewards(connection: sqlite3.Connection) -> Iterable[Finding]:
    for number, rewards, digest in connection.execute("SELECT trajectory, rewards, digest FROM token_reward"):
        if token_reward_digest(number, rewards) != digest:
            yield Finding(Law.ROWS, f"token rewards of trajectory {number}", "were changed")
