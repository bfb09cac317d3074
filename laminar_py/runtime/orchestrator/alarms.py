"""Alarms of a run: one line at once, an event on the ledger, and the reaction that `alarms` asks for (law 13).

The parts of the controller hand facts to `Alarms`, which runs the checks of `control.alarms`. A check names each
part once in the life of a controller, so a lasting failure does not flood the terminal.
"""

import logging
from collections.abc import Callable, Iterable

from laminar_py.config.alarms import Reaction
from laminar_py.config.cluster import Device
from laminar_py.config.reward import RewardConfig
from laminar_py.control.alarms.data import GroupCheck, score_alarms
from laminar_py.control.alarms.events import EventChecks
from laminar_py.control.alarms.learning import StepCheck, reference_alarm
from laminar_py.control.alarms.weights import EXACT, ROUNDED, ProbeCheck
from laminar_py.control.consumption import StepBatch
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.columns import Source
from laminar_py.records.events import Alarmed, AnyEvent, FrozenLoaded
from laminar_py.records.metrics import StepMetrics
from laminar_py.records.proofs import Alarm
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.learner import LearnerKeeper

log = logging.getLogger(__name__)


def weights_by_name(reward: RewardConfig) -> dict[str, float]:
    """Return the weight of each term's value by its name, without names of several weights."""
    found: dict[str, set[float]] = {}
    for term in reward.terms:
        found.setdefault(term.title, set()).add(term.weight)
    return {name: min(weights) for name, weights in found.items() if len(weights) == 1}


class Alarms:
    """The checks of a run; `stop(line)` ends the run, and `show_line` prints a line at once."""

    def __init__(
        self,
        incarnation: Incarnation,
        recovered: Recovered | None,
        *,
        stop: Callable[[str], None],
        show_line: Callable[[str], None],
    ) -> None:
        config = incarnation.config
        exact = config.learner_device is Device.CPU and served_dtype(config.model.path) == "float32"
        self.step = 0  # of the learner
        self._reactions = config.alarms
        self._ledger = incarnation.ledger
        self._stop = stop
        self.show_line = show_line
        self._told: set[tuple[str, str]] = set()
        self._early: list[Alarmed] = []  # from before the ledger began
        self._record: Callable[[Alarmed], None] = self._early.append
        problems = {name: len(prompts) for name, prompts in incarnation.inputs.sets.items()}
        self._events = EventChecks(lambda row: row.prompt, config=config, problems=problems)
        self._probes = ProbeCheck(tolerance=EXACT if exact else ROUNDED)
        self._groups = GroupCheck(config.rollout.group_size)
        self._learning = StepCheck(
            config.algorithm,
            config.learner,
            exact=exact,
            sampling=config.rollout.sampling,
            steps=config.steps,
        )
        algorithm = config.algorithm
        self._frozen = {Source.REFERENCE: algorithm.reference, Source.TEACHER: algorithm.teacher}
        self._fingerprints: dict[tuple[str, str], str] = {}  # the first of each frozen model
        self._weights = weights_by_name(config.reward)
        if recovered is not None:
            self._fingerprints = {(one.source, one.model): one.fingerprint for one in recovered.frozen}
            self._events.batches.restore(recovered.live)
            self._events.rewards.restore(recovered.rewards)
        incarnation.ledger.observe = self._observe

    def start(self) -> None:
        """Record the alarms so far, now that the ledger has begun."""
        self._record = self._ledger.append
        for event in self._early:
            self._record(event)

    def _observe(self, event: AnyEvent, row: LiveTrajectory | None) -> None:
        if found := self._events.observe(event, row):
            self._tell(found)

    def stepped(self, batch: StepBatch, metrics: StepMetrics, step: int, made: int) -> None:
        """Check a step, before it is recorded; the learner has `made` so many, without empty ones."""
        self.step = step
        self._tell(self._learning.observe(batch, metrics, step=step, made=made))

    async def published(self, learner: LearnerKeeper, version: int) -> None:
        """Take the learner's distributions of a version. Raises PartCrashedError."""
        if tokens := await learner.next_tokens(version):
            self._tell(self._probes.computed(version, tokens))

    def reported(self, report: ReplicaReport) -> None:
        """Check the answers to probes in a replica's report."""
        for answer in report.probes:
            self._tell(self._probes.answered(report.replica, answer))

    def scored(self, score: Score, row: LiveTrajectory) -> None:
        """Check a score before it is recorded."""
        if found := score_alarms(score, row, weights=self._weights):
            self._tell(found)
        if copies := self._groups.observe(score, row):
            self._tell(copies)

    def referred(self, source: Source, fingerprint: str) -> None:
        """Compare the weights of a frozen model in a process of its own with its first, also before a resume."""
        model = str(self._frozen[source] or "")
        if (source, model) not in self._fingerprints:
            self._fingerprints[source, model] = fingerprint
            self._ledger.append(FrozenLoaded(source, model, fingerprint))
        elif fingerprint != self._fingerprints[source, model]:
            self._tell([reference_alarm(self.step, source)])

    def tell(self, check: str, part: str, fault: str) -> None:
        """Raise an alarm for a fault that another part has found; "" is none."""
        if fault:
            self._tell([Alarm(check, part, fault)])

    def _tell(self, alarms: Iterable[Alarm]) -> None:
        for alarm in alarms:
            reaction: Reaction = getattr(self._reactions, alarm.check)
            key = (alarm.check, alarm.part)
            if reaction is Reaction.OFF or key in self._told:
                continue
            self._told.add(key)
            line = f"alarm {alarm.check}: {alarm.part}: {alarm.message}"
            log.error("%s", line)
            self.show_line(line)
            self._record(Alarmed(self.step, alarm.check, alarm.part, alarm.message))
            if reaction is Reaction.STOP:
                self._stop(f"{line} (alarms.{alarm.check}=warn goes on)")
