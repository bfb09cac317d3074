"""CPU time of the processes of a run while it runs, by what they do. Used by `laminar bench plan`."""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread

import psutil

EVERY_S = 0.5
LEARNER, REPLICA = "ray::LearnerActor", "ray::ReplicaActor"  # in the command lines of their processes

ProcessKey = tuple[str, int]  # what a process is, and its number


@dataclass(frozen=True, slots=True)
class CpuSpent:
    """CPU seconds of a part of a run, e.g. `CpuSpent(learner_s=11.1, replicas_s=5.2, rest_s=10.3)`."""

    learner_s: float
    replicas_s: float
    rest_s: float  # of all else


@dataclass(slots=True)
class CpuLog:
    """CPU seconds so far, by process, at moments in seconds since 1970, e.g. `CpuLog()`."""

    at_s: list[float] = field(default_factory=list)  # [N]
    used_s: list[Mapping[ProcessKey, float]] = field(default_factory=list)  # [N]

    def spent(self, begin_s: float, end_s: float) -> CpuSpent:
        """CPU seconds between two moments."""
        first, last = (self.used_s[min(bisect_left(self.at_s, s), len(self.at_s) - 1)] for s in (begin_s, end_s))
        spent = dict.fromkeys((LEARNER, REPLICA, ""), 0.0)
        for key, used_s in last.items():
            spent[key[0]] += used_s - first.get(key, 0.0)
        return CpuSpent(spent[LEARNER], spent[REPLICA], spent[""])


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
    used_s: dict[ProcessKey, float] = {}  # what has ended keeps what it used
    while not ended.wait(EVERY_S):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                command, times = " ".join(process.cmdline()), process.cpu_times()
                part = next((part for part in (LEARNER, REPLICA) if part in command), "")
                used_s[part, process.pid] = times.user + times.system
        log.at_s.append(time.time())
        log.used_s.append(dict(used_s))
