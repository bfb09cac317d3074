"""CPU time of the processes of a run while it runs, by what they do. Used by `laminar bench plan`."""

import contextlib
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread

import psutil

EVERY_S = 0.5
LEARNER, REPLICA = "ray::LearnerActor", "ray::ReplicaActor"  # in the command lines of their processes

ThreadKey = tuple[str, int, int]  # what its process is, that process, and its number there; 0 is all of a process


@dataclass(frozen=True, slots=True)
class CpuSpent:
    """CPU seconds of a part of a run, e.g. `CpuSpent(learner_s=11.1, engines_s=5.2, rest_s=10.3)`."""

    learner_s: float
    engines_s: float  # of the threads that decode
    rest_s: float  # of all else, replicas around their engines included


@dataclass(slots=True)
class CpuLog:
    """CPU seconds so far, by thread or process, at moments in seconds since 1970, e.g. `CpuLog()`."""

    at_s: list[float] = field(default_factory=list)  # [N]
    used_s: list[Mapping[ThreadKey, float]] = field(default_factory=list)  # [N]

    def spent(self, begin_s: float, end_s: float) -> CpuSpent:
        """CPU seconds between two moments; the busiest thread of a replica is taken for its engine."""
        first, last = (self.used_s[min(bisect_left(self.at_s, s), len(self.at_s) - 1)] for s in (begin_s, end_s))
        learner_s = engines_s = rest_s = 0.0
        replicas = defaultdict[int, list[float]](list)
        for (name, process, number), used_s in last.items():
            grown_s = used_s - first.get((name, process, number), 0.0)
            if name == REPLICA:
                replicas[process].append(grown_s)
            elif name == LEARNER:
                learner_s += grown_s
            else:
                rest_s += grown_s
        for threads in replicas.values():
            engines_s += max(threads)
            rest_s += sum(threads) - max(threads)
        return CpuSpent(learner_s, engines_s, rest_s)


@contextmanager
def watching_cpu() -> Iterator[CpuLog]:
    """A log of all processes below this one, until the end."""
    log, ended = CpuLog(), Event()
    thread = Thread(target=_watch, args=(log, ended), name="watch-cpu", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()


def _watch(log: CpuLog, ended: Event) -> None:
    used_s: dict[ThreadKey, float] = {}  # what has ended keeps what it used
    while not ended.wait(EVERY_S):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                used_s |= _look(process)
        log.at_s.append(time.time())
        log.used_s.append(dict(used_s))


def _look(process: psutil.Process) -> dict[ThreadKey, float]:
    command = " ".join(process.cmdline())
    if REPLICA in command:
        return {(REPLICA, process.pid, one.id): one.user_time + one.system_time for one in process.threads()}
    times = process.cpu_times()
    return {(LEARNER if LEARNER in command else "", process.pid, 0): times.user + times.system}
