"""Evaluations: passes over held-out problems, each under one version. `control.scheduler` owns `Evaluations`.

Evaluation trajectories run on the same replicas as training, but belong to a pass instead of a group, and no
learner step consumes them. `records.evaluations` makes their ids. A resumed run that requests a pass again gets
the same ids and seeds, so it keeps the known answers and continues the live trajectories.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from laminar_py.control.state import ControlState
from laminar_py.control.views import ReplicaView
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.evaluations import EvalAnswer, answer_id, pass_id, problem_of
from laminar_py.records.events import Ready
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import sampled_versions
from laminar_py.records.trajectory import FinishReason, Kind, Prompt, Status

NO_STEP = -1  # `step` in the `Consumed` events of evaluation trajectories


class EvaluationLostError(Exception):
    """A pass cannot end under one version: a member is lost, or the answers have several versions."""


class PassCount(NamedTuple):
    """Answers of an open pass so far, e.g. `PassCount("e4-aime", 37, 240)`."""

    pass_id: str
    answers: int
    members: int


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One pass, e.g. "e4-aime": its problems, its version once known, and its answers so far."""

    id: str
    prompts: list[Prompt]  # one for each problem
    samples: int  # of each problem
    version: int | None  # None until the first token of a pass that takes the version of its `replica`
    replica: int | None = None  # chosen for a pass that was requested without a version
    holders: set[int] = field(default_factory=set)  # replicas that got members
    started: bool = False
    lost: bool = False  # the version or the stored tokens of a member are lost
    versions: set[int] = field(default_factory=set)  # under which the answers were sampled
    pending: set[str] = field(default_factory=set)  # ids of the live members, which are trajectories of the pass
    answers: dict[str, EvalAnswer] = field(default_factory=dict)  # by member id
    done: "asyncio.Future[Evaluation]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def num_members(self) -> int:
        """Number of members, answered or not."""
        return len(self.prompts) * self.samples

    def finish(self) -> None:
        """Complete `done` with this pass; if the pass is lost or mixes versions, with `EvaluationLostError`."""
        if self.done.done():
            return
        if self.lost or len(self.versions) > 1:
            answered = f"answers under versions {sorted(self.versions)}"
            self.done.set_exception(EvaluationLostError(f"pass {self.id} (version {self.version}, {answered})"))
        else:
            self.version = min(self.versions, default=self.version)
            self.done.set_result(self)


class Evaluations:
    """The open passes, from their request until no member is pending; `next_index` is the next pass's number."""

    def __init__(self, state: ControlState) -> None:
        self.next_index = 0
        self._state = state
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
        """Open a pass with `samples` members per prompt; the future has the pass once all members have answers.

        It runs under `version`, or for None under the newest version that a replica serves. A resumed run gives
        its earlier `index` and the known `answers`. The future raises `EvaluationLostError` if a member is lost.
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
        """Issue the members of each pass that can begin, and return them, QUEUED.

        A pass without a version first needs a replica that serves, and another if that replica leaves too early.
        Passes that begin together get different replicas if there are enough. Before RL, also
        in a resumed run, no newer version comes, so such a pass takes the newest version and uses all replicas.
        """
        if self._state.phase.gives_nothing:
            return []
        started: list[LiveTrajectory] = []
        chosen: list[int | None] = []
        for evaluation in list(self._by_id.values()):
            if evaluation.version is None and not self._has_replica(evaluation):
                replica = self._newest_replica(chosen)
                if evaluation.replica is None and replica is not None and self._stays_newest(replica.version):
                    evaluation.version = replica.version  # no replica leaves it, so each can take members
                else:
                    evaluation.replica = None if replica is None else replica.index
                    chosen.append(evaluation.replica)
            if not evaluation.started and (evaluation.version is not None or evaluation.replica is not None):
                evaluation.started = True
                started += self._issue_missing(evaluation)
                self._finish_if_done(evaluation)
        return started

    @property
    def counts(self) -> list[PassCount]:
        """The answers of each open pass so far."""
        return [
            PassCount(evaluation.id, len(evaluation.answers), evaluation.num_members)
            for evaluation in self._by_id.values()
        ]

    def restore_member(self, trajectory: LiveTrajectory) -> bool:
        """Count a crashed controller's live trajectory as pending in its pass; return False without that pass."""
        evaluation = self._by_id.get(trajectory.group_id)
        if evaluation is None:
            return False
        evaluation.pending.add(trajectory.id)
        return True

    def pass_of(self, member: LiveTrajectory | Assignment) -> Evaluation:
        """Return the open pass that a trajectory or an assignment belongs to."""
        return self._by_id[member.group_id]

    def record_answer(self, trajectory: LiveTrajectory) -> None:
        """Record a dropped or scored member, and consume a scored one; the last member completes the pass."""
        evaluation = self.pass_of(trajectory)
        evaluation.pending.discard(trajectory.id)
        evaluation.answers[trajectory.id] = EvalAnswer(
            problem=problem_of(trajectory.id),
            sample=trajectory.sample_index,
            reward=trajectory.reward,
            terms=trajectory.term_values,
            answer=trajectory.answer,
            length=trajectory.length,
            truncated=trajectory.finish_reason is FinishReason.LENGTH,
        )
        if trajectory.status is Status.SCORED:
            self._state.record(Ready(trajectory.id, 0.0))
            versions = sampled_versions(trajectory.token_spans)
            version = versions[-1]
            evaluation.versions |= set(versions)
            self._state.record(trajectory.consumed(step=NO_STEP, version=version, staleness=0, weight=0.0))
        self._finish_if_done(evaluation)

    def _stays_newest(self, version: int) -> bool:
        """Whether a version is the newest, and no step will publish another during a pass."""
        return self._state.before_rl and version == self._state.newest_version

    def _newest_replica(self, chosen: Collection[int | None]) -> ReplicaView | None:
        """Return the replica with the newest version, preferably not `chosen`; None if no replica serves."""
        views = self._state.views.by_index.values()
        serving = [view for view in views if view.has_place and view.version >= 0 and not view.leaving]
        serving.sort(key=lambda view: (-view.version, view.index in chosen, len(view.in_flight)))
        return serving[0] if serving else None

    def _has_replica(self, evaluation: Evaluation) -> bool:
        """Whether a pass's replica is up or will restart; a leaving replica counts while it runs members."""
        if evaluation.replica is None:
            return False
        view = self._state.views.by_index[evaluation.replica]
        return view.has_place and not (view.leaving and view.in_flight.isdisjoint(evaluation.pending))

    def _issue_missing(self, evaluation: Evaluation) -> list[LiveTrajectory]:
        """Store the prompts of the members that are neither answered nor live; issue and return these members."""
        issued = []
        for problem, prompt in enumerate(evaluation.prompts):
            for sample in range(evaluation.samples):
                id = answer_id(evaluation.id, problem, sample, samples=evaluation.samples)
                if id not in evaluation.answers and id not in evaluation.pending:
                    self._state.recorder.store_prompt(prompt)
                    issued.append(self._state.issue(id, evaluation.id, sample, prompt, Kind.EVAL))
        evaluation.pending |= {trajectory.id for trajectory in issued}
        return issued

    def _finish_if_done(self, evaluation: Evaluation) -> None:
        """Close a pass and complete its future if it has started and no member is pending."""
        if evaluation.started and not evaluation.pending:
            del self._by_id[evaluation.id]
            evaluation.finish()
