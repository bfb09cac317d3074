"""Lifecycle of one trajectory from issue to consumption. Owns its status; every change of it happens here.

Each transition returns the event that the ledger stores, so that the state in memory and the record on disk cannot
differ. An illegal transition is an `IllegalEventError` with the ids: a bug, which ends the run.
"""

from dataclasses import dataclass, field

import msgspec

from laminar_py.ledger.machine import IllegalEventError
from laminar_py.records.digests import response_digest
from laminar_py.records.engine import SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.events import (
    Assigned,
    Consumed,
    Dropped,
    Finished,
    Interrupted,
    Issued,
    Ready,
    Restamped,
    Scored,
    StreamCut,
    Undone,
)
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.replica import Assignment, Progress
from laminar_py.records.returns import Earned, Returns, returns_of
from laminar_py.records.roles import RoleCredit
from laminar_py.records.scoring import Score
from laminar_py.records.spans import Span, clip_spans, covers, num_sampled, replace_spans, sampled_versions
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Prompt, Status
from laminar_py.records.tree import context_tokens

LIVE = frozenset(Status) - {Status.CONSUMED, Status.DROPPED}
ON_REPLICA = frozenset({Status.RUNNING})
DISPATCHABLE = frozenset({Status.QUEUED, Status.INTERRUPTED})


@dataclass(slots=True, kw_only=True)
class Lifecycle:
    """State of one trajectory, e.g. 41 tokens of sample 1 of group "g3", RUNNING on replica 2 under version 7."""

    id: str
    group_id: str
    sample_index: int
    prompt: Prompt
    kind: Kind
    sampling: SamplingParams
    status: Status = Status.QUEUED
    epoch: int = 0
    replica: int | None = None
    tokens: tuple[TokensRef, ...] = ()  # of the response, end to end
    spans: tuple[Span, ...] = ()  # cover [0, length)
    finish_reason: FinishReason | None = None
    reward: float | None = None
    said: str = ""  # its answer, as the reward has it
    advantage: float = 0.0
    advantage_scale: float = 1.0
    used_s: float = 0.0  # seconds of generation, on earlier replicas
    here_s: float = 0.0  # and on this one
    environment_s: float = 0.0  # that its environment worked, as far as it was told
    columns: dict[str, ColumnRef] = field(default_factory=dict)  # those of a reference are on no record
    earned: Earned | None = None  # where its tokens have rewards of their own
    roles: tuple[RoleCredit, ...] = ()  # where these have rewards of their own

    def issued(self) -> Issued:
        """The event of a new trajectory."""
        prompt = self.prompt
        return Issued(
            trajectory_id=self.id,
            group_id=self.group_id,
            prompt_id=prompt.id,
            prompt_index=prompt.index,
            sample_index=self.sample_index,
            kind=self.kind,
        )

    @property
    def length(self) -> int:
        """Response tokens that were told."""
        return self.tokens[-1].end if self.tokens else 0

    @property
    def trains(self) -> bool:
        """True where the learner may get it."""
        return self.kind is Kind.TRAIN

    @property
    def version(self) -> int | None:
        """The newest version in it, None before its first token."""
        for span in reversed(self.spans):
            if span.version is not None:
                return span.version
        return None

    @property
    def oldest_version(self) -> int:
        """The lowest version in it, once it has tokens."""
        return min(sampled_versions(self.spans))

    @property
    def prefill(self) -> int:
        """Tokens that the next replica computes anew; without a response the prompt is shared with the group."""
        return context_tokens(len(self.prompt.ids), self.spans) if self.length else 0

    def assignment(self, pin: int | None, *, with_problem: bool = False) -> Assignment:
        """The message to its replica; `pin` is the only version it may go on under, if any.

        It has the problem where an environment answers its turns.
        """
        return Assignment(
            trajectory_id=self.id,
            epoch=self.epoch,
            group_id=self.group_id,
            kind=self.kind,
            prompt_ids=self.prompt.ids,
            sampling=self.sampling,
            version=pin,
            tokens=self.tokens,
            used_s=self.used_s,
            problem=_problem(self.prompt, self.id) if with_problem else None,
        )

    def assign(self, replica: int) -> Assigned:
        """QUEUED or INTERRUPTED -> RUNNING, under a new epoch."""
        self._move(DISPATCHABLE, Status.RUNNING)
        self.used_s, self.here_s = self.used_s + self.here_s, 0.0
        self.epoch += 1
        self.replica = replica
        return Assigned(self.id, replica, self.epoch, self.length)

    def accepts(self, progress: Progress) -> bool:
        """False for a report of a replica that no longer owns it, or of tokens that are already here."""
        return self.status is Status.RUNNING and progress.epoch == self.epoch and progress.start == self.length

    def grow(self, progress: Progress) -> Restamped | None:
        """Append new tokens while RUNNING; an event if the engine corrected the spans of earlier ones."""
        self._move(ON_REPLICA, Status.RUNNING)
        self.here_s = progress.generate_s - progress.queue_s
        self.environment_s += progress.environment_s
        if progress.tokens is not None:
            assert progress.tokens.start == self.length, f"{self.id}: {progress.tokens} after {self.length} tokens"
            self.tokens = (*self.tokens, progress.tokens)
        said, self.spans = self.spans, replace_spans(self.spans, progress.spans)
        assert covers(self.spans, 0, self.length), f"{self.id}: {self.spans} for {self.length} tokens"
        reaches_back = bool(progress.spans) and progress.spans[0].start < progress.start
        if reaches_back and clip_spans(self.spans, 0, progress.start) != said:
            return Restamped(self.id, self.spans)
        return None

    @property
    def segments(self) -> set[str]:
        """Segments that have something of it."""
        refs = (*(piece.at for piece in self.tokens), *(column.at for column in self.columns.values()))
        return {ref.segment for ref in refs}

    def cut_off(self) -> StreamCut:
        """RUNNING as before, but its stream broke off; the event says where."""
        assert self.replica is not None, f"a stream of {self.id} broke off, which is {self.status}"
        return StreamCut(self.id, self.replica, self.length)

    def interrupt(self, reason: str) -> Interrupted:
        """RUNNING -> INTERRUPTED; what it has stays."""
        self._move(ON_REPLICA, Status.INTERRUPTED)
        self.replica = None
        return Interrupted(
            trajectory_id=self.id,
            epoch=self.epoch,
            length=self.length,
            reason=reason,
            used_s=self.used_s + self.here_s,
        )

    def resume(self, replica: int) -> Assigned:
        """INTERRUPTED -> RUNNING on the replica that interrupted it for new weights and still owns it."""
        self._move({Status.INTERRUPTED}, Status.RUNNING)
        self.replica = replica
        return Assigned(self.id, replica, self.epoch, self.length)

    def finish(self, progress: Progress) -> Finished:
        """RUNNING -> FINISHED, joined into one response."""
        assert progress.finish_reason is not None, f"{self.id} finishes without a reason"
        self._move(ON_REPLICA, Status.FINISHED)
        self.replica = None
        self.finish_reason = progress.finish_reason
        return Finished(
            trajectory_id=self.id,
            epoch=self.epoch,
            finish_reason=progress.finish_reason,
            spans=self.spans,
            length=self.length,
            digest=response_digest(piece.at.digest for piece in self.tokens),
            queue_s=progress.queue_s,
            generate_s=progress.generate_s,
            environment_s=self.environment_s,
        )

    def score(self, score: Score) -> Scored:
        """FINISHED -> SCORED."""
        assert score.value is not None, f"{self.id}: what has no value is dropped"
        self._move({Status.FINISHED}, Status.SCORED)
        self.reward, self.said, self.columns = score.value, score.said, self.columns | score.columns
        self.earned, self.roles = score.earned, score.roles
        return Scored(
            trajectory_id=self.id,
            reward=score.value,
            elapsed_s=score.elapsed_s,
            at_once=score.at_once,
            terms=score.terms,
            earned=score.earned,
            roles=score.roles,
        )

    def returns_by_role(self) -> dict[str, Returns]:
        """Returns of its tokens, once it is scored: by role that has turns, or all as of one without a name."""
        if not self.roles:
            return {"": returns_of(self.reward or 0.0, self.earned)}
        return {credit.role: returns_of(credit.reward) for credit in self.roles if credit.turns}

    def make_ready(self, advantage: float, scale: float = 1.0, roles: tuple[RoleCredit, ...] = ()) -> Ready:
        """SCORED -> READY."""
        self._move({Status.SCORED}, Status.READY)
        self.advantage, self.advantage_scale, self.roles = advantage, scale, roles
        return Ready(self.id, advantage, scale, roles)

    def consume(self, *, step: int, version: int, staleness: int, weight: float) -> Consumed:
        """READY -> CONSUMED by learner step `step` at learner version `version`."""
        self._move({Status.READY}, Status.CONSUMED)
        return Consumed(trajectory_id=self.id, step=step, version=version, staleness=staleness, weight=weight)

    def undo(self, step: int) -> Undone:
        """CONSUMED -> READY: the step was rolled back."""
        self._move({Status.CONSUMED}, Status.READY)
        return Undone(self.id, step)

    def drop(self, reason: DropReason, detail: str = "") -> Dropped:
        """Any live state -> DROPPED."""
        self._move(LIVE, Status.DROPPED)
        self.replica = None
        return Dropped(self.id, reason, detail)

    def finished(self) -> FinishedTrajectory:
        """The finished record."""
        assert self.finish_reason is not None, f"{self.id} is {self.status}, not finished"
        return FinishedTrajectory(
            id=self.id,
            prompt_id=self.prompt.id,
            group_id=self.group_id,
            sample_index=self.sample_index,
            kind=self.kind,
            prompt_ids=self.prompt.ids,
            tokens=self.tokens,
            num_trained=num_sampled(self.spans),
            spans=self.spans,
            finish_reason=self.finish_reason,
            reward=self.reward,
            advantage=self.advantage,
            advantage_scale=self.advantage_scale,
            earned=self.earned,
            roles=self.roles,
            columns=self.columns,
        )

    def _move(self, allowed: frozenset[Status] | set[Status], to: Status) -> None:
        if self.status not in allowed:
            raise IllegalEventError(f"trajectory {self.id} cannot go from {self.status} to {to}")
        self.status = to


def _problem(prompt: Prompt, trajectory_id: str) -> Problem:
    """A prompt as an environment is told of it."""
    return Problem(
        prompt=prompt.text,
        answer=prompt.answer,
        task=prompt.task,
        fields=msgspec.json.decode(prompt.fields_json),
        seed=prompt.index,
        trajectory_id=trajectory_id,
    )
