"""Trajectories on their way from one replica to another. Owned by `control.flow`.

ASKED (its source is told to give it up) -> HANDED OVER (its last word is here, it waits for its destination) ->
gone from here: the destination has it, or it ended at the source, was dropped, or goes elsewhere. The source owns
it until its last word; the next assignment has a new epoch, so a late answer of the source counts for nothing.
Invariant: a destination is told of each move that it expects and that will not come.
"""

import asyncio
from dataclasses import dataclass


@dataclass(slots=True)
class MoveUnderWay:
    """Where one is to go, and the version that the destination promised to keep for it."""

    destination: int
    version: int


class Moves:
    """All moves that are under way."""

    def __init__(self) -> None:
        self._under_way: dict[str, MoveUnderWay] = {}
        self._called_off: dict[int, int] = {}
        self._settled = asyncio.Event()
        self._settled.set()

    def begin(self, trajectory_id: str, move: MoveUnderWay) -> None:
        """Its source is asked to give it up."""
        self._under_way[trajectory_id] = move
        self._settled.clear()

    def get(self, trajectory_id: str) -> MoveUnderWay | None:
        """Where it is to go, if it is to go anywhere."""
        return self._under_way.get(trajectory_id)

    def ends(self, trajectory_id: str, *, at: int | None = None) -> None:
        """It goes to replica `at`, or nowhere any more; a destination that does not get it is told."""
        move = self._under_way.pop(trajectory_id, None)
        if move is not None and move.destination != at:
            self.refuse(move.destination, 1)
        if not self._under_way:
            self._settled.set()

    def refuse(self, destination: int, count: int) -> None:
        """So many of those that a destination expects never set out."""
        self._called_off[destination] = self._called_off.get(destination, 0) + count

    def take_called_off(self) -> dict[int, int]:
        """How many each destination need not expect any more; told once."""
        called_off, self._called_off = self._called_off, {}
        return called_off

    async def settled(self) -> None:
        """Until none is under way."""
        await self._settled.wait()
