"""Proof of the laws on the ledger of a finished, killed or running run. `laminar audit verify` calls it.

It trusts no table: it derives every row again from the hash-chained events, and every response from its pieces.
Several processes read a large ledger at once, each with some of the tasks. A task reads one state of the file and
compares nothing between two states, so a running run can be checked.
"""

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

from laminar_py.ledger.archive import archive_files
from laminar_py.ledger.audit import tasks
from laminar_py.ledger.audit.tasks import TaskResult
from laminar_py.ledger.audit.violations import Rule, Violation
from laminar_py.ledger.database import LedgerError, ledger_path, reading
from laminar_py.ledger.seal import differences, read_seal, seal_digest

_ALONE = 100_000  # events that one process checks faster than others start
_EVENTS = 500_000  # of the hash chain, per task
_TRAJECTORIES = 50_000  # responses in SQLite, per task


@dataclass(frozen=True, slots=True)
class Proof:
    """Violations, and notes about the seal and about events that could not be checked."""

    violations: list[Violation] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(run: Path, *, processes: int | None = None) -> list[Violation]:
    """Return the violations in the record of `run`. Raises `LedgerError` for a bad file."""
    return prove(run, processes=processes).violations


def prove(run: Path, *, processes: int | None = None) -> Proof:
    """Return violations and notes, using at most `processes` processes, by default one per core."""
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
    try:
        seal = read_seal(folder)
    except LedgerError as error:
        proof.violations.append(Violation(Rule.SEAL, "seal.json", str(error)))
        return
    if seal is None:
        proof.notes.append("not sealed: the run is running, or was killed")
        return
    proof.notes.append(f"sealed: {len(seal.files)} files, event {seal.seq} is the last")
    proof.violations.extend(Violation(Rule.SEAL, *difference) for difference in differences(folder, seal))


def _check_ledger(run: Path, proof: Proof, *, processes: int) -> None:
    with reading(run) as connection:
        (events,) = connection.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
        (trajectories,) = connection.execute("SELECT coalesce(max(number), 0) FROM trajectory").fetchone()
    ranges = _ranges(trajectories, _TRAJECTORIES)
    chain = _ranges(events, _EVENTS)
    chain[-1] = chain[-1][0], None
    with _workers(1 if events < _ALONE else processes) as submit:
        whole = submit(tasks.check_file, run)
        work = [submit(tasks.check_events, run)]  # the longest first
        stored = [submit(tasks.check_stored, run, *numbers) for numbers in ranges]
        work += [submit(tasks.check_chain, run, *numbers) for numbers in chain]
        work.append(submit(tasks.check_prompts, run))
        file = whole()
        proof.violations.extend(file.violations)
        proof.notes.extend(file.notes)
        if file.violations:
            return  # values have wrong types or rows a wrong order, so further findings would be noise
        missing = {number for task in stored for number in task().missing}
        # listed only now, so that pieces which the run archives meanwhile are found in SQLite or in a listed file
        apart: set[int] = set()
        archive = [submit(tasks.check_archive, run, path) for path in archive_files(ledger_path(run).parent)]
        for task in [*work, *stored, *archive]:
            done = task()
            proof.violations.extend(done.violations)
            proof.notes.extend(done.notes)
            missing.difference_update(done.seen)
            apart.update(done.apart)
        proof.violations.extend(submit(tasks.check_apart, run, sorted(apart))().violations if apart else ())
    proof.violations.extend(tasks.find_nowhere(run, missing))


def _ranges(count: int, size: int) -> list[tuple[int, int | None]]:
    """Cut [1, count] into ranges; one empty range for count 0."""
    return [(first, min(first + size - 1, count)) for first in range(1, count + 1, size)] or [(1, 0)]


Submit = Callable[..., Callable[[], TaskResult]]


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
