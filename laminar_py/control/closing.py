"""Closing sends finished responses to scoring and the reference model, and closes a group when all have answered.

`control.scheduler` owns `Closing`; `control.consumption` hands closed groups to the learner. No group waits for
another.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.book import Book
from laminar_py.control.consumption import Consumption
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.groups import Credit, Group, teaches
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.columns import REFERENCE_LOGPROBS
from laminar_py.records.events import Ready
from laminar_py.records.host import Clock
from laminar_py.records.pieces import ColumnRef
from laminar_py.records.scoring import GroupRewards, Score
from laminar_py.records.trajectory import DropReason, Kind, Prompt, Status, TrajectoryRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Queues for finished responses; results come back by `Closing.on_score` and `Closing.on_reference`."""

    submit_score: Callable[[TrajectoryRef, Prompt], None]
    submit_reference: Callable[[TrajectoryRef], None] | None = None  # None: the run has no reference model

    def score(self, trajectory: LiveTrajectory) -> None:
        """Queue a response for scoring."""
        self.submit_score(trajectory.as_ref(), trajectory.prompt)

    def refer(self, trajectory: LiveTrajectory) -> None:
        """Queue a training response for the reference model's log-probabilities, if the run has that model."""
        if self.submit_reference is not None and trajectory.trains:
            self.submit_reference(trajectory.as_ref())

    def awaits_reference(self, members: Iterable[LiveTrajectory]) -> bool:
        """Whether the reference model still owes an answer for one of these members."""
        return self.submit_reference is not None and any(REFERENCE_LOGPROBS not in m.columns for m in members)


class Closing:
    """Takes scores and reference log-probabilities, and gives closed groups their advantages."""

    def __init__(
        self,
        book: Book,
        *,
        consumption: Consumption,
        evaluations: Evaluations,
        stages: Stages,
        credit: Credit,
        clock: Clock,
        on_rewards: Callable[[GroupRewards], None],
    ) -> None:
        self._book = book
        self._consumption = consumption
        self._evaluations = evaluations
        self._stages = stages
        self._credit = credit
        self._clock = clock
        self._on_rewards = on_rewards

    def finished(self, trajectory: LiveTrajectory) -> None:
        """Queue a finished response for scoring; a group's first finished response starts its deadline."""
        group = self._book.groups.get(trajectory.group_id)
        if group is not None and trajectory.trains:
            group.finished_lengths.append(trajectory.length)
        if group is not None and group.first_finished_s is None:
            group.first_finished_s = self._clock.now()
        self._stages.score(trajectory)
        self._stages.refer(trajectory)

    async def on_score(self, score: Score) -> None:
        """Record a score, or drop the response if its reward failed; the last score closes the group."""
        trajectory = self._book.live.get(score.trajectory_id)
        if trajectory is None or trajectory.status is not Status.FINISHED:
            return
        if score.value is None:
            self._book.drop([trajectory], score.failure or DropReason.REWARD_FAILED, score.detail)
        else:
            if score.columns:
                self._book.recorder.store_columns(trajectory.id, score.columns)
            self._book.record(trajectory.scored(score))
        await self.settled(trajectory)

    async def on_reference(self, trajectory_id: str, logprobs: ColumnRef) -> None:
        """Note where a response's reference log-probabilities lie; the last answer closes the group."""
        trajectory = self._book.live.get(trajectory_id)
        if trajectory is None:
            return
        trajectory.columns = trajectory.columns | {REFERENCE_LOGPROBS: logprobs}
        group = self._book.groups[trajectory.group_id]
        if group.is_ready:
            await self._put(group)
        elif not group.is_pending:
            await self.close(group)

    async def settled(self, trajectory: LiveTrajectory) -> None:
        """Close the group or evaluation of a scored or dropped trajectory, if no other member is pending."""
        if trajectory.kind is Kind.EVAL:
            self._evaluations.settle(trajectory)
        elif trajectory.trains:
            group = self._book.groups[trajectory.group_id]
            if not group.is_pending:
                await self.close(group)

    async def close(self, group: Group) -> None:
        """Give a group its advantages and hand it to the learner, or drop it.

        A group with too few survivors is dropped, as is one without signal unless `rollout.without_signal=train`.
        A group that trains first waits for the reference model.
        """
        survivors, settings = group.survivors, self._book.settings
        if len(survivors) < settings.min_group_survivors:
            self._book.num_generating -= 1
            self._book.drop(survivors, DropReason.GROUP_LOST, f"{len(survivors)} survivors")
            del self._book.groups[group.id]
            await self._consumption.buffer.wake()  # a step may wait for this group as its last
            return
        self._note_rewards(survivors)
        is_taught = settings.without_signal is WithoutSignal.TRAIN or teaches(survivors)
        if is_taught and self._stages.awaits_reference(survivors):
            return
        self._book.num_generating -= 1
        rewards = tuple(member.reward or 0.0 for member in survivors)
        self._on_rewards(GroupRewards(group.prompt.index, group.prompt.id, rewards))
        if not is_taught:
            await self._close_without_signal(group, survivors, f"reward {survivors[0].reward:g}")
            return
        for member, credit in zip(survivors, self._credit.assign(survivors), strict=True):
            self._book.record(Ready(member.id, credit.advantage, credit.scale, credit.roles))
        await self._consumption.put(group)

    async def _close_without_signal(self, group: Group, survivors: Sequence[LiveTrajectory], detail: str) -> None:
        self._book.drop(survivors, DropReason.NO_SIGNAL, detail)
        if self._book.settings.without_signal is WithoutSignal.SKIP:
            await self._consumption.put_silent(group.id, survivors)
        else:
            del self._book.groups[group.id]
            self._book.refilled.append(survivors[0].reward or 0.0)
            await self._consumption.buffer.wake()

    def _note_rewards(self, survivors: Sequence[LiveTrajectory]) -> None:
        """Update the worst and the best reward of the run."""
        worst, best = self._book.rewards
        rewards = [member.reward or 0.0 for member in survivors]
        self._book.rewards = min(worst, *rewards), max(best, *rewards)

    async def lose_ready(self, trajectory: LiveTrajectory, detail: str) -> None:
        """Drop a ready member whose tokens are lost and for which the reference model still owes an answer.

        Its group goes to the learner without it. A member in the learner's current step stays: its tokens were
        read.
        """
        if self._stages.awaits_reference([trajectory]):
            group = self._book.groups[trajectory.group_id]
            self._book.drop([trajectory], DropReason.HOST_LOST, detail)
            del group.members[trajectory.id]
            await self._put(group)

    async def restore(self, group: Group) -> None:
        """Continue a group of a crashed controller, and close it if no member is pending."""
        if group.is_ready:
            await self._put(group)
            return
        self._book.num_generating += 1
        group.first_finished_s = self._clock.now() if len(group.pending) < len(group.members) else None
        members = group.members.values()
        group.finished_lengths = [member.length for member in members if member.finish_reason is not None]
        if not group.is_pending:
            await self.close(group)

    def restore_member(self, trajectory: LiveTrajectory) -> None:
        """Queue a restored response again for the score and reference answer that were never recorded."""
        if trajectory.status is Status.FINISHED:
            self._stages.score(trajectory)
        self._stages.refer(trajectory)  # the ledger has no reference answers

    async def _put(self, group: Group) -> None:
        """Hand a group of ready members to the learner, once the reference model has answered for all."""
        if not self._stages.awaits_reference(group.members.values()):
            await self._consumption.put(group)
