"""Rules of the record, their violations, and the checks that follow the event log. `audit.verify` runs them.

`check_event` gets every event of the types in `event_types`, in order, with the row of its trajectory before the
event. `end` returns the violations that only the whole log shows.
"""

from collections import Counter
from enum import StrEnum
from itertools import filterfalse
from typing import ClassVar, Protocol

import msgspec

from laminar_py.config.changes import BOUND
from laminar_py.ledger import UNSCORED, TrajectoryRow, answer_of
from laminar_py.records.ages import WeightAges
from laminar_py.records.evaluations import EvalAnswer, set_figures
from laminar_py.records.events import (
    AnyEvent,
    Consumed,
    Dropped,
    Evaluated,
    Event,
    Finished,
    PartStarted,
    Relayed,
    Replayed,
    RolledBack,
    RunEnded,
    RunStarted,
    Scored,
    SettingChanged,
    Stepped,
    Undone,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.spans import versions_of
from laminar_py.records.trajectory import Kind


class Rule(StrEnum):
    """A rule of the record, with the number of its law in docs/laws.md."""

    law: int

    def __new__(cls, name: str, law: int) -> "Rule":
        rule = str.__new__(cls, name)
        rule._value_, rule.law = name, law
        return rule

    SEAL = "seal", 11  # a finished run is unchanged since its seal
    LOG = "log", 11  # the event log is whole and unchanged
    ORDER = "order", 11  # every event was possible when it happened
    ROWS = "rows", 11  # the tables agree with the events
    ACCOUNTING = "accounting", 1  # issued = consumed + dropped + live
    CONSUMPTION = "consumption", 1  # no trajectory is consumed twice; each step counts its own
    SPANS = "spans", 2  # every response token is stored unchanged, with its version
    TRUTH = "truth", 9  # environment tokens are marked as such; only sampled tokens are trained on
    RECORDING = "recording", 4  # recorded masks and experts are complete and fit the tokens
    DRAIN = "drain", 2  # one version per trajectory, if promised
    STALENESS = "staleness", 12  # as recorded, and within the bound
    VERSIONS = "versions", 2  # numbers are not reused, and an engine's versions do not go back
    WEIGHTS = "weights", 3  # loaded bytes are the published ones
    DROPS = "drops", 6  # every drop has a reason
    SILENT = "silent", 13  # what the events show to be wrong, the run has said


class Violation(msgspec.Struct, frozen=True):
    """A breach of one rule, e.g. `Violation(Rule.LOG, "event 17", "was changed")`."""

    rule: Rule
    subject: str
    message: str

    @property
    def law(self) -> int:
        """Number of the broken law."""
        return self.rule.law

    def __str__(self) -> str:
        # one line, whatever damaged text it quotes
        return " ".join(f"law {self.law}: {self.rule}: {self.subject}: {self.message}".split())


class Check(Protocol):
    """A check along the event log."""

    event_types: ClassVar[tuple[type[Event], ...]]

    def check_event(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Return the violations that an event shows."""
        ...

    def end(self) -> list[Violation]:
        """Return the violations that the whole log shows."""
        return []


class ConsumptionCheck(Check):
    """Checks the trajectories that the learner consumed or replayed.

    A recorded staleness is right by `records.ages` and within the bound in force, and an engine sampled a token. A
    batch is consumed before the next change of the bound, so the bound is the last one on record.
    `VersionPublished` may follow the first consumption of a trajectory with that version.
    """

    event_types = (RunStarted, SettingChanged, Consumed, Replayed, Stepped, RolledBack, VersionPublished)

    def __init__(self) -> None:
        self._bound: int | None = None
        self._replay_bound: int | None = None
        self._ages = WeightAges()
        # with the bound; by version without a record yet
        self._early: dict[int, list[tuple[Consumed | Replayed, int | None]]] = {}

    def check_event(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Check a consumption or a replay by the learner."""
        if isinstance(event, RunStarted):
            self._bound, self._replay_bound = event.max_staleness, event.replay_max_age
        elif isinstance(event, SettingChanged) and event.name == BOUND and self._bound is not None:
            self._bound = event.value
        self._ages.record_event(event)
        if isinstance(event, VersionPublished):
            early = self._early.pop(event.version, [])
            return [fault for consumed, bound in early for fault in self._judge(consumed, event.version, bound)]
        if not isinstance(event, Consumed | Replayed) or row is None or row.kind is Kind.EVAL:
            return []
        if row.oldest_version is None:
            return [Violation(Rule.TRUTH, row.id, "was trained on, but no engine sampled a token of it")]
        bound = self._replay_bound if isinstance(event, Replayed) else self._bound
        if not self._ages.knows_version(row.oldest_version):
            self._early.setdefault(row.oldest_version, []).append((event, bound))
            return []
        return self._judge(event, row.oldest_version, bound)

    def _judge(self, event: Consumed | Replayed, oldest: int, bound: int | None) -> list[Violation]:
        faults = []
        actual = self._ages.age_of(oldest, after=event.step - 1)
        if event.staleness != actual:
            faults.append(f"recorded {event.staleness}, but version {oldest} was {actual} learner steps behind")
        # a lower weight makes up for the age of a consumed trajectory, but a replayed one is not reweighted
        full = event.weight >= 1 or isinstance(event, Replayed)
        if bound is not None and actual > bound and full:
            faults.append(f"{actual} exceeds the bound of {bound} and its weight is {event.weight:g}")
        return [Violation(Rule.STALENESS, event.trajectory_id, message) for message in faults]


class VersionCheck(Check):
    """Checks that versions are published once, loaded and used as published, and never go back on a replica.

    A finished trajectory has one version if the run promises `drain`. Replicas with the same layout have the same
    checksum of a version. A replica may report a version before its learner does, so findings on unpublished
    versions wait. A running or killed run may leave findings on the version after the highest published one; they
    are no violations.
    """

    event_types = (
        PartStarted,
        VersionPublished,
        VersionLoaded,
        Relayed,
        Finished,
        RunStarted,
        RunEnded,
    )

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._loaded: dict[str, int] = {}  # by process, since its start
        self._waiting: dict[int, list[Violation]] = {}  # by version, in case it is never published
        self._early: dict[int, set[str]] = {}  # digests loaded before the publish, by version
        # first, by version, number of GPUs, and whether it is quantised
        self._verified: dict[tuple[int, int, bool], VersionLoaded] = {}
        self._drains = False
        self._open = False  # whether the run has no recorded end

    def check_event(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Check a publish, a load, or the versions of a response."""
        match event:
            case PartStarted():
                # a restarted replica may first load an old version, to continue trajectories of that version
                self._loaded.pop(event.part, None)
            case VersionPublished():
                return self._published(event)
            case VersionLoaded():
                return self._load(event)
            case Relayed():
                return self._compare(event.node, "holds", event.version, event.digest)
            case Finished():
                return self._finished(event)
            case RunStarted():
                self._open, self._drains = True, event.drain
            case RunEnded():
                self._open = False
        return []

    def end(self) -> list[Violation]:
        """Return uses of versions that were never published."""
        next_version = max(self._digests, default=-1) + 1
        under_way = {next_version} if self._open else set()
        return [
            finding
            for version, findings in self._waiting.items()
            if version not in under_way
            for finding in findings
        ]

    def _wait(self, version: int, finding: Violation) -> None:
        self._waiting.setdefault(version, []).append(finding)

    def _published(self, event: VersionPublished) -> list[Violation]:
        if event.version in self._digests:
            return [Violation(Rule.VERSIONS, f"version {event.version}", "was published twice")]
        self._digests[event.version] = event.digest
        self._waiting.pop(event.version, None)
        others = self._early.pop(event.version, set()) - {event.digest}
        message = f"was loaded as {sorted(others)} and published as {event.digest}"
        return [Violation(Rule.WEIGHTS, f"version {event.version}", message)] if others else []

    def _finished(self, event: Finished) -> list[Violation]:
        versions = versions_of(event.spans)
        # one by one, since a set difference with dictionary keys would look at all keys
        for version in filterfalse(self._digests.__contains__, versions):
            message = f"has tokens of version {version}, which was never published"
            self._wait(version, Violation(Rule.VERSIONS, event.trajectory_id, message))
        if self._drains and len(versions) > 1:
            return [Violation(Rule.DRAIN, event.trajectory_id, f"has tokens of the versions {sorted(versions)}")]
        return []

    def _load(self, event: VersionLoaded) -> list[Violation]:
        part = f"replica-{event.replica}"
        violations = self._compare(part, "loaded", event.version, event.digest)
        before = self._loaded.get(part)
        if before is not None and event.version < before:
            violations.append(
                Violation(Rule.VERSIONS, part, f"went back from version {before} to {event.version}")
            )
        self._loaded[part] = event.version
        return violations + self._compare_checksum(event)

    def _compare_checksum(self, event: VersionLoaded) -> list[Violation]:
        """Compare the checksum of a verified load with the first one of the same layout."""
        if event.checksum is None:
            return []
        layout = (event.version, event.checksum.count("-"), event.quantized)
        first = self._verified.setdefault(layout, event)
        if first.checksum == event.checksum:
            return []
        held = f"is {first.checksum} in replica-{first.replica} and {event.checksum} in replica-{event.replica}"
        return [Violation(Rule.WEIGHTS, f"version {event.version}", held)]

    def _compare(self, part: str, did: str, version: int, digest: str) -> list[Violation]:
        """Compare a process's digest of a version with the learner's."""
        published = self._digests.get(version)
        if published is None:
            message = f"{did} version {version}, which was never published"
            self._wait(version, Violation(Rule.WEIGHTS, part, message))
            self._early.setdefault(version, set()).add(digest)
        elif published != digest:
            message = f"{did} version {version} as {digest}, but it was published as {published}"
            return [Violation(Rule.WEIGHTS, part, message)]
        return []


class StepCountCheck(Check):
    """Checks that a learner step consumed and replayed as many trajectories as it says, also after a rollback."""

    event_types = (Stepped, Consumed, Replayed, Undone, RolledBack)

    def __init__(self) -> None:
        self._consumed: Counter[int] = Counter()
        self._replayed: Counter[int] = Counter()
        self._stated: dict[int, int] = {}

    def check_event(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Count a step's trajectories."""
        match event:
            case Stepped():
                self._stated[event.step] = event.num_trajectories
            case Consumed() if row is not None and row.kind is Kind.TRAIN:
                self._consumed[event.step] += 1
            case Replayed():
                self._replayed[event.step] += 1
            case Undone():
                self._consumed[event.step] -= 1
            case RolledBack():
                self._stated = {step: count for step, count in self._stated.items() if step <= event.step}
                for step in [step for step in self._replayed if step > event.step]:
                    del self._replayed[step]
        return []

    def end(self) -> list[Violation]:
        """Return the steps whose counts differ."""
        violations = []
        for step in sorted(self._stated.keys() | self._consumed.keys() | self._replayed.keys()):
            stated, consumed, again = self._stated.get(step, 0), self._consumed[step], self._replayed[step]
            if stated != consumed + again:
                replayed = f" and replayed {again}" if again else ""
                message = f"says it used {stated} trajectories, but it consumed {consumed}{replayed}"
                violations.append(Violation(Rule.CONSUMPTION, f"step {step}", message))
        return violations


class FiguresCheck(Check):
    """Checks figures of evaluations against their answers, without intervals, which use random draws."""

    event_types = (Scored, Dropped, Evaluated)

    def __init__(self) -> None:
        self._answers: dict[str, list[EvalAnswer]] = {}  # by pass without figures yet

    def check_event(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Collect an answer, or compare figures with the answers."""
        if isinstance(event, Evaluated):
            told, answers = event.figures, self._answers.pop(event.pass_id, [])
            computed = set_figures(answers, samples=told.samples, verdicts=told.verdicts)
            if computed is None or computed.exact != event.figures.exact:
                expected = "none" if computed is None else computed.describe()
                message = f"says {event.figures.describe()}, but its answers give {expected}"
                return [Violation(Rule.ROWS, f"evaluation {event.pass_id}", message)]
        elif row is not None and row.kind is Kind.EVAL:
            answers = self._answers.setdefault(row.group_id, [])
            if isinstance(event, Scored):
                answers.append(answer_of(row, event))
            elif isinstance(event, Dropped) and event.reason in UNSCORED:
                answers.append(answer_of(row, None))
        return []
