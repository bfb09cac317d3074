"""Early ends of trajectories: stragglers past their deadline, and trajectories whose stored tokens are lost.

`control.scheduler` owns both classes. A trajectory with a stored part that nobody can read any more is dropped
(`host_lost`), and its prompt is issued again if its group is still open. A trajectory without tokens on record
lost nothing; it waits for another replica.
"""

from collections.abc import Mapping

from laminar_py.control.book import Book
from laminar_py.control.closing import Closing
from laminar_py.control.consumption import Consumption
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.host import Clock
from laminar_py.records.trajectory import DropReason, Kind, Status


class LostTokens:
    """Drops trajectories whose stored tokens are gone, from the waiting queue, the buffer and open groups."""

    def __init__(
        self,
        book: Book,
        *,
        waiting: WaitingQueue,
        evaluations: Evaluations,
        consumption: Consumption,
        closing: Closing,
    ) -> None:
        self._book = book
        self._waiting = waiting
        self._evaluations = evaluations
        self._consumption = consumption
        self._closing = closing

    async def drop_trajectories(self, lost: Mapping[str, str]) -> None:
        """Drop the live ones of these trajectories; `lost` says for each id which part is lost."""
        self._waiting.remove(lost)
        self._consumption.drop_lost(lost)
        for trajectory_id, detail in lost.items():
            trajectory = self._book.live.get(trajectory_id)
            if trajectory is None:
                continue
            if trajectory.status is Status.READY:
                await self._closing.lose_ready(trajectory, detail)
            else:
                self._book.moves.ends(trajectory.id)
                self._book.abort(trajectory)
                await self.drop_and_reissue(trajectory, DropReason.HOST_LOST, detail)

    async def drop_and_reissue(self, trajectory: LiveTrajectory, reason: DropReason, detail: str) -> None:
        """Drop a trajectory that no replica can continue, and issue its prompt again; an evaluation fails."""
        self._book.drop([trajectory], reason, detail)
        if trajectory.kind is Kind.EVAL:
            self._evaluations.lose(trajectory)
        elif trajectory.trains:
            self._waiting.append(self._book.issue_member(self._book.groups[trajectory.group_id]))
        await self._closing.settled(trajectory)


HOUSEKEEPING_S = 0.5  # between checks of deadlines, since no report or score triggers them


class Deadlines:
    """Drops stragglers whose group waits too long, or whose score comes too late for the next step."""

    def __init__(self, book: Book, *, waiting: WaitingQueue, closing: Closing, clock: Clock) -> None:
        self._book = book
        self._waiting = waiting
        self._closing = closing
        self._clock = clock

    async def enforce(self) -> None:
        """Drop stragglers of groups past `rollout.group_deadline_s`, and close these groups without them."""
        now, deadline_s = self._clock.now(), self._book.settings.group_deadline_s
        if deadline_s is None:
            return
        for group in list(self._book.groups.values()):
            if group.overdue(now, deadline_s):
                for member in group.pending:
                    self._book.moves.ends(member.id)
                    self._book.abort(member)
                self._waiting.remove_group(group.id)
                self._book.drop(group.pending, DropReason.GROUP_DEADLINE)
                await self._closing.close(group)

    async def drop_unscored(self) -> None:
        """Close groups that wait only for scores and would be too old for the step after the next.

        The scheduler calls it when a batch is full, so that a late score costs one response instead of its group.
        A group with a response still generating waits: closed without its long responses it would favour short
        ones.
        """
        for group in list(self._book.groups.values()):
            late, survivors = group.pending, group.survivors
            if len(survivors) < self._book.settings.min_group_survivors:
                continue
            if late and all(map(self._is_late, late)) and any(map(self._ages_out, survivors)):
                self._book.drop(late, DropReason.STALE, "its score did not come in time")
                await self._closing.close(group)

    def _is_late(self, member: LiveTrajectory) -> bool:
        """Whether only the score is missing and would come too late for any step."""
        return member.status is Status.FINISHED and self._ages_out(member)

    def _ages_out(self, member: LiveTrajectory) -> bool:
        """Whether a finished response would exceed the staleness bound after the next step."""
        settings, ages = self._book.settings, self._book.ages
        return settings.bound.weight(1 + ages.age_of(member.age_version)) is None
