"""Checks that follow the event log, one rule or two each. Driven by `audit.verify`; each remembers little.

`see` gets every event of the kinds in `sees`, in order, with the row of its trajectory as it was before; `end`
says what is still open.
"""

import sqlite3
from collections import Counter
from pathlib import Path
from typing import ClassVar, Protocol

from laminar_py.ledger.audit.violations import Rule, Violation
from laminar_py.ledger.evaluations import UNSCORED, answer_of
from laminar_py.ledger.rows import TrajectoryRow
from laminar_py.records.ages import WeightAges
from laminar_py.records.evaluations import EvalAnswer, set_figures
from laminar_py.records.events import (
    AnyEvent,
    Archived,
    Consumed,
    Dropped,
    Evaluated,
    Event,
    Finished,
    PartStarted,
    Relayed,
    RolledBack,
    RunEnded,
    RunStarted,
    Scored,
    Stepped,
    TokensLost,
    Undone,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.spans import versions_of
from laminar_py.records.trajectory import Kind


class Check(Protocol):
    """A check along the log, with nothing left open at its end unless it says so."""

    sees: ClassVar[tuple[type[Event], ...]]

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Violations by this event."""
        ...

    def end(self) -> list[Violation]:
        """Violations by the log as a whole."""
        return []


class StalenessCheck(Check):
    """Staleness is that of `records.ages`, of the oldest version in the trajectory, and within the run's bound.

    A version may be put on record after the first trajectory that has it was consumed.
    """

    sees = (RunStarted, Consumed, Stepped, RolledBack, VersionPublished)

    def __init__(self) -> None:
        self._bound: int | None = None
        self._ages = WeightAges()
        self._early: dict[int, list[Consumed]] = {}  # by a version that is not on record yet

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Look at consumption by the learner."""
        if isinstance(event, RunStarted):
            self._bound = event.max_staleness
        self._ages.record_event(event)
        if isinstance(event, VersionPublished):
            early = self._early.pop(event.version, [])
            return [violation for consumed in early for violation in self._judge(consumed, event.version)]
        if not isinstance(event, Consumed) or row is None or row.oldest_version is None or row.kind is Kind.EVAL:
            return []
        if not self._ages.knows_version(row.oldest_version):
            self._early.setdefault(row.oldest_version, []).append(event)
            return []
        return self._judge(event, row.oldest_version)

    def _judge(self, event: Consumed, oldest: int) -> list[Violation]:
        found = []
        actual = self._ages.age_of(oldest, after=event.step - 1)
        if event.staleness != actual:
            found.append(f"recorded {event.staleness}, but version {oldest} was {actual} learner steps behind")
        if self._bound is not None and actual > self._bound and event.weight >= 1:
            found.append(f"{actual} exceeds the bound of {self._bound} and its weight is {event.weight:g}")
        return [Violation(Rule.STALENESS, event.trajectory_id, message) for message in found]


class DrainCheck(Check):
    """A finished trajectory has one version, where the run promises drain."""

    sees = (RunStarted, Finished)

    def __init__(self) -> None:
        self._promised = False

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Look at finished trajectories."""
        if isinstance(event, RunStarted):
            self._promised = event.drain
        if not isinstance(event, Finished) or not self._promised:
            return []
        versions = sorted(versions_of(event.spans))
        if len(versions) <= 1:
            return []
        return [Violation(Rule.DRAIN, event.trajectory_id, f"has tokens of the versions {versions}")]


class WeightsCheck(Check):
    """Versions are published once, loaded and used as published, and never go back on a replica.

    A replica may report a version before the learner's own answer is in, so what is not known as published yet
    waits; a run that goes on, or was killed, may leave the version above the highest published one waiting.
    """

    sees = (
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
        self._loaded: dict[str, int] = {}  # by part, since it started
        self._waiting: dict[int, list[Violation]] = {}  # by version, should it never be published
        self._early: dict[int, set[str]] = {}  # by version: digests that were loaded before it was published
        self._open = False  # no end of the run is on record

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Look at publications, loads, and the versions of responses."""
        match event:
            case PartStarted():
                # a revived replica may first load an old version, to go on with what was drained under it
                self._loaded.pop(event.part, None)
            case VersionPublished():
                return self._published(event)
            case VersionLoaded():
                return self._load(event)
            case Relayed():
                return self._compare(event.node, "holds", event.version, event.digest)
            case Finished():
                # one by one: the difference of a set and a dictionary's keys looks at all the keys
                for version in (one for one in versions_of(event.spans) if one not in self._digests):
                    message = f"has tokens of version {version}, which was never published"
                    self._wait(version, Violation(Rule.VERSIONS, event.trajectory_id, message))
            case RunStarted() | RunEnded():
                self._open = isinstance(event, RunStarted)
        return []

    def end(self) -> list[Violation]:
        """Uses of versions that were never published."""
        next_version = max(self._digests, default=-1) + 1
        under_way = {next_version} if self._open else set()
        return [f for version, found in self._waiting.items() if version not in under_way for f in found]

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

    def _load(self, event: VersionLoaded) -> list[Violation]:
        part = f"replica-{event.replica}"
        found = self._compare(part, "loaded", event.version, event.digest)
        before = self._loaded.get(part)
        if before is not None and event.version < before:
            found.append(Violation(Rule.VERSIONS, part, f"went back from version {before} to {event.version}"))
        self._loaded[part] = event.version
        return found

    def _compare(self, part: str, did: str, version: int, digest: str) -> list[Violation]:
        """Compare the digest that a part has of a version with the learner's."""
        published = self._digests.get(version)
        if published is None:
            message = f"{did} version {version}, which was never published"
            self._wait(version, Violation(Rule.WEIGHTS, part, message))
            self._early.setdefault(version, set()).add(digest)
        elif published != digest:
            message = f"{did} version {version} as {digest}, published was {published}"
            return [Violation(Rule.WEIGHTS, part, message)]
        return []


class ChecksumCheck(Check):
    """Replicas that verified a version in one layout hold the same tensors."""

    sees = (VersionLoaded,)

    def __init__(self) -> None:
        self._verified: dict[tuple[int, int], VersionLoaded] = {}  # by version and GPUs: who verified it first

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Look at loads that were verified."""
        if not isinstance(event, VersionLoaded) or event.checksum is None:
            return []
        first = self._verified.setdefault((event.version, event.checksum.count("-")), event)
        if first.checksum == event.checksum:
            return []
        held = f"is {first.checksum} in replica-{first.replica} and {event.checksum} in replica-{event.replica}"
        return [Violation(Rule.WEIGHTS, f"version {event.version}", held)]


class StepCheck(Check):
    """A learner step consumed as many trajectories as it says; after a rollback the step counts anew."""

    sees = (Stepped, Consumed, Undone, RolledBack)

    def __init__(self) -> None:
        self._consumed: Counter[int] = Counter()
        self._said: dict[int, int] = {}

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Count."""
        match event:
            case Stepped():
                self._said[event.step] = event.num_trajectories
            case Consumed() if row is not None and row.kind is Kind.TRAIN:
                self._consumed[event.step] += 1
            case Undone():
                self._consumed[event.step] -= 1
            case RolledBack():
                self._said = {step: count for step, count in self._said.items() if step <= event.step}
        return []

    def end(self) -> list[Violation]:
        """Steps whose counts differ."""
        found = []
        for step in sorted(self._said.keys() | self._consumed.keys()):
            said, consumed = self._said.get(step, 0), self._consumed[step]
            if said != consumed:
                message = f"says it used {said} trajectories, {consumed} were consumed by it"
                found.append(Violation(Rule.CONSUMPTION, f"step {step}", message))
        return found


class FiguresCheck(Check):
    """Figures of an evaluation are those of its answers; intervals, which draw numbers, are left out."""

    sees = (Scored, Dropped, Evaluated)

    def __init__(self) -> None:
        self._answers: dict[str, list[EvalAnswer]] = {}  # of passes without figures yet

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Keep answers, and compare."""
        if isinstance(event, Evaluated):
            found = set_figures(self._answers.pop(event.pass_id, []), samples=event.figures.samples)
            if found is None or found.exact != event.figures.exact:
                told = "none" if found is None else found.describe()
                message = f"says {event.figures.describe()}; by its answers that is {told}"
                return [Violation(Rule.ROWS, f"evaluation {event.pass_id}", message)]
        elif row is not None and row.kind is Kind.EVAL:
            answers = self._answers.setdefault(row.group_id, [])
            if isinstance(event, Scored):
                answers.append(answer_of(row, reward=event.reward, said=event.said))
            elif isinstance(event, Dropped) and event.reason in UNSCORED:
                answers.append(answer_of(row, reward=None, said=""))
        return []


class ArchiveCheck(Check):
    """Files of the archive that are on record are there; their bytes are compared elsewhere."""

    sees = (Archived,)

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Look for the file."""
        if not isinstance(event, Archived) or (self._folder / event.path).is_file():
            return []
        return [Violation(Rule.ARCHIVE, event.path, f"is missing, with {event.num_trajectories} trajectories")]


class LossCheck(Check):
    """Whatever counts as lost is on record as such."""

    sees = (TokensLost,)

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._untold: list[str] = []

    def see(self, event: AnyEvent, row: TrajectoryRow | None) -> list[Violation]:
        """Note what was lost."""
        if isinstance(event, TokensLost):
            self._told.update(event.trajectory_ids)
        return []

    def compare(self, connection: sqlite3.Connection) -> None:
        """Look at what counts as lost, once all events were seen."""
        query = "SELECT DISTINCT id FROM piece JOIN trajectory ON number = trajectory WHERE segment = ''"
        self._untold = [id for (id,) in connection.execute(query) if id not in self._told]

    def end(self) -> list[Violation]:
        """Violations by what no event speaks of."""
        return [Violation(Rule.ROWS, id, "its tokens count as lost, and no event says so") for id in self._untold]
