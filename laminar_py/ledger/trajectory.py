"""A trajectory that is live: its row in the ledger, and references and figures that decisions need besides.

There is one object for each, which `ledger.machine` alone changes as events are applied. The control plane decides
by it and makes the events; the ledger writes its columns; recovery builds it from the record. Invariant: nothing
here changes a status.
"""

import sqlite3
from collections.abc import Iterator

import msgspec
import numpy as np

from laminar_py.ledger.rows import TrajectoryRow, read_rows
from laminar_py.records.digests import response_digest
from laminar_py.records.engine import SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.events import Assigned, Consumed, Dropped, Finished, Interrupted, Issued, Scored, StreamCut
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.replica import Assignment, Progress
from laminar_py.records.returns import Earned, Returns, returns_of
from laminar_py.records.roles import RoleCredit
from laminar_py.records.scoring import Score
from laminar_py.records.spans import Span, num_sampled
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Status
from laminar_py.records.tree import context_tokens

NO_PROMPT = Prompt(id="", index=-1, text="", ids=np.empty(0, np.int32))
"""Prompt of a trajectory in a replay, which knows prompts by their ids alone."""


class LiveTrajectory(TrajectoryRow, kw_only=True, eq=False, gc=True, weakref=True):
    """A trajectory from issue to consumption, e.g. 41 tokens of "g3.1", RUNNING on replica 2 under version 7."""

    prompt: Prompt = NO_PROMPT
    tokens: tuple[TokensRef, ...] = ()  # of the response, end to end
    token_spans: tuple[Span, ...] = ()  # cover [0, length); `spans` of the row is JSON, of those that hold
    columns: dict[str, ColumnRef] = msgspec.field(
        default_factory=dict
    )  # those of the reference model are on no record
    earned: Earned | None = None  # where its tokens have rewards of their own
    roles: tuple[RoleCredit, ...] = ()  # where these have rewards of their own
    said: str = ""  # its answer, as the reward has it
    used_s: float = 0.0  # seconds of generation on earlier replicas
    here_s: float = 0.0  # and on this one, as it reported last
    environment_s: float = 0.0  # that its environment worked, as far as reports tell

    # ---- questions

    @property
    def trains(self) -> bool:
        """True where the learner may get it."""
        return self.kind is Kind.TRAIN

    @property
    def runs_on(self) -> int | None:
        """The replica that it runs on; `replica` is the last one that had it."""
        return self.replica if self.status is Status.RUNNING else None

    @property
    def last_version(self) -> int | None:
        """The version of its last sampled token, None before its first."""
        for span in reversed(self.token_spans):
            if span.version is not None:
                return span.version
        return None

    @property
    def age_version(self) -> int:
        """The lowest version in it, whose age is its staleness; it has sampled tokens."""
        assert self.oldest_version is not None, f"{self.id} has no token that an engine sampled"
        return self.oldest_version

    @property
    def prefill(self) -> int:
        """Tokens that the next replica computes anew; without a response the prompt is shared with the group."""
        return context_tokens(len(self.prompt.ids), self.token_spans) if self.length else 0

    @property
    def segments(self) -> set[str]:
        """Segments that hold tokens or columns of it."""
        refs = (*(piece.at for piece in self.tokens), *(column.at for column in self.columns.values()))
        return {ref.segment for ref in refs}

    def accepts(self, progress: Progress) -> bool:
        """False for a report of a replica that no longer owns it, or of tokens that are already here."""
        return self.status is Status.RUNNING and progress.epoch == self.epoch and progress.start == self.length

    def returns_by_role(self) -> dict[str, Returns]:
        """Returns of its tokens, once it is scored: by role that has turns, or all as of one without a name."""
        if not self.roles:
            return {"": returns_of(self.reward or 0.0, self.earned)}
        return {credit.role: returns_of(credit.reward) for credit in self.roles if credit.turns}

    # ---- views of it

    def assignment(self, sampling: SamplingParams, pin: int | None, *, with_problem: bool = False) -> Assignment:
        """The message to its replica; `pin` is the only version it may go on under, if any.

        It has the problem where an environment answers its turns.
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

    def as_finished(self) -> FinishedTrajectory:
        """The finished response by reference, for scorers, the reference model and the learner."""
        assert self.finish_reason is not None, f"{self.id} is {self.status}, not finished"
        return FinishedTrajectory(
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
        """A replica is to run it, under a new epoch."""
        return Assigned(self.id, replica, self.epoch + 1, self.length)

    def resumed(self, replica: int) -> Assigned:
        """The replica that interrupted it for new weights, and still owns it, goes on."""
        return Assigned(self.id, replica, self.epoch, self.length)

    def cut_off(self) -> StreamCut:
        """Its stream broke off."""
        assert self.replica is not None, f"a stream of {self.id} broke off, which is {self.status}"
        return StreamCut(self.id, self.replica, self.length)

    def interrupted(self, reason: str) -> Interrupted:
        """Its generation stopped; tokens stay."""
        return Interrupted(
            trajectory_id=self.id,
            epoch=self.epoch,
            length=self.length,
            reason=reason,
            used_s=self.used_s + self.here_s,
        )

    def finished(self, progress: Progress) -> Finished:
        """The engine ended it; its pieces are one response."""
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
        """Its reward is known."""
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
        """Learner step `step` trained on it, at learner version `version`."""
        return Consumed(trajectory_id=self.id, step=step, version=version, staleness=staleness, weight=weight)

    def dropped(self, reason: DropReason, detail: str = "") -> Dropped:
        """Nobody will train on it."""
        return Dropped(self.id, reason, detail)


def live_rows(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...] = ()
) -> Iterator[LiveTrajectory]:
    """Trajectories for which the SQL condition holds, as far as their rows tell."""
    return (LiveTrajectory(**msgspec.structs.asdict(row)) for row in read_rows(connection, where, values))


def issued(prompt: Prompt, *, id: str, group_id: str, sample_index: int, kind: Kind) -> Issued:
    """A new trajectory of a prompt."""
    return Issued(
        trajectory_id=id,
        group_id=group_id,
        prompt_id=prompt.id,
        prompt_index=prompt.index,
        sample_index=sample_index,
        kind=kind,
    )


def _problem(prompt: Prompt, trajectory_id: str) -> Problem:
    """A prompt as an environment gets it."""
    return Problem(
        prompt=prompt.text,
        answer=prompt.answer,
        task=prompt.task,
        fields=msgspec.json.decode(prompt.fields_json),
        seed=prompt.index,
        trajectory_id=trajectory_id,
    )
