"""Passes over held-out problems, each under one version. Owned by `control.scheduler`.

Evaluations travel like training trajectories, as a kind of their own: they are accounted for apart, have no group
and end as consumed by no step. Ids are those of `records.evaluations`, so a pass that is asked for again after a
crash has the same trajectories, which draw the same tokens: what is answered stays, and what has begun goes on.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from laminar_py.control.book import Book
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.evaluations import EvalAnswer, answer_id, pass_id, set_of
from laminar_py.records.events import Ready
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import sampled_versions
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Prompt, Status

NO_STEP = -1


class EvaluationLostError(Exception):
    """The version under evaluation is on no relay any more."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """Problems of one pass, the version once known, and the answers so far, e.g. pass "e4-aime"."""

    id: str
    prompts: list[Prompt]
    samples: int  # of each
    version: int | None
    replica: int | None = None  # begins it, where the version was left to that
    holders: set[int] = field(default_factory=set)  # replicas that were given members
    started: bool = False
    lost: bool = False  # a member's version was lost
    versions: set[int] = field(default_factory=set)  # of its answers
    pending: set[str] = field(default_factory=set)
    answers: dict[str, EvalAnswer] = field(default_factory=dict)  # by trajectory
    done: "asyncio.Future[Evaluation]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def members(self) -> list[tuple[str, int, int]]:
        """Id, problem and sample of each trajectory, answered or not."""
        return [
            (answer_id(self.id, problem, sample, samples=self.samples), problem, sample)
            for problem in range(len(self.prompts))
            for sample in range(self.samples)
        ]

    @property
    def num_members(self) -> int:
        """Trajectories in all."""
        return len(self.prompts) * self.samples

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

    def request(
        self,
        prompts: Sequence[Prompt],
        version: int | None = None,
        *,
        index: int | None = None,
        set_name: str = "",
        samples: int = 1,
        answers: Mapping[str, EvalAnswer] | None = None,
    ) -> "asyncio.Future[Evaluation]":
        """Answer `prompts` under `version`; None takes the newest that a replica serves when it begins.

        A pass that was asked for before has its `index` again, a new one the next. The future's result has the
        answers, among them those that are known; it fails with `EvaluationLostError` if the version is lost.
        """
        number = self.next_index if index is None else index
        evaluation = Evaluation(
            id=pass_id(number, set_name),
            prompts=list(prompts),
            samples=samples,
            version=version,
            answers=dict(answers or {}),
        )
        self.next_index = max(self.next_index, number + 1)
        self._by_id[evaluation.id] = evaluation
        return evaluation.done

    def start(self) -> list[LiveTrajectory]:
        """New trajectories of evaluations that begin now: their version is known, or a replica runs.

        Passes that begin at once do so on different replicas, those with the newest weights and the least work.
        """
        if self._book.phase.gives_nothing:
            return []
        started: list[LiveTrajectory] = []
        chosen: list[int | None] = []
        for evaluation in list(self._by_id.values()):
            if evaluation.version is None and not self._has_replica(evaluation):
                evaluation.replica = self._newest_replica(chosen)
                chosen.append(evaluation.replica)
            if not evaluation.started and (evaluation.version is not None or evaluation.replica is not None):
                evaluation.started = True
                started += self._issue_missing(evaluation)
                self._finish_if_done(evaluation)
        return started

    @property
    def progress(self) -> str:
        """Words on what is under way, e.g. "aime: 128 of 960 answers"."""
        return ", ".join(
            f"{set_of(one.id)}: {len(one.answers)} of {one.num_members} answers" for one in self._by_id.values()
        )

    def take_up(self, trajectory: LiveTrajectory) -> bool:
        """Go on with a member that a dead controller left; False if its pass was not asked for again."""
        evaluation = self._by_id.get(trajectory.group_id)
        if evaluation is None:
            return False
        evaluation.pending.add(trajectory.id)
        return True

    def version_of(self, trajectory: LiveTrajectory) -> int | None:
        """The only version a member may run under, if that is settled."""
        return self._by_id[trajectory.group_id].version

    def pass_of(self, member: LiveTrajectory | Assignment) -> Evaluation:
        """The pass of a member."""
        return self._by_id[member.group_id]

    def settle(self, trajectory: LiveTrajectory) -> None:
        """Take in that a member is scored or dropped; the last one completes the evaluation."""
        evaluation = self._by_id[trajectory.group_id]
        evaluation.pending.discard(trajectory.id)
        evaluation.answers[trajectory.id] = EvalAnswer.of(
            trajectory.id,
            sample=trajectory.sample_index,
            reward=trajectory.reward,
            said=trajectory.said,
            length=trajectory.length,
            truncated=trajectory.finish_reason is FinishReason.LENGTH,
        )
        if trajectory.status is Status.SCORED:
            self._book.record(Ready(trajectory.id, 0.0))
            versions = sampled_versions(trajectory.token_spans)
            version = versions[-1]
            evaluation.versions |= set(versions)
            self._book.record(trajectory.consumed(step=NO_STEP, version=version, staleness=0, weight=0.0))
        self._finish_if_done(evaluation)

    def runs_under(self, trajectory: LiveTrajectory, version: int) -> None:
        """Settle the version of an evaluation that was left to a replica, by its first tokens."""
        evaluation = self._by_id[trajectory.group_id]
        if evaluation.version is None:
            evaluation.version = version

    def lose(self, trajectory: LiveTrajectory) -> None:
        """Fail an evaluation of which a member's version is lost."""
        self._by_id[trajectory.group_id].lost = True

    def give_up(self, trajectory: LiveTrajectory) -> None:
        """Fail an evaluation at once, of which a member waits for its version to return."""
        evaluation = self._by_id[trajectory.group_id]
        evaluation.lost = True
        evaluation.finish()

    def abandon(self, trajectory: LiveTrajectory) -> None:
        """Drop a member that an earlier incarnation left behind."""
        self._book.drop([trajectory], DropReason.RUN_ENDED)

    def _newest_replica(self, chosen: Collection[int | None]) -> int | None:
        """The replica for a pass whose version is open; None where none runs."""
        there = self._book.views.by_index.values()
        views = [view for view in there if view.has_place and view.version >= 0 and not view.leaving]
        best = min(
            views, key=lambda view: (-view.version, view.index in chosen, len(view.in_flight)), default=None
        )
        return None if best is None else best.index

    def _has_replica(self, evaluation: Evaluation) -> bool:
        """True where its replica runs, or comes back; one that leaves ends what it has of it."""
        if evaluation.replica is None:
            return False
        view = self._book.views.by_index[evaluation.replica]
        return view.has_place and not (view.leaving and view.in_flight.isdisjoint(evaluation.pending))

    def _issue_missing(self, evaluation: Evaluation) -> list[LiveTrajectory]:
        """New trajectories of a pass, but for those that are answered or under way."""
        issued = []
        for id, problem, sample in evaluation.members:
            if id not in evaluation.answers and id not in evaluation.pending:
                prompt = evaluation.prompts[problem]
                self._book.recorder.store_prompt(prompt)
                issued.append(self._book.issue(id, evaluation.id, sample, prompt, Kind.EVAL))
        evaluation.pending |= {trajectory.id for trajectory in issued}
        return issued

    def _finish_if_done(self, evaluation: Evaluation) -> None:
        if evaluation.started and not evaluation.pending:
            del self._by_id[evaluation.id]
            evaluation.finish()
