"""Proof of the laws on the ledger of a finished, killed or running run. `laminar audit verify` calls it.

It trusts no table: it derives every row again from the hash-chained events, and every response from its pieces.
Several processes read a large ledger at once, each with some of the tasks. A task has a connection of its own,
reads one state of the ledger, and compares nothing between two states, so a running run can be checked.
"""

import gc
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Container, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import cache, lru_cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import msgspec
import yaml

from laminar_lab.audit.checks import (
    Check,
    ConsumptionCheck,
    FiguresCheck,
    Rule,
    StepCountCheck,
    VersionCheck,
    Violation,
)
from laminar_lab.audit.replay import Replay, check_hashes
from laminar_lab.audit.responses import ResponseCheck
from laminar_py.config.alarms import Reaction
from laminar_py.control.alarms import EventChecks
from laminar_py.ledger import (
    LedgerError,
    LiveTrajectory,
    create_tables,
    differences,
    is_simulated,
    ledger_path,
    read_prompt,
    read_seal,
    reading,
    seal_digest,
)
from laminar_py.records.codec import prompt_digest
from laminar_py.records.events import Alarmed, AnyEvent, Event, RunStarted
from laminar_py.records.host import counted
from laminar_py.records.proofs import Alarm
from laminar_py.records.trajectory import Prompt

SIMULATED = (
    "simulated: nothing was generated or trained, and times are of a virtual clock; tokens are counts, which are"
    " checked with their versions; the bytes of tokens and weights do not exist, so laws 3 and 4 are not checked"
)
_ALONE = 100_000  # events that one process checks faster than others start
_EVENTS = 500_000  # of the hash chain, per task
_TRAJECTORIES = 50_000  # responses in SQLite, per task
_NAMED = 20  # lost trajectories that get a violation each


class Proof(msgspec.Struct, kw_only=True):
    """Violations, and notes about the seal and about data that could not be checked."""

    violations: list[Violation] = []
    notes: list[str] = []
    missing: list[int] = []  # trajectories with tokens and no reference


def verify(run: Path, *, processes: int | None = None) -> list[Violation]:
    """Return the violations in the record of `run`. Raises `LedgerError` for a bad file."""
    return prove(run, processes=processes).violations


def prove(run: Path, *, processes: int | None = None) -> Proof:
    """Return violations and notes, using at most `processes` processes, by default one per core.

    Raises `LedgerError` for a bad file without another violation.
    """
    folder, proof = ledger_path(run).parent, Proof()
    was_sealed = seal_digest(folder) is not None
    _check_seal(folder, proof)
    try:
        _check_ledger(run, proof, processes=processes or len(os.sched_getaffinity(0)))
    except LedgerError as error:
        if not proof.violations:
            raise
        proof.violations.append(Violation(Rule.LOG, "ledger", str(error)))
    if was_sealed and seal_digest(folder) is None:  # the run was resumed meanwhile
        return prove(run, processes=processes)
    return proof


def _check_seal(folder: Path, proof: Proof) -> None:
    """Compare sizes and digests of the run's files with its seal, and note the findings in `proof`."""
    try:
        seal = read_seal(folder)
    except LedgerError as error:
        proof.violations.append(Violation(Rule.SEAL, "seal.json", str(error)))
        return
    if seal is None:
        proof.notes.append("not sealed: the run is running, or was killed")
        return
    proof.notes.append(f"sealed: {counted(len(seal.files), 'file')}, event {seal.seq} is the last")
    proof.violations.extend(Violation(Rule.SEAL, *difference) for difference in differences(folder, seal))


def _check_ledger(run: Path, proof: Proof, *, processes: int) -> None:
    """Run all checks of the ledger on `processes`, and note their findings in `proof`."""
    with reading(run) as connection:
        (events,) = connection.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
        (trajectories,) = connection.execute("SELECT coalesce(max(number), 0) FROM trajectory").fetchone()
    ranges = _ranges(trajectories, _TRAJECTORIES)
    chain = _ranges(events, _EVENTS)
    chain[-1] = chain[-1][0], None
    with _workers(1 if events < _ALONE else processes) as submit:
        layout = submit(_check_layout, run)
        work = [submit(_check_events, run)]  # the longest first
        stored = [submit(_check_stored, run, *numbers) for numbers in ranges]
        work += [submit(_check_chain, run, *numbers) for numbers in chain]
        work.append(submit(_check_prompts, run))
        proof.violations += layout().violations
        if layout().violations:
            return  # values have wrong types or rows a wrong order, so further findings would be noise
        missing: set[int] = set()
        for task in [*work, *stored]:
            done = task()
            proof.violations += done.violations
            proof.notes += done.notes
            missing.update(done.missing)
    proof.violations += _missing_responses(run, missing)


def _ranges(count: int, size: int) -> list[tuple[int, int | None]]:
    """Cut [1, count] into ranges; one empty range for count 0."""
    return [(first, min(first + size - 1, count)) for first in range(1, count + 1, size)] or [(1, 0)]


Submit = Callable[..., Callable[[], Proof]]


@contextmanager
def _workers(processes: int) -> Iterator[Submit]:
    """Give a function that submits a task and returns a function that waits for its result.

    With one process the tasks run in this one. At the end, tasks without a requested result are cancelled.
    """
    if processes == 1:
        yield lambda function, *arguments: cache(partial(function, *arguments))
        return
    # tasks create millions of objects without reference cycles, so the cycle collector would only cost time
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result
        pool.shutdown(cancel_futures=True)


# ---- tasks


def _check_layout(run: Path) -> Proof:
    """Check that SQLite finds the file undamaged, and that it has the tables of the schema."""
    with reading(run) as connection:
        faults = [message for (message,) in connection.execute("PRAGMA integrity_check(10)") if message != "ok"]
        violations = [Violation(Rule.LOG, "file", message) for message in faults]
        violations += [Violation(Rule.LOG, name, "differs from the schema") for name in unlike_schema(connection)]
        return Proof(violations=violations)


def unlike_schema(connection: sqlite3.Connection) -> list[str]:
    """Return names of tables and indexes that differ from a new ledger's, apart from comments and spaces."""
    everything = "SELECT name, type, tbl_name, sql FROM main.sqlite_master"
    with closing(sqlite3.connect(":memory:")) as empty:
        create_tables(empty)
        found, expected = (
            {name: (kind, table, _plain(sql or "")) for name, kind, table, sql in one.execute(everything)}
            for one in (connection, empty)
        )
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))


def _plain(sql: str) -> str:
    return " ".join(re.sub(r"--[^\n]*", "", sql).split())


def _check_events(run: Path) -> Proof:
    """Replay all events: check every rule along the log, and the tables that follow from it."""
    with reading(run) as connection:
        checks: list[Check] = [ConsumptionCheck(), VersionCheck(), StepCountCheck(), FiguresCheck()]
        by_type: dict[type[Event], list[Check]] = {}
        for check in checks:
            for kind in check.event_types:
                by_type.setdefault(kind, []).append(check)
        violations: list[Violation] = []
        replay, silent = Replay(connection), SilentFailures(connection, off=_checks_off(run))
        for stamped in replay.read_events():
            for check in by_type.get(type(stamped.event), ()):
                violations += check.check_event(stamped.event, replay.row_before(stamped.event))
            silent.observe(stamped.event, replay.apply_event(stamped))
        replay.end()
        violations += silent.end()
        for check in checks:
            violations += check.end()
        notes = silent.notes + ([SIMULATED] if is_simulated(connection) else [])
    if replay.unknown:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(replay.unknown.items()))
        notes.append(f"skipped events of a later release: {kinds}")
    return Proof(violations=violations + replay.violations, notes=notes)


PROMPTS = 4096  # that are kept in memory
EXACT = ("weights",)  # checks whose findings the run must have said


def _checks_off(run: Path) -> set[str]:
    """Return the checks that the run's `alarms` turn off; none if its config cannot be read."""
    try:
        alarms = yaml.safe_load((run / "config.yaml").read_text()).get("alarms") or {}
        return {check for check, reaction in alarms.items() if reaction == Reaction.OFF}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return set()


class SilentFailures:
    """Repeats the checks of events but those `off`, and compares their findings with the alarms on record."""

    def __init__(self, connection: sqlite3.Connection, *, off: Container[str] = ()) -> None:
        self._off = off
        self._checks = EventChecks(self._prompt_of)
        self._read_prompt: Callable[..., Prompt | None] = lru_cache(PROMPTS)(partial(read_prompt, connection))
        self._found: dict[tuple[str, str], Alarm] = {}  # the first, by check and part
        self._told: list[Alarmed] = []

    def _prompt_of(self, row: LiveTrajectory) -> Prompt | None:
        return self._read_prompt(row.prompt_id, index=row.prompt_index)

    def observe(self, event: AnyEvent, row: LiveTrajectory | None) -> None:
        """Take an event in the order of the log, with the row that it changed."""
        if isinstance(event, Alarmed):
            self._told.append(event)
        elif isinstance(event, RunStarted) and any(one.startswith("alarms.") for one in event.overrides):
            self._off = ()  # the config's are the last start's alone
        for alarm in self._checks.observe(event, row):
            self._found.setdefault((alarm.check, alarm.part), alarm)

    @property
    def notes(self) -> list[str]:
        """Alarms on record, and findings over the whole log that are no violations."""
        told = [f"alarm at step {one.step}: {one.check}: {one.part}: {one.message}" for one in self._told]
        return told + [
            f"{one.check}: {one.part}: {one.message}" for one in self._unsaid() if one.check not in EXACT
        ]

    def end(self) -> list[Violation]:
        """Return a violation for each finding that the run has not said."""
        unsaid = [alarm for alarm in self._unsaid() if alarm.check in EXACT]
        return [Violation(Rule.SILENT, alarm.part, f"{alarm.check}: {alarm.message}") for alarm in unsaid]

    def _unsaid(self) -> list[Alarm]:
        told = {(one.check, one.part) for one in self._told}
        return [alarm for key, alarm in self._found.items() if key not in told and key[0] not in self._off]


def _check_chain(run: Path, first: int, last: int | None) -> Proof:
    """Check the hashes of events `first` to `last`."""
    with reading(run) as connection:
        return Proof(violations=list(check_hashes(connection, first, last)))


def _check_stored(run: Path, first: int, last: int) -> Proof:
    """Check the responses that SQLite refers to, of trajectories `first` to `last`."""
    with reading(run) as connection:
        check = ResponseCheck(run, connection)
        missing = check.check_stored(first, last)
        return Proof(violations=check.violations, missing=missing)


def _check_prompts(run: Path) -> Proof:
    """Check prompts against their digests, and that each trajectory has its prompt."""
    with reading(run) as connection:
        return Proof(violations=list(_prompt_violations(connection)))


def _prompt_violations(connection: sqlite3.Connection) -> Iterator[Violation]:
    """Yield violations for prompts that were changed, are missing, or are stored with another place."""
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


def _missing_responses(run: Path, missing: Collection[int]) -> Iterator[Violation]:
    """Iterate over violations by trajectories that have tokens and no reference to them."""
    with reading(run) as connection:
        for number in islice(sorted(missing), _NAMED):
            query = "SELECT id, length FROM trajectory WHERE number = ?"
            for id, length in connection.execute(query, (number,)):
                yield Violation(Rule.SPANS, id, f"none of its {length} tokens can be read")
    if len(missing) > _NAMED:
        yield Violation(Rule.SPANS, "pieces", f"of {len(missing) - _NAMED} more trajectories are missing")
