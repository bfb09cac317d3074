"""A live trajectory: its row in the ledger, with references to its tokens and figures for the control plane.

A run has one `LiveTrajectory` per live trajectory. The control plane reads it and makes events from it; only
`ledger.machine` changes its status, by applying events (law 1). The ledger writes its columns, and recovery builds
it from the record.
"""

import sqlite3
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from laminar_py.ledger.rows import TrajectoryRow, trajectory_rows
from laminar_py.records.codec import response_digest
from laminar_py.records.columns import Column
from laminar_py.records.credit import Earned, Returns, RoleCredit, returns_of
from laminar_py.records.engine import SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.events import (
    Assigned,
    Consumed,
    Dropped,
    Finished,
    Interrupted,
    Issued,
    Scored,
    StreamLost,
)
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.replica import Assignment, Progress
from laminar_py.records.scoring import Score
from laminar_py.records.spans import Span, context_tokens, num_sampled
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Status, TrajectoryRef

NO_PROMPT = Prompt(id="", index=-1, text="", ids=np.empty(0, np.int32))
"""The prompt of a replayed trajectory; a replay knows prompts only by id."""


class LiveTrajectory(TrajectoryRow, kw_only=True, eq=False, gc=True, weakref=True):
    """A trajectory from issue to consumption, e.g. 41 tokens of "g3.1", RUNNING on replica 2 under version 7."""

    prompt: Prompt = NO_PROMPT
    tokens: tuple[TokensRef, ...] = ()  # references to the response's tokens, end to end
    token_spans: tuple[Span, ...] = ()  # cover [0, length); `spans` of the row is their JSON once final
    columns: dict[str, ColumnRef] = msgspec.field(default_factory=dict)  # a frozen model's are in memory only
    earned: Earned | None = None  # rewards of its tokens, if the reward gives any
    roles: tuple[RoleCredit, ...] = ()  # rewards of its roles, if the environment gives any
    answer: str = ""  # its final answer, as the reward reads it
    term_values: dict[str, float] = msgspec.field(default_factory=dict)  # by term; of evaluations only
    used_s: float = 0.0  # seconds of generation on earlier replicas
    here_s: float = 0.0  # seconds of generation on this replica, by its last report
    environment_s: float = 0.0  # seconds until its environment answered, with waits and transport

    @property
    def trains(self) -> bool:
        """Whether the trajectory is for training, not for an evaluation."""
        return self.kind is Kind.TRAIN

    @property
    def runs_on(self) -> int | None:
        """The replica that runs the trajectory, None if none does; `replica` is the last replica that ran it."""
        return self.replica if self.status is Status.RUNNING else None

    @property
    def last_version(self) -> int | None:
        """The version of the last sampled token, None without a sampled token."""
        for span in reversed(self.token_spans):
            if span.version is not None:
                return span.version
        return None

    @property
    def oldest_for_age(self) -> int:
        """The lowest version of its tokens, whose age is its staleness. Needs a sampled token."""
        assert self.oldest_version is not None, f"{self.id} has no token that an engine sampled"
        return self.oldest_version

    @property
    def prefill(self) -> int:
        """Tokens that the next replica must prefill; 0 without a response, since the group shares the prompt."""
        return context_tokens(len(self.prompt.ids), self.token_spans) if self.length else 0

    def accepts(self, progress: Progress) -> bool:
        """Whether a report of the running trajectory has the current epoch and starts at the recorded length."""
        return self.status is Status.RUNNING and progress.epoch == self.epoch and progress.start == self.length

    def missing(self, columns: Iterable[Column]) -> Column | None:
        """Return the first of these columns that it does not have in the column's dtype, None if it has all."""
        for column in columns:
            own = self.columns.get(column.name)
            if own is None or own.dtype is not column.dtype:
                return column
        return None

    def returns_by_role(self) -> dict[str, Returns]:
        """Return a scored trajectory's returns per token, by role that has turns; under "" without roles."""
        if not self.roles:
            return {"": returns_of(self.reward or 0.0, self.earned)}
        return {credit.role: returns_of(credit.reward) for credit in self.roles if credit.turns}

    def assignment(self, sampling: SamplingParams, pin: int | None, *, with_problem: bool = False) -> Assignment:
        """Return the assignment for a replica, which may continue only under version `pin` (None: any).

        `with_problem` adds the problem, for an environment that answers its turns.
        """
        return Assignment(
            trajectory_id=self.id,
            epoch=self.epoch,
            group_id=self.group_id,
            kind=self.kind,
            prompt_ids=self.prompt.ids,
            sampling=sampling,
            version=pin,
            tokens=self.tokens,
            used_s=self.used_s,
            problem=_problem(self.prompt, self.id) if with_problem else None,
        )

    def as_ref(self) -> TrajectoryRef:
        """Return the finished response, by reference, for scorers, the reference model and the learner."""
        assert self.finish_reason is not None, f"{self.id} is {self.status}, not finished"
        return TrajectoryRef(
            id=self.id,
            prompt_id=self.prompt.id,
            group_id=self.group_id,
            sample_index=self.sample_index,
            kind=self.kind,
            prompt_ids=self.prompt.ids,
            tokens=self.tokens,
            num_trained=num_sampled(self.token_spans),
            spans=self.token_spans,
            finish_reason=self.finish_reason,
            reward=self.reward,
            advantage=self.advantage or 0.0,
            advantage_scale=1.0 if self.advantage_scale is None else self.advantage_scale,
            earned=self.earned,
            roles=self.roles,
            columns=self.columns,
        )

    # ---- its next events; `ledger.machine` checks and applies them

    def assigned(self, replica: int) -> Assigned:
        """Return the event that assigns the trajectory to a replica, under a new epoch."""
        return Assigned(self.id, replica, self.epoch + 1, self.length)

    def resumed(self, replica: int) -> Assigned:
        """Return the event that a replica resumes the trajectory after a weight load, under the same epoch."""
        return Assigned(self.id, replica, self.epoch, self.length)

    def cut_off(self) -> StreamLost:
        """Return the event that the stream of tokens broke off before the engine's last delta."""
        assert self.replica is not None, f"a stream of {self.id} broke off, which is {self.status}"
        return StreamLost(self.id, self.replica, self.length)

    def interrupted(self, reason: str) -> Interrupted:
        """Return the event that generation stopped for `reason`; the trajectory keeps its tokens."""
        return Interrupted(
            trajectory_id=self.id,
            epoch=self.epoch,
            length=self.length,
            reason=reason,
            used_s=self.used_s + self.here_s,
        )

    def finished(self, progress: Progress) -> Finished:
        """Return the event that the response is complete, from the replica's last report."""
        assert progress.finish_reason is not None, f"{self.id} finishes without a reason"
        return Finished(
            trajectory_id=self.id,
            epoch=self.epoch,
            finish_reason=progress.finish_reason,
            spans=self.token_spans,
            length=self.length,
            digest=response_digest(piece.at.digest for piece in self.tokens),
            queue_s=progress.queue_s,
            generate_s=progress.generate_s,
            environment_s=self.environment_s,
        )

    def scored(self, score: Score) -> Scored:
        """Return the event that the trajectory has its reward."""
        assert score.value is not None, f"{self.id}: a response without a value is dropped"
        return Scored(
            trajectory_id=self.id,
            reward=score.value,
            elapsed_s=score.elapsed_s,
            at_once=score.at_once,
            terms=score.terms,
            earned=score.earned,
            roles=score.roles,
        )

    def consumed(self, *, step: int, version: int, staleness: int, weight: float) -> Consumed:
        """Return the event that learner step `step` trained on it, at learner version `version`."""
        return Consumed(trajectory_id=self.id, step=step, version=version, staleness=staleness, weight=weight)

    def dropped(self, reason: DropReason, detail: str = "") -> Dropped:
        """Return the event that the trajectory ends untrained; `detail` explains the reason."""
        return Dropped(self.id, reason, detail)


def live_rows(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...] = ()
) -> Iterator[LiveTrajectory]:
    """Iterate over trajectories whose rows meet the SQL condition `where`; tokens and prompts stay empty."""
    return (LiveTrajectory(**msgspec.structs.asdict(row)) for row in trajectory_rows(connection, where, values))


def issued(prompt: Prompt, *, id: str, group_id: str, sample_index: int, kind: Kind) -> Issued:
    """Return the event that a trajectory of a prompt is issued."""
    return Issued(
        trajectory_id=id,
        group_id=group_id,
        prompt_id=prompt.id,
        prompt_index=prompt.index,
        sample_index=sample_index,
        kind=kind,
    )


def _problem(prompt: Prompt, trajectory_id: str) -> Problem:
    """Return a trajectory's prompt in the form that environments get."""
    return Problem(
        prompt=prompt.text,
        answer=prompt.answer,
        task=prompt.task,
        fields=msgspec.json.decode(prompt.fields_json),
        seed=prompt.index,
        trajectory_id=trajectory_id,
    )
