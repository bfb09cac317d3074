"""Losses of tokens: a host is gone, or what it had was changed. Owned by `control.scheduler`.

A trajectory of which a stored part cannot be read any more is of no use: it is dropped (`host_lost`), with what
lies elsewhere, and its prompt issued anew where its group is still open. Invariant: whatever had no tokens on
record has lost nothing, and waits for another replica as after any death.
"""

from collections.abc import Collection, Mapping

from laminar_py.control.book import Book
from laminar_py.control.closing import Closing
from laminar_py.control.consumption import Consumption
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.trajectory import LiveTrajectory
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
