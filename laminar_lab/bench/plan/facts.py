"""Facts of a finished run that its simulation needs: lengths, prompts, rewards, CPU time of its processes.

`laminar bench plan --only quickstart` reads them from a run of the base setting, which is not a predicted run.
"""

import contextlib
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import Event, Thread

import numpy as np
import psutil

from laminar_lab.bench.runs import FinishedRun
from laminar_lab.emulation.settings import SHORTEST, LearnerTimes
from laminar_lab.plan.inputs import prompt_share
from laminar_lab.simulate.figures import WARM_SHARE
from laminar_py.ledger import decode_event, reading
from laminar_py.records.events import Stepped, VersionLoaded
from laminar_py.records.metrics import FleetRow

EVERY_S = 0.5
LEARNER, REPLICA = "learner-", "replica-"  # beginnings of the names that `ps` shows of their processes

ProcessKey = tuple[str, int]  # part of the run ("" for any other), and process id


@dataclass(frozen=True, slots=True)
class CpuSpent:
    """CPU seconds of a run between two moments, e.g. `CpuSpent(learner_s=11.1, replicas_s=5.2, rest_s=10.3)`."""

    learner_s: float
    replicas_s: float
    rest_s: float  # of all other processes


@dataclass(slots=True)
class CpuLog:
    """CPU seconds that each process has used at moments of the wall clock, e.g. `CpuLog()`."""

    at_s: list[float] = field(default_factory=list)  # [N] seconds since 1970
    used_s: list[Mapping[ProcessKey, float]] = field(default_factory=list)  # [N]

    def spent(self, begin_s: float, end_s: float) -> CpuSpent:
        """Return the CPU seconds between two moments."""
        first, last = (self.used_s[min(bisect_left(self.at_s, s), len(self.at_s) - 1)] for s in (begin_s, end_s))
        spent = dict.fromkeys((LEARNER, REPLICA, ""), 0.0)
        for key, used_s in last.items():
            spent[key[0]] += used_s - first.get(key, 0.0)
        return CpuSpent(spent[LEARNER], spent[REPLICA], spent[""])


@contextmanager
def watching_cpu() -> Iterator[CpuLog]:
    """Yield a log; a thread fills it with the CPU seconds of this process's descendants."""
    log, ended = CpuLog(), Event()
    thread = Thread(target=_watch, args=(log, ended), name="watch-cpu", daemon=True)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()


def _watch(log: CpuLog, ended: Event) -> None:
    used_s: dict[ProcessKey, float] = {}  # keeps the processes that have ended
    while not ended.wait(EVERY_S):
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title, times = process.name(), process.cpu_times()
                part = next((part for part in (LEARNER, REPLICA) if title.startswith(part)), "")
                used_s[part, process.pid] = times.user + times.system
        log.at_s.append(time.time())
        log.used_s.append(dict(used_s))


def warm_steps(num_steps: int) -> int:
    """Return how many first steps of a run do not count; the same as in a simulated run."""
    return max(1, round(WARM_SHARE * num_steps))


UNDISTURBED = 10  # percentile of a delay that is taken for the delay where nothing else waits
SAMPLES, HALVINGS = 200_000, 40  # of a cut log-normal whose mean is looked for
HIGHEST_SIGMA = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run that `laminar simulate` takes as settings, in seconds of the run."""

    median_tokens: int  # of the responses
    sigma: float  # with which log-normal lengths have their mean
    prompt_share: float  # share of log-length variance that lies between prompts
    prompt_tokens: int  # median
    solved: float
    reward_s: float  # from the end of a response to its score, without a queue
    publish_s: float  # from a step to the first replica that serves its weights, without draining
    handover_s: float  # the least that the learner waited between two steps
    trajectory_cpu_s: float  # CPU time of all processes but learner and replicas
    learner_slowdown: float  # CPU time of the learner over the time that its profile gives the same steps
    replica_cpu_s: float  # CPU time of the replicas' processes for a token
    cores: float  # without the share that other programs kept busy

    @property
    def settings(self) -> list[str]:
        """Return the overrides of a config. Figures of learner and replicas belong into a profile instead."""
        return [
            f"rollout.engine.median_tokens={self.median_tokens}",
            f"rollout.engine.sigma={self.sigma}",
            f"rollout.engine.prompt_share={self.prompt_share}",
            f"rollout.engine.simulation.prompt_tokens={self.prompt_tokens}",
            f"rollout.engine.simulation.solved={self.solved}",
            f"rollout.engine.simulation.reward_median_s={self.reward_s}",
            f"rollout.engine.simulation.publish_s={self.publish_s}",
            f"rollout.engine.simulation.trajectory_cpu_s={self.trajectory_cpu_s}",
            f"rollout.engine.simulation.cores={self.cores}",
        ]


def read_facts(done: FinishedRun, cpu: CpuLog, times: LearnerTimes, *, cap: int) -> RunFacts:
    """Read the facts of a run from its ledger.

    `cap` is its longest response, `times` the profile of its learner.
    """
    warm, last = warm_steps(len(done.steps)), len(done.steps)
    with reading(done.folder) as connection:
        ask = connection.execute
        rows = ask(
            "SELECT group_id, length, reward, finished_s, scored_s FROM trajectory"
            " WHERE kind = 'train' AND reward IS NOT NULL"
        ).fetchall()
        prompts = [size // 4 for (size,) in ask("SELECT length(ids) FROM prompt")]
        ends = "SELECT max(ended_s) FROM trajectory WHERE step = ?"
        begin_s, end_s = (
            ask(ends, (step,)).fetchone()[0] for step in (warm_steps(len(done.steps)), len(done.steps))
        )
        trained = "SELECT trajectory.length + length(ids) / 4 FROM trajectory JOIN prompt ON prompt.id = prompt_id"
        sequences = [length for (length,) in ask(f"{trained} WHERE step > ?", (warm,))]
        finished = "SELECT count(*), sum(length) FROM trajectory WHERE finished_s BETWEEN ? AND ?"
        (count, num_tokens) = ask(finished, (begin_s, end_s)).fetchone()
    groups, lengths = [group for group, *_ in rows], np.array([length for _, length, *_ in rows], float)
    spent = cpu.spent(begin_s, end_s)
    return RunFacts(
        median_tokens=round(float(np.median(lengths))),
        sigma=sigma_of(float(lengths.mean()), middle=round(float(np.median(lengths))), cap=cap),
        prompt_share=prompt_share(lengths, np.unique(groups, return_inverse=True)[1]),
        prompt_tokens=round(median(prompts)),
        solved=float(np.mean([reward > 0 for _, _, reward, *_ in rows])),
        reward_s=float(np.percentile([scored_s - ended_s for *_, ended_s, scored_s in rows], UNDISTURBED)),
        publish_s=_publish_s(done),
        handover_s=min(row.waited_s for row in done.steps[warm:]),
        trajectory_cpu_s=spent.rest_s / count,
        learner_slowdown=spent.learner_s / modelled_s(sequences, times, steps=last - warm),
        replica_cpu_s=spent.replicas_s / num_tokens,
        cores=cores_left([row for row in done.fleet if row.rl_s > done.steps[warm - 1].rl_s]),
    )


def sigma_of(mean: float, *, middle: int, cap: int) -> float:
    """Return the sigma with which log-normal lengths of that median, cut as engines cut them, have the mean."""
    normal = np.random.default_rng(0).standard_normal(SAMPLES)
    low, high = 0.0, HIGHEST_SIGMA
    for _ in range(HALVINGS):
        sigma = (low + high) / 2
        is_low = np.clip(middle * np.exp(sigma * normal), SHORTEST, cap).mean() < mean
        low, high = (sigma, high) if is_low else (low, sigma)
    return low


def modelled_s(lengths: Sequence[int], times: LearnerTimes, *, steps: int) -> float:
    """Return the seconds that a profile gives so many steps on sequences of these lengths."""
    return times.step_s([lengths], devices=1) + (steps - 1) * times.optimizer_s


def cores_left(rows: Sequence[FleetRow]) -> float:
    """Return the cores of a run without the share that other programs kept busy meanwhile."""
    others = [
        row.cpu_use - row.own_cpu_use for row in rows if row.cpu_use is not None and row.own_cpu_use is not None
    ]
    return rows[0].cores * (1.0 - max(0.0, float(np.mean(others))))


def _publish_s(done: FinishedRun) -> float:
    """Return the seconds from a step in the ledger to the first replica that has loaded its version."""
    stepped: dict[int, float] = {}  # by step, on the run's monotonic clock
    served: dict[int, float] = {}  # by version
    with (
        reading(done.folder) as connection,
        closing(
            connection.execute(
                "SELECT mono, body FROM event WHERE kind IN ('stepped', 'versionloaded') ORDER BY seq"
            )
        ) as rows,
    ):
        for mono, body in rows:
            event = decode_event(body)
            if isinstance(event, Stepped):
                stepped[event.step] = mono
            elif isinstance(event, VersionLoaded):
                served.setdefault(event.version, mono)
        versions = connection.execute("SELECT version, step FROM version WHERE step > 0").fetchall()
    waits = [served[version] - stepped[step] for version, step in versions if version in served]
    return max(0.0, float(np.percentile(waits, UNDISTURBED)))
