"""Greedy passes over held-out prompts, each under one version. Owned by `control.scheduler`.

Evaluations travel like training trajectories, as a kind of their own: they are accounted for apart, have no group
and end as consumed by no step.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from laminar_py.control.book import Book
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.control.views import ReplicaView
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Status

NO_STEP = -1


class EvaluationLostError(Exception):
    """The version under evaluation is on no relay any more."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Prompts of one pass, the version once known, and the rewards so far."""

    id: str
    prompts: list[Prompt]
    version: int | None
    replica: int | None = None  # runs all of it, where the version was left to it
    started: bool = False
    lost: bool = False  # a member's version was lost
    versions: set[int] = field(default_factory=set)  # of its answers
    pending: set[str] = field(default_factory=set)
    rewards: list[float] = field(default_factory=list)
    done: "asyncio.Future[Evaluation]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def accuracy(self) -> float | None:
        """Mean reward over the answers that were scored, None if there is none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None

    @property
    def num_unscored(self) -> int:
        """Prompts whose answer has no reward."""
        return len(self.prompts) - len(self.rewards)

    def finish(self) -> None:
        """Give the waiter its result, if it still waits."""
        if self.done.done():
            return
        if self.lost or len(self.versions) > 1:
            self.done.set_exception(EvaluationLostError(f"version {self.version}, answers of {self.versions}"))
        else:
            self.version = min(self.versions, default=self.version)
            self.done.set_result(self)


class Evaluations:
    """Evaluations under way; `next_index` numbers them."""

    def __init__(self, book: Book) -> None:
        self.next_index = 0
        self._book = book
        self._by_id: dict[str, Evaluation] = {}

    def request(self, prompts: Sequence[Prompt], version: int | None = None) -> "asyncio.Future[Evaluation]":
        """Answer `prompts` greedily under `version`; None takes what the first idle replica serves.

        The future's result has the rewards; it fails with `EvaluationLostError` if the version is lost.
        """
        evaluation = Evaluation(id=f"e{self.next_index}", prompts=list(prompts), version=version)
        self.next_index += 1
        self._by_id[evaluation.id] = evaluation
        return evaluation.done

    def start(self, idle: Sequence[ReplicaView]) -> list[Lifecycle]:
        """New trajectories of evaluations that begin now: their version is known, or a replica is idle."""
        started: list[Lifecycle] = []
        for evaluation in self._by_id.values():
            if evaluation.version is None and idle and not self._has_replica(evaluation):
                evaluation.replica = idle[0].index
            if not evaluation.started and (evaluation.version is not None or evaluation.replica is not None):
                evaluation.started = True
                started += [self._issue(evaluation, index) for index in range(len(evaluation.prompts))]
        return started

    def version_of(self, lifecycle: Lifecycle) -> int | None:
        """The only version a member may run under, if that is settled."""
        return self._by_id[lifecycle.group_id].version

    def replica_of(self, lifecycle: Lifecycle) -> int | None:
        """The replica that runs the whole evaluation, under whatever version it serves then."""
        return self._by_id[lifecycle.group_id].replica

    def settle(self, lifecycle: Lifecycle) -> None:
        """Take in that a member is scored or dropped; the last one completes the evaluation."""
        evaluation = self._by_id[lifecycle.group_id]
        evaluation.pending.discard(lifecycle.id)
        if lifecycle.status is Status.SCORED:
            evaluation.rewards.append(lifecycle.reward or 0.0)
            self._book.record(lifecycle.make_ready(0.0))
            version = lifecycle.spans[-1].version
            evaluation.versions |= {span.version for span in lifecycle.spans}
            self._book.record(lifecycle.consume(step=NO_STEP, version=version, staleness=0, weight=0.0))
            del self._book.live[lifecycle.id]
        if not evaluation.pending:
            del self._by_id[evaluation.id]
            evaluation.finish()

    def runs_under(self, lifecycle: Lifecycle, version: int) -> None:
        """Settle the version of an evaluation that was left to a replica, by its first tokens."""
        evaluation = self._by_id[lifecycle.group_id]
        if evaluation.version is None:
            evaluation.version = version

    def lose(self, lifecycle: Lifecycle) -> None:
        """Fail an evaluation of which a member's version is lost."""
        self._by_id[lifecycle.group_id].lost = True

    def abandon(self, lifecycle: Lifecycle) -> None:
        """Drop a member that an earlier incarnation left behind."""
        self._book.live[lifecycle.id] = lifecycle
        self._book.drop([lifecycle], DropReason.RUN_ENDED)

    def _has_replica(self, evaluation: Evaluation) -> bool:
        """True where its replica runs, or comes back."""
        return evaluation.replica is not None and self._book.views.by_index[evaluation.replica].has_place

    def _issue(self, evaluation: Evaluation, index: int) -> Lifecycle:
        prompt = evaluation.prompts[index]
        self._book.recorder.store_prompt(prompt)
        lifecycle = self._book.issue(f"{evaluation.id}.{index}", evaluation.id, 0, prompt, Kind.EVAL)
        evaluation.pending.add(lifecycle.id)
        return lifecycle
