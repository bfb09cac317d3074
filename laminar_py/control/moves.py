"""Moves of a repack round, and further members of a pass that a replica keeps its version for.

`control.scheduler` owns `Moves`. A move goes ASKED (the source is asked to hand the trajectory over) -> HANDED
OVER (the source's last report has arrived; the trajectory waits for its destination) -> closed: the destination
has it, or it ended at the source, was dropped, or goes elsewhere. The next assignment has a new epoch, so a late
report of the source is ignored. A destination receives each promised trajectory or a message that it will not
come; a replica that keeps its version for a pass gets a message when no member of the pass waits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class Round:
    """The moves of one plan, e.g. `Round(version=7, open={"g3.1": 2})`: g3.1 goes to replica 2 under version 7."""

    version: int
    open: dict[str, int]  # destination of each trajectory still moving
    asked: dict[int, list[str]] = field(default_factory=dict)  # trajectories, by source
    planned: dict[str, int] = field(default_factory=dict)  # prefill tokens that the plan expected, by trajectory
    growth: list[int] = field(default_factory=list)  # prefill tokens beyond the plan, of each that arrived
    num_running: int = 0  # arrived with response tokens
    num_waiting: int = 0  # arrived without response tokens
    prefill: Counter[int] = field(default_factory=Counter)  # prefill tokens, by destination
    done: asyncio.Event = field(default_factory=asyncio.Event)  # set when no move is open


class Moves:
    """Open moves, and passes of which replicas expect further members."""

    def __init__(self) -> None:
        self._rounds: dict[str, Round] = {}  # by trajectory, of open moves
        self._called_off: dict[int, list[str]] = {}
        self._passes: dict[str, set[int]] = {}  # replicas that keep their version for a pass, by its id
        self._promised: Counter[int] = Counter()  # open moves and passes, by destination

    def expect_more(self, pass_id: str, replica: int) -> None:
        """Note that a replica keeps its version, because members of a pass that it samples still wait.

        `release_passes` ends the wait when no member waits, and `forget` when the replica crashes.
        """
        keepers = self._passes.setdefault(pass_id, set())
        self._promised[replica] += replica not in keepers
        keepers.add(replica)

    def release_passes(self, waits: Callable[[str], bool]) -> None:
        """Let replicas load new weights after the last member of their pass has left the queue.

        `waits(pass_id)` is True while members of a pass wait. Each replica that kept its version for the pass gets
        a message that no further member will come.
        """
        for pass_id in [name for name in self._passes if not waits(name)]:
            for replica in self._passes.pop(pass_id):
                self._promised[replica] -= 1
                self.queue_call_off(replica, pass_id)

    def forget(self, replica: int) -> None:
        """Forget the passes that a crashed replica kept its version for."""
        for keepers in self._passes.values():
            self._promised[replica] -= replica in keepers
            keepers.discard(replica)

    def begin(self, moving: Round) -> None:
        """Open the moves of a round; the caller asks the sources to hand them over."""
        for trajectory_id, destination in moving.open.items():
            self._rounds[trajectory_id] = moving
            self._promised[destination] += 1
            called_off = self._called_off.pop(destination, [])
            if others := [name for name in called_off if name != trajectory_id]:  # it is expected again
                self._called_off[destination] = others
        if not moving.open:
            moving.done.set()

    def destination(self, trajectory_id: str) -> tuple[int, int] | None:
        """Return the destination replica and version of an open move, None without one."""
        moving = self._rounds.get(trajectory_id)
        return None if moving is None else (moving.open[trajectory_id], moving.version)

    def expected(self, replica: int) -> bool:
        """Whether a replica expects a move, or keeps its version for a pass."""
        return self._promised[replica] > 0

    def arrives(self, trajectory_id: str, replica: int, *, length: int, prefill: int) -> None:
        """Note that a replica gets a trajectory of `length` response tokens and prefills `prefill` tokens."""
        moving = self._rounds.get(trajectory_id)
        if moving is not None and moving.open[trajectory_id] == replica:
            moving.num_running += length > 0
            moving.num_waiting += length == 0
            moving.prefill[replica] += prefill
            if moving.planned[trajectory_id]:
                moving.growth.append(prefill - moving.planned[trajectory_id])
        self.ends(trajectory_id, at=replica)

    def ends(self, trajectory_id: str, *, at: int | None = None) -> None:
        """Close the move of a trajectory that goes to replica `at`, or nowhere; call off any other destination."""
        moving = self._rounds.pop(trajectory_id, None)
        if moving is None:
            return
        destination = moving.open.pop(trajectory_id)
        self._promised[destination] -= 1
        if destination != at:
            self.queue_call_off(destination, trajectory_id)
        if not moving.open:
            moving.done.set()

    def leave(self, replica: int) -> None:
        """Close the moves to a replica that is about to leave; it still keeps its version for passes."""
        for trajectory_id, moving in list(self._rounds.items()):
            if moving.open[trajectory_id] == replica:
                self.ends(trajectory_id)

    def end_all(self) -> None:
        """Close all moves."""
        for trajectory_id in list(self._rounds):
            self.ends(trajectory_id)

    def queue_call_off(self, replica: int, name: str) -> None:
        """Queue a message that a replica need not wait for a promised trajectory or pass."""
        self._called_off.setdefault(replica, []).append(name)

    def take_called_off(self) -> dict[int, list[str]]:
        """Return trajectories and passes that each replica need not wait for, and forget them."""
        called_off, self._called_off = self._called_off, {}
        return called_off
