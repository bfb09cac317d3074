"""Evaluations: passes over held-out problems, each under one version. `control.scheduler` owns `Evaluations`.

Evaluation trajectories run on the same replicas as training, but have a kind of their own: they are counted apart,
have no group, and are consumed by no step. `records.evaluations` makes their ids. A pass that a resumed run
requests again has the same ids and seeds, so its answers stay and its begun trajectories continue.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from laminar_py.control.state import ControlState
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.evaluations import EvalAnswer, answer_id, pass_id, problem_of, set_of
from laminar_py.records.events import Ready
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import sampled_versions
from laminar_py.records.trajectory import FinishReason, Kind, Prompt, Status

NO_STEP = -1


class EvaluationLostError(Exception):
    """No relay has the version under evaluation any more."""


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One pass, e.g. "e4-aime": its problems, its version once known, and its answers so far."""

    id: str
    prompts: list[Prompt]
    samples: int  # of each problem
    version: int | None
    replica: int | None = None  # whose version the pass takes, if none was requested
    holders: set[int] = field(default_factory=set)  # replicas that got members
    started: bool = False
    lost: bool = False  # no replica can continue a member
    versions: set[int] = field(default_factory=set)  # of the answers
    pending: set[str] = field(default_factory=set)
    answers: dict[str, EvalAnswer] = field(default_factory=dict)  # by trajectory
    done: "asyncio.Future[Evaluation]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def members(self) -> list[tuple[str, int, int]]:
        """(id, problem, sample) of each trajectory, answered or not."""
        return [
            (answer_id(self.id, problem, sample, samples=self.samples), problem, sample)
            for problem in range(len(self.prompts))
            for sample in range(self.samples)
        ]

    @property
    def num_members(self) -> int:
        """Number of trajectories, answered or not."""
        return len(self.prompts) * self.samples

    def finish(self) -> None:
        """Set the result of `done`, or `EvaluationLostError` if answers are missing or have several versions."""
        if self.done.done():
            return
        if self.lost or len(self.versions) > 1:
            self.done.set_exception(EvaluationLostError(f"version {self.version}, answers of {self.versions}"))
        else:
            self.version = min(self.versions, default=self.version)
            self.done.set_result(self)


class Evaluations:
    """The open passes; `next_index` numbers the next."""

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
        """Open a pass over `prompts` under `version`; None takes the newest version that a replica serves.

        A resumed run gives a pass its earlier `index` and its known `answers`. The future returns the pass with
        all answers, or raises `EvaluationLostError` if its version is lost.
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
        """Issue the trajectories of each pass that can begin: its version is known, or a replica serves one.

        Passes that begin together choose different replicas: those with the newest weights and the least work.
        """
        if self._state.phase.gives_nothing:
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
        """Open passes as text, e.g. "aime: 128 of 960 answers"."""
        return ", ".join(
            f"{set_of(evaluation.id)}: {len(evaluation.answers)} of {evaluation.num_members} answers"
            for evaluation in self._by_id.values()
        )

    def restore_member(self, trajectory: LiveTrajectory) -> bool:
        """Continue a member of a crashed controller's pass; return False if no such pass was requested again."""
        evaluation = self._by_id.get(trajectory.group_id)
        if evaluation is None:
            return False
        evaluation.pending.add(trajectory.id)
        return True

    def pass_of(self, member: LiveTrajectory | Assignment) -> Evaluation:
        """Return the pass of a member."""
        return self._by_id[member.group_id]

    def record_answer(self, trajectory: LiveTrajectory) -> None:
        """Record the answer of a scored or dropped member; the last member completes the pass."""
        evaluation = self.pass_of(trajectory)
        evaluation.pending.discard(trajectory.id)
        evaluation.answers[trajectory.id] = EvalAnswer(
            problem=problem_of(trajectory.id),
            sample=trajectory.sample_index,
            reward=trajectory.reward,
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

    def _newest_replica(self, chosen: Collection[int | None]) -> int | None:
        """Return the replica whose version a new pass takes, None if no replica serves."""
        there = self._state.views.by_index.values()
        views = [view for view in there if view.has_place and view.version >= 0 and not view.leaving]
        best = min(
            views, key=lambda view: (-view.version, view.index in chosen, len(view.in_flight)), default=None
        )
        return None if best is None else best.index

    def _has_replica(self, evaluation: Evaluation) -> bool:
        """Whether the pass's replica is up or will restart; a leaving replica counts while it has members."""
        if evaluation.replica is None:
            return False
        view = self._state.views.by_index[evaluation.replica]
        return view.has_place and not (view.leaving and view.in_flight.isdisjoint(evaluation.pending))

    def _issue_missing(self, evaluation: Evaluation) -> list[LiveTrajectory]:
        """Issue the trajectories of a pass that are neither answered nor live."""
        issued = []
        for id, problem, sample in evaluation.members:
            if id not in evaluation.answers and id not in evaluation.pending:
                prompt = evaluation.prompts[problem]
                self._state.recorder.store_prompt(prompt)
                issued.append(self._state.issue(id, evaluation.id, sample, prompt, Kind.EVAL))
        evaluation.pending |= {trajectory.id for trajectory in issued}
        return issued

    def _finish_if_done(self, evaluation: Evaluation) -> None:
        if evaluation.started and not evaluation.pending:
            del self._by_id[evaluation.id]
            evaluation.finish()
