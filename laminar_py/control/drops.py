"""Trajectories that end early: stragglers past a deadline, and those whose tokens are lost. Owned by `scheduler`.

A trajectory of which a stored part cannot be read any more is dropped (`host_lost`), with its other parts, and its
prompt is issued anew where its group is still open. Invariant: a trajectory without tokens on record has lost
nothing, and waits for another replica as after any death.
"""

from collections.abc import Collection, Mapping

from laminar_py.control.book import Book
from laminar_py.control.closing import Closing
from laminar_py.control.consumption import Consumption
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.protocols import Clock
from laminar_py.records.trajectory import DropReason, Kind, Status


class Losses:
    """Takes out of all parts what cannot be trained on, scored or gone on with any more."""

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

    async def of_segments(self, segments: Collection[str], reason: str) -> None:
        """Drop every live trajectory of which something is in one of these segments, which are gone."""
        holders = self._book.live.values()
        await self.of({one.id: reason for one in holders if not one.segments.isdisjoint(segments)})

    async def of(self, lost: Mapping[str, str]) -> None:
        """Drop these trajectories, those that are live: what is lost of each, by id."""
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
                await self.begin_anew(trajectory, DropReason.HOST_LOST, detail)

    async def begin_anew(self, trajectory: LiveTrajectory, reason: DropReason, detail: str) -> None:
        """Drop a trajectory that nobody can go on with, and issue its prompt anew."""
        self._book.drop([trajectory], reason, detail)
        if trajectory.kind is Kind.EVAL:
            self._evaluations.lose(trajectory)
        elif trajectory.trains:
            self._waiting.append(self._book.issue_member(self._book.groups[trajectory.group_id]))
        await self._closing.settled(trajectory)


HOUSEKEEPING_S = 0.5  # between looks at deadlines, which no report and no score brings about


class Deadlines:
    """Drops stragglers."""

    def __init__(self, book: Book, *, waiting: WaitingQueue, closing: Closing, clock: Clock) -> None:
        self._book = book
        self._waiting = waiting
        self._closing = closing
        self._clock = clock

    async def enforce(self) -> None:
        """Close groups whose stragglers are past the deadline."""
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
        """Close groups that wait for nothing but scores, and would be too old for the next step when those come.

        Called when a batch can be taken, so that a late score costs its own response and not its group. A group of
        which something still generates waits: without its long responses it would favour short ones.
        """
        for group in list(self._book.groups.values()):
            late, survivors = group.pending, group.survivors
            if len(survivors) < self._book.settings.min_group_survivors:
                continue
            if late and all(map(self._is_late, late)) and any(map(self._ages_out, survivors)):
                self._book.drop(late, DropReason.STALE, "its score did not come in time")
                await self._closing.close(group)

    def _is_late(self, member: LiveTrajectory) -> bool:
        """True where only a score is missing, and no step could use it."""
        return member.status is Status.FINISHED and self._ages_out(member)

    def _ages_out(self, member: LiveTrajectory) -> bool:
        """True where the next step is one too many for a finished response."""
        settings, ages = self._book.settings, self._book.ages
        return settings.bound.weight(1 + ages.of(member.age_version)) is None
