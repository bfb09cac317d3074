"""Alarms of a run: one line at once, an event on the ledger, and the reaction that `alarms` asks for (law 13).

The parts of the controller hand facts to `Alarms`, which runs the checks of `control.alarms`. A check names each
part once in the life of a controller, so a lasting failure does not flood the terminal.
"""

import logging
import math
from collections.abc import Callable, Iterable
from itertools import chain

from laminar_py.config.alarms import Reaction
from laminar_py.config.cluster import Device
from laminar_py.config.engine import EngineConfig
from laminar_py.config.reward import RewardConfig
from laminar_py.config.section import is_address
from laminar_py.control.alarms.data import GroupCheck, score_alarms
from laminar_py.control.alarms.events import EventChecks
from laminar_py.control.alarms.learning import StepCheck, reference_alarm
from laminar_py.control.alarms.quantization import BOUND_EXACT, BOUND_ROUNDED, QuantizationGate
from laminar_py.control.alarms.weights import EXACT, ROUNDED, ProbeCheck
from laminar_py.control.consumption import StepBatch
from laminar_py.engines.model_sizes import served_dtype
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.columns import Source
from laminar_py.records.events import Alarmed, AnyEvent, FrozenLoaded, RolledBack, Unquantized
from laminar_py.records.metrics import StepMetrics
from laminar_py.records.proofs import Alarm
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.learner import LearnerKeeper

BEYOND = 1e6  # nats; stands for an infinite mismatch on record
log = logging.getLogger(__name__)


def weights_by_name(reward: RewardConfig) -> dict[str, float]:
    """Return the weight of each term's value by its name, without names of several weights."""
    found: dict[str, set[float]] = {}
    for term in reward.terms:
        found.setdefault(term.title, set()).add(term.weight)
    return {name: min(weights) for name, weights in found.items() if len(weights) == 1}


def make_gate(
    engine: EngineConfig, recovered: Recovered | None, overrides: Iterable[str], *, exact: bool
) -> QuantizationGate:
    """Make the gate of rounded weights, of which a resumed run may still have tokens."""
    earlier = () if recovered is None else [*recovered.overrides, *overrides]
    ended = recovered is not None and (recovered.unquantized or any("rollout.engine" in one for one in earlier))
    bound = engine.max_mismatch or (BOUND_EXACT if exact else BOUND_ROUNDED)
    return QuantizationGate(bound=bound, quantizes=engine.quantizes, rounded_before=ended)


def first_fingerprints(frozen: Iterable[FrozenLoaded]) -> dict[tuple[str, str], str]:
    """Return the fingerprint of each frozen model by its source and folder.

    Served models are left out: a server may have moved its files, whose path is a part of its fingerprint.
    """
    return {(one.source, one.model): one.fingerprint for one in frozen if not is_address(one.model)}


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
        self._stop, self._learner_rounds = stop, config.learner.rounds_weights
        self.show_line = show_line
        self._told: set[tuple[str, str]] = set()
        self._early: list[AnyEvent] = []  # from before the ledger began
        self._record: Callable[[AnyEvent], None] = self._early.append
        problems = {name: len(prompts) for name, prompts in incarnation.inputs.sets.items()}
        self._events = EventChecks(lambda row: row.prompt, config=config, problems=problems)
        self._gate = make_gate(config.rollout.engine, recovered, incarnation.overrides, exact=exact)
        self.unquantize: Callable[[], None] = lambda: None  # start engines again that serve weights as published
        self._probes = ProbeCheck(tolerance=EXACT if exact else ROUNDED, compares=self._gate.compares)
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
        self._fingerprints = {} if recovered is None else first_fingerprints(recovered.frozen)
        self._weights = weights_by_name(config.reward)
        if recovered is not None:
            self._events.batches.restore(recovered.live)
            self._events.rewards.restore(recovered.rewards)
        incarnation.ledger.observe = self._observe

    def start(self) -> None:
        """Record the alarms so far, now that the ledger has begun."""
        self._record = self._ledger.append
        for event in self._early:
            self._record(event)

    def _observe(self, event: AnyEvent, row: LiveTrajectory | None) -> None:
        if isinstance(event, RolledBack):
            self._gate.went_back()
        if found := self._events.observe(event, row):
            self._tell(found)

    def stepped(self, batch: StepBatch, metrics: StepMetrics, step: int, made: int) -> None:
        """Check a step, before it is recorded; the learner has `made` so many, without empty ones."""
        self.step = step
        compares = batch.version is None or self._gate.compares(batch.version)
        self._tell(self._learning.observe(batch, metrics, step=step, made=made, compares=compares))
        self._judge(self._gate.mismatch_of(metrics), f"fresh tokens of step {step}")

    async def published(self, learner: LearnerKeeper, version: int) -> None:
        """Take the learner's distributions of a version. Raises PartCrashedError."""
        self._gate.published(version)
        if tokens := await learner.next_tokens(version):
            self._take_probes(self._probes.computed(version, tokens))

    def reported(self, report: ReplicaReport) -> None:
        """Check the answers to probes in a replica's report."""
        if report.probes:
            answered = (self._probes.answered(report.replica, answer) for answer in report.probes)
            self._take_probes(chain.from_iterable(answered))

    def _take_probes(self, found: Iterable[Alarm]) -> None:
        """Raise alarms on answers to probes, unless these show that engines must round no more."""
        alarms = list(found)
        mismatch = self._probes.largest_mean if self._gate.quantizes else math.nan
        if not self._judge(mismatch, "answers to probes", of_probes=True):
            self._tell(alarms)

    def _judge(self, mismatch: float, where: str, *, of_probes: bool = False) -> bool:
        """Compare a mean difference in nats with the bound of rounded weights; return whether it is beyond."""
        if not self._gate.closes(mismatch, of_probes=of_probes):
            return False
        if self._learner_rounds:
            self.tell(
                "probes",
                "engines",
                f"{where} differ by {mismatch:.3g} nats in the mean, beyond rollout.engine.max_mismatch, although"
                " engines and learner both round their weights; resume with rollout.engine.quantization=none"
                " learner.rounds_weights=false",
            )
            return True
        event = Unquantized(step=self.step, mismatch=min(mismatch, BEYOND), where=where)
        line = f"step {self.step}: {event.describe()}; rollout.engine.max_mismatch bounds it"
        log.warning("%s", line)
        self.show_line(line)
        self._record(event)
        self.unquantize()
        return True

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
