"""Facts that a run gives for its simulation: settings, CPU time of its processes, lengths, prompts, rewards.

Used by the measurements of `laminar bench plan`, whose calibration run is not among the predicted runs.
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

from laminar_lab.bench.report import Row, spread
from laminar_lab.bench.runs import FinishedRun
from laminar_lab.plan.inputs import prompt_share
from laminar_lab.simulate.figures import WARM_SHARE
from laminar_py.config.emulation import SHORTEST, LearnerTimes
from laminar_py.learner import emulated_step_s
from laminar_py.ledger import decode_event, reading
from laminar_py.records.events import Stepped, VersionLoaded
from laminar_py.records.metrics import FleetRow

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


@dataclass(frozen=True, slots=True)
class Setting:
    """Overrides of a config under a name, e.g. `Setting("sync", ("schedule=sync",))`.

    `simulated` replaces, in the simulation, what only a real run has.
    """

    name: str
    settings: tuple[str, ...]
    simulated: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a setting, a value for each round, e.g. `Compared("sync", [8100, 8200], [7900, 8000])`."""

    name: str
    predicted: Sequence[float]
    measured: Sequence[float]

    @property
    def error(self) -> float:
        """Median predicted over median measured, less 1."""
        return median(self.predicted) / median(self.measured) - 1

    @property
    def difference(self) -> float:
        """Median predicted less median measured."""
        return median(self.predicted) - median(self.measured)

    @property
    def spread(self) -> float:
        """Range of the measured over their median."""
        return (max(self.measured) - min(self.measured)) / median(self.measured)

    def row(self, name: str, *, conditions: str) -> Row:
        """Predicted over measured."""
        told = f"x trained tokens/s; predicted {spread(self.predicted)}, measured {spread(self.measured)}"
        return Row(name, 1 + self.error, told, conditions)


def median_error(compared: Sequence[Compared]) -> float:
    """Median size of the errors of all settings."""
    return median(abs(one.error) for one in compared)


def warm_steps(num_steps: int) -> int:
    """First steps of a run that do not count, simulated or not."""
    return max(1, round(WARM_SHARE * num_steps))


def trained_tokens_per_s(done: FinishedRun) -> float:
    """Rate of a real run, in its seconds, of the steps that count in a simulated one too."""
    first, last = done.steps[warm_steps(len(done.steps)) - 1], done.steps[-1]
    return (last.trained_tokens - first.trained_tokens) / (last.rl_s - first.rl_s)


UNDISTURBED = 10  # percentile of a delay that is taken for the delay where nothing else waits
SAMPLES, HALVINGS = 200_000, 40  # of a cut log-normal whose mean is looked for
HIGHEST_SIGMA = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts of a run for `laminar simulate`, in its seconds."""

    median_tokens: int  # of the responses
    sigma: float  # with which log-normal lengths have their mean
    prompt_share: float  # of the variance of their logarithm, which is between prompts
    prompt_tokens: int  # median
    solved: float
    reward_s: float  # from a response's end to its score, where none waits before it
    publish_s: float  # from a step to the first replica that serves its weights, where none has to end anything
    handover_s: float  # the least that the learner waited between two steps
    trajectory_cpu_s: float  # of all but learner and replicas
    learner_slowdown: float  # CPU time of its process over what its profile says of the same steps
    replica_cpu_s: float  # CPU time of the replicas' processes for a token
    cores: float  # less what others kept busy

    @property
    def settings(self) -> list[str]:
        """Overrides of a config; what the run says of learner and replicas belongs into a profile."""
        return [
            f"emulation.median_tokens={self.median_tokens}",
            f"emulation.sigma={self.sigma}",
            f"emulation.prompt_share={self.prompt_share}",
            f"simulation.prompt_tokens={self.prompt_tokens}",
            f"simulation.solved={self.solved}",
            f"simulation.reward_median_s={self.reward_s}",
            f"simulation.publish_s={self.publish_s}",
            f"simulation.trajectory_cpu_s={self.trajectory_cpu_s}",
            f"simulation.cores={self.cores}",
        ]


def read_facts(done: FinishedRun, cpu: CpuLog, times: LearnerTimes, *, cap: int) -> RunFacts:
    """Facts of a run whose responses have so many tokens at most; `times` are those of its learner."""
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
    """Standard deviation of their logarithm with which lengths of that median have the mean, cut as engines do."""
    normal = np.random.default_rng(0).standard_normal(SAMPLES)
    low, high = 0.0, HIGHEST_SIGMA
    for _ in range(HALVINGS):
        sigma = (low + high) / 2
        is_low = np.clip(middle * np.exp(sigma * normal), SHORTEST, cap).mean() < mean
        low, high = (sigma, high) if is_low else (low, sigma)
    return low


def modelled_s(lengths: Sequence[int], times: LearnerTimes, *, steps: int) -> float:
    """Seconds of so many steps on sequences of these lengths, by a profile."""
    return emulated_step_s(times, [lengths], devices=1) + (steps - 1) * times.optimizer_s


def cores_left(rows: Sequence[FleetRow]) -> float:
    """Cores that a run had, less what others kept busy meanwhile."""
    others = [
        row.cpu_use - row.own_cpu_use for row in rows if row.cpu_use is not None and row.own_cpu_use is not None
    ]
    return rows[0].cores * (1.0 - max(0.0, float(np.mean(others))))


def _publish_s(done: FinishedRun) -> float:
    """From the step on record to the first replica that serves its version, its load included."""
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
