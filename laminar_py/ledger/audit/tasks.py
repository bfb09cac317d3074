"""Tasks of the proof, each of which one process does with a connection of its own. Driven by `audit.verify`.

Invariant: a task reads one state of the ledger, and its result holds of that state.
"""

import sqlite3
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

import msgspec

from laminar_py.ledger.archive import record_of, was_changed
from laminar_py.ledger.audit import log
from laminar_py.ledger.audit.checks import (
    ArchiveCheck,
    Check,
    ChecksumCheck,
    DrainCheck,
    FiguresCheck,
    LossCheck,
    StalenessCheck,
    StepCheck,
    WeightsCheck,
)
from laminar_py.ledger.audit.replay import Replay
from laminar_py.ledger.audit.responses import ResponseCheck
from laminar_py.ledger.audit.truth import TruthCheck
from laminar_py.ledger.audit.violations import Rule, Violation
from laminar_py.ledger.database import LedgerError, ledger_path, reading, segments_path, unlike_schema
from laminar_py.ledger.responses import StoredResponses
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.start import is_simulated
from laminar_py.records.codec import prompt_digest
from laminar_py.records.events import Event

SIMULATED = (
    "simulated: nothing was generated or trained, and times are of a virtual clock; tokens are counts, which are"
    " checked with their versions. Left out, since there are none: the bytes of tokens and weights, and their"
    " digests (laws 3 and 4)"
)
_NAMED = 20  # trajectories whose loss is told one by one


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one task."""

    violations: list[Violation] = []
    notes: list[str] = []
    missing: list[int] = []  # trajectories that have tokens, and to none of them a reference
    seen: list[int] = []  # trajectories that have some in the archive
    apart: list[int] = []  # of these, those of which the rest is in other files of it


def check_file(run: Path) -> TaskResult:
    """Check that SQLite finds the file whole, and its tables laid out as they should be."""
    with reading(run) as connection:
        said = [message for (message,) in connection.execute("PRAGMA integrity_check(10)") if message != "ok"]
        found = [Violation(Rule.LOG, "file", message) for message in said]
        found += [
            Violation(Rule.LOG, name, "is not laid out as it should be") for name in unlike_schema(connection)
        ]
        return TaskResult(violations=found)


def check_events(run: Path) -> TaskResult:
    """Replay all events: every rule along the log, and the tables that follow from it."""
    archive, losses = ArchiveCheck(ledger_path(run).parent), LossCheck()
    checks: list[Check] = [StalenessCheck(), DrainCheck(), WeightsCheck(), ChecksumCheck(), StepCheck()]
    checks += [TruthCheck(), FiguresCheck(), archive, losses]
    watching: dict[type[Event], list[Check]] = {}
    for check in checks:
        for kind in check.event_types:
            watching.setdefault(kind, []).append(check)
    found: list[Violation] = []
    with reading(run) as connection:
        replay, entries = Replay(connection), log.Log(connection)
        for seq, wall, mono, event in entries:
            for check in watching.get(type(event), ()):
                found += check.check_event(event, replay.row_before(event))
            replay.apply_event(seq, event, wall=wall, mono=mono)
        replay.end()
        losses.compare(connection)
        simulated = is_simulated(connection)
    for check in checks:
        found += check.end()
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(entries.unknown.items()))
    notes = [SIMULATED] if simulated else []
    notes += [f"events of a later release, passed over: {kinds}"] if kinds else []
    return TaskResult(violations=entries.violations + found + replay.violations, notes=notes)


def check_chain(run: Path, first: int, last: int | None) -> TaskResult:
    """Check the hashes of events `first` to `last`."""
    with reading(run) as connection:
        return TaskResult(violations=list(log.check_chain(connection, first, last)))


def check_prompts(run: Path) -> TaskResult:
    """Check prompts against their digests."""
    with reading(run) as connection:
        return TaskResult(violations=list(_check_prompts(connection)))


def check_stored(run: Path, first: int, last: int) -> TaskResult:
    """Check responses that SQLite refers to, of trajectories `first` to `last`."""
    with reading(run) as connection:
        check = ResponseCheck(connection, _reader(run))
        missing = check.check_stored(first, last)
        away = f"{check.num_elsewhere} responses are on other hosts of the run, and were not read"
        notes = [away] if check.num_elsewhere else []
        return TaskResult(violations=check.violations, missing=missing, notes=notes)


def check_archive(run: Path, path: Path) -> TaskResult:
    """Check responses in one file of the archive.

    A file that is not the recorded one is not opened: a reader of Parquet can end the process over a changed byte.
    One without a record is what a crash left before it was recorded, and nobody reads it.
    """
    with reading(run) as connection:
        check, event = ResponseCheck(connection, _reader(run)), record_of(path, connection)
        if event is None:
            return TaskResult()
        if was_changed(path, event):
            message = f"was changed, so none of its {event.num_trajectories} trajectories is read; restore it"
            return TaskResult(violations=[Violation(Rule.ARCHIVE, event.path, message)])
        try:
            check.check_file(path)
        except LedgerError as error:
            check.violations.append(Violation(Rule.ARCHIVE, path.name, str(error)))
        return TaskResult(violations=check.violations, seen=check.numbers, apart=check.apart)


def check_apart(run: Path, numbers: Collection[int]) -> TaskResult:
    """Check responses that several files of the archive have together."""
    with reading(run) as connection:
        check = ResponseCheck(connection, _reader(run))
        check.check_rows_apart(numbers, StoredResponses(run, connection))
        return TaskResult(violations=check.violations)


def _reader(run: Path) -> PayloadReader:
    return PayloadReader(segments_path(ledger_path(run).parent))


def find_nowhere(run: Path, missing: Collection[int]) -> Iterator[Violation]:
    """Violations by trajectories no piece of which is anywhere."""
    with reading(run) as connection:
        for number in islice(sorted(missing), _NAMED):
            query = "SELECT id, length FROM trajectory WHERE number = ?"
            for id, length in connection.execute(query, (number,)):
                yield Violation(Rule.SPANS, id, f"none of its {length} tokens can be read")
    if len(missing) > _NAMED:
        yield Violation(
            Rule.SPANS, "archive", f"has no tokens of {len(missing) - _NAMED} more trajectories either"
        )


def _check_prompts(connection: sqlite3.Connection) -> Iterator[Violation]:
    for id, ids, text, answer, task, fields, digest in connection.execute(
        "SELECT id, ids, text, answer, task, fields, digest FROM prompt"
    ):
        if prompt_digest(id, text, ids, answer, task, fields) != digest:
            yield Violation(Rule.ROWS, f"prompt {id}", "was changed")
    missing = connection.execute(
        "SELECT id, prompt_id FROM trajectory WHERE prompt_id NOT IN (SELECT id FROM prompt)"
    )
    for id, prompt_id in missing:
        yield Violation(Rule.ROWS, id, f"its prompt {prompt_id} is not stored")
    misplaced = connection.execute(
        "SELECT id, idx, first FROM prompt JOIN"
        " (SELECT prompt_id, prompt_index AS first, min(number) FROM trajectory GROUP BY prompt_id)"
        " ON prompt_id = id WHERE idx != first"
    )
    for id, index, first in misplaced:
        yield Violation(Rule.ROWS, f"prompt {id}", f"stands at place {index}, it was first issued from {first}")
