"""Proves the laws on a ledger, of a run that ended, was killed, or goes on. Called by `laminar audit verify`.

It trusts no table: every row is derived again from the hash-chained events, every response from its pieces. A
large ledger is read by several processes at once, each of which does parts of the work. A part sees one state of
the file from beginning to end and compares nothing between two, so a run that goes on is judged by what is there.
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

from laminar_py.audit import parts
from laminar_py.audit.findings import Finding, Law
from laminar_py.audit.parts import Part
from laminar_py.ledger.database import LedgerError, ledger_path, reading
from laminar_py.ledger.seal import Seal, differences, read_seal, seal_digest

_ALONE = 100_000  # events that one process is done with sooner than others have started
_EVENTS = 500_000  # of the chain, in one part
_TRAJECTORIES = 50_000  # responses in SQLite, in one part


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found, and what else is to be said: whether the run is sealed, what could not be judged."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(run: Path, *, processes: int | None = None) -> list[Finding]:
    """Every breach of a law in the record of `run`; none if all is well. Raises `ValueError` on a bad file."""
    return prove(run, processes=processes).findings


def prove(run: Path, *, processes: int | None = None) -> Verdict:
    """The same, with what else is to be said. `processes`: at most so many, by default one for each core."""
    folder = ledger_path(run).parent
    seal = _find_seal(folder)
    verdict = _judge(run, seal, processes=processes or len(os.sched_getaffinity(0)))
    if seal is not None and seal_digest(folder) is None:  # the run went on meanwhile
        return prove(run, processes=processes)
    return verdict


def _find_seal(folder: Path) -> Seal | Finding | None:
    try:
        return read_seal(folder)
    except LedgerError as error:
        return Finding(Law.SEAL, "seal.json", str(error))


def _judge(run: Path, seal: Seal | Finding | None, *, processes: int) -> Verdict:
    verdict = Verdict()
    folder = ledger_path(run).parent
    if isinstance(seal, Finding):
        verdict.findings.append(seal)
    elif seal is not None:
        verdict.findings.extend(Finding(Law.SEAL, *difference) for difference in differences(folder, seal))
    try:
        _check_ledger(run, verdict, processes=processes)
    except LedgerError as error:
        if not verdict.findings:
            raise
        verdict.findings.append(Finding(Law.LOG, "ledger", str(error)))
    if isinstance(seal, Seal):
        verdict.notes.insert(0, f"sealed: {len(seal.files)} files, event {seal.seq} is the last")
    elif seal is None:
        verdict.notes.insert(0, "not sealed: the run goes on, or was killed")
    return verdict


def _check_ledger(run: Path, verdict: Verdict, *, processes: int) -> None:
    with reading(run) as connection:
        (events,) = connection.execute("SELECT coalesce(max(seq), 0) FROM event").fetchone()
        (trajectories,) = connection.execute("SELECT coalesce(max(number), 0) FROM trajectory").fetchone()
    ranges = _ranges(trajectories, _TRAJECTORIES)
    chain = _ranges(events, _EVENTS)
    chain[-1] = chain[-1][0], None
    with _workers(1 if events < _ALONE else processes) as submit:
        whole = submit(parts.check_file, run)
        work = [submit(parts.check_events, run)]  # the longest first
        stored = [submit(parts.check_stored, run, *numbers) for numbers in ranges]
        work += [submit(parts.check_chain, run, *numbers) for numbers in chain]
        work.append(submit(parts.check_prompts, run))
        file = whole()
        verdict.findings.extend(file.findings)
        verdict.notes.extend(file.notes)
        if file.findings:
            return  # values are not of their types, rows not in their order: whatever follows would be noise
        missing = {number for part in stored for number in part().missing}
        # now: what a run moves to a file meanwhile is in one that is there by the time it is gone from SQLite
        archive = [submit(parts.check_archive, run, path) for path in parts.files_of(run)]
        for part in [*work, *stored, *archive]:
            done = part()
            verdict.findings.extend(done.findings)
            verdict.notes.extend(done.notes)
            missing.difference_update(done.seen)
    verdict.findings.extend(parts.nowhere(run, missing))


def _ranges(count: int, size: int) -> list[tuple[int, int | None]]:
    """[1, count] in pieces; one that is empty if there is nothing."""
    return [(first, min(first + size - 1, count)) for first in range(1, count + 1, size)] or [(1, 0)]


Submit = Callable[..., Callable[[], Part]]


@contextmanager
def _workers(processes: int) -> Iterator[Submit]:
    """Takes a function and its arguments, gives what waits for its result; in this process if that is enough.

    What nobody has asked for by the end is given up.
    """
    if processes == 1:
        yield lambda function, *arguments: cache(partial(function, *arguments))
        return
    # the collector of cycles finds none here, in the millions of records that come and go
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result
        pool.shutdown(cancel_futures=True)
