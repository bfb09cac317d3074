"""Proves the laws on a ledger, of a run that ended, was killed, or goes on. Called by `laminar audit verify`.

It reads one state of the file from beginning to end and trusts no table: every row is derived again from the
hash-chained events, every response from its pieces.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec

from laminar_py.audit.checks import (
    Check,
    ChecksumCheck,
    DrainCheck,
    StalenessCheck,
    StepCheck,
    WeightsCheck,
)
from laminar_py.audit.findings import Finding, Law
from laminar_py.audit.replay import Replay
from laminar_py.audit.responses import check_responses
from laminar_py.events import AnyEvent
from laminar_py.store.database import ledger_path, reading
from laminar_py.store.digests import CHAIN_START, event_hash, prompt_digest
from laminar_py.store.rows import decode_event


def verify(run: Path) -> list[Finding]:
    """Every breach of a law in the ledger of `run`; none if all is well. Raises `ValueError` on a bad file."""
    with reading(run) as connection:
        found = [*_check_file(connection), *_check_events(connection), *_check_prompts(connection)]
        return found + list(check_responses(ledger_path(run).parent, connection))


def _check_file(connection: sqlite3.Connection) -> Iterator[Finding]:
    for (message,) in connection.execute("PRAGMA quick_check(10)"):
        if message != "ok":
            yield Finding(Law.LOG, "file", message)


def _check_events(connection: sqlite3.Connection) -> Iterator[Finding]:
    replay = Replay(connection)
    checks: list[Check] = [
        StalenessCheck(),
        DrainCheck(),
        WeightsCheck(),
        ChecksumCheck(),
        StepCheck(),
    ]
    for entry in _read_log(connection):
        if isinstance(entry, Finding):
            yield entry
            continue
        seq, wall, mono, event = entry
        row = replay.row_before(event)
        for check in checks:
            yield from check.see(event, row)
        yield from replay.see(seq, event, wall=wall, mono=mono)
    for check in checks:
        yield from check.end()
    yield from replay.end()


def _read_log(connection: sqlite3.Connection) -> Iterator[tuple[int, float, float, AnyEvent] | Finding]:
    """Events with their numbers and stamps, and what is wrong with the chain where it is wrong."""
    last, previous = 0, CHAIN_START
    cursor = connection.execute(
        # as bytes: a changed byte need not be valid text
        "SELECT seq, wall, mono, host, kind, subject, CAST(body AS BLOB), hash FROM event ORDER BY seq"
    )
    for seq, wall, mono, host, kind, subject, body, stored in cursor:
        if seq != last + 1:
            yield Finding(Law.LOG, f"event {last + 1}", f"is missing; the next one is {seq}")
        elif event_hash(previous, seq, wall, mono, host, kind, subject, body) != stored:
            yield Finding(Law.LOG, f"event {seq}", f"({kind} {subject}) was changed or put in")
        last, previous = seq, stored
        try:
            event = decode_event(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            yield Finding(Law.LOG, f"event {seq}", f"({kind} {subject}) cannot be read: {error}")
        else:
            yield seq, wall, mono, event
    head = connection.execute("SELECT seq, hash FROM head").fetchone()
    if head != (last, previous):
        yield Finding(Law.LOG, "end", f"the log ends with event {last}, written were {head[0]}")


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
