"""Moves of a repack round, and passes for whose waiting members a replica keeps its version.

`control.scheduler` owns `Moves`. A move goes ASKED (the source is asked to give the trajectory up) -> HANDED OVER
(the source's last report has arrived; the trajectory waits for its destination) -> closed: the destination has the
trajectory, or it ended at the source, was dropped, or went elsewhere. The next assignment has a new epoch, so a
late report of the source is ignored. A destination receives each promised trajectory or a call-off. A replica that
keeps its version for a pass receives a call-off when no member of the pass waits any more.
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
    growth: list[int] = field(default_factory=list)  # prefill tokens beyond the plan, of each arrived trajectory
    num_running: int = 0  # trajectories that arrived with response tokens
    num_waiting: int = 0  # trajectories that arrived without response tokens
    prefill: Counter[int] = field(default_factory=Counter)  # prefill tokens, by destination
    done: asyncio.Event = field(default_factory=asyncio.Event)  # set when no move is open


class Moves:
    """Open moves, passes for which replicas keep their versions, and call-offs that replicas must receive."""

    def __init__(self) -> None:
        self._rounds: dict[str, Round] = {}  # round of each trajectory with an open move
        self._called_off: dict[int, list[str]] = {}  # ids of trajectories and passes, by replica
        self._passes: dict[str, set[int]] = {}  # replicas that keep their version for a pass, by pass id
        self._promised: Counter[int] = Counter()  # open moves and kept passes, by replica

    def expect_more(self, pass_id: str, replica: int) -> None:
        """Note that a replica keeps its version for a pass, because further members of the pass wait.

        `release_passes` ends this when no member waits, and `forget` when the replica crashes.
        """
        keepers = self._passes.setdefault(pass_id, set())
        self._promised[replica] += replica not in keepers
        keepers.add(replica)

    def release_passes(self, waits: Callable[[str], bool]) -> None:
        """Queue a call-off for each replica that keeps its version for a pass without waiting members.

        `waits(pass_id)` is True while members of a pass wait. After the call-off a replica may load new weights.
        """
        for pass_id in [name for name in self._passes if not waits(name)]:
            for replica in self._passes.pop(pass_id):
                self._promised[replica] -= 1
                self.queue_call_off(replica, pass_id)

    def forget(self, replica: int) -> None:
        """Note that a crashed replica keeps its version for no pass any more."""
        for keepers in self._passes.values():
            self._promised[replica] -= replica in keepers
            keepers.discard(replica)

    def begin(self, moving: Round) -> None:
        """Open the moves of a round; the caller asks the sources to give the trajectories up.

        A queued call-off of an earlier move to the same destination is withdrawn. An empty round is done at once.
        """
        for trajectory_id, destination in moving.open.items():
            self._rounds[trajectory_id] = moving
            self._promised[destination] += 1
            called_off = self._called_off.pop(destination, [])
            if others := [name for name in called_off if name != trajectory_id]:
                self._called_off[destination] = others
        if not moving.open:
            moving.done.set()

    def destination(self, trajectory_id: str) -> tuple[int, int] | None:
        """Return the destination replica and version of an open move, None without one."""
        moving = self._rounds.get(trajectory_id)
        return None if moving is None else (moving.open[trajectory_id], moving.version)

    def expected(self, replica: int) -> bool:
        """Whether a replica is the destination of an open move, or keeps its version for a pass."""
        return self._promised[replica] > 0

    def arrives(self, trajectory_id: str, replica: int, *, length: int, prefill: int) -> None:
        """Close a trajectory's move, if it has one, because `replica` gets the trajectory.

        At the move's destination, count the arrival: `length` response tokens, and `prefill` tokens to prefill.
        """
        moving = self._rounds.get(trajectory_id)
        if moving is not None and moving.open[trajectory_id] == replica:
            moving.num_running += length > 0
            moving.num_waiting += length == 0
            moving.prefill[replica] += prefill
            if moving.planned[trajectory_id]:
                moving.growth.append(prefill - moving.planned[trajectory_id])
        self.ends(trajectory_id, at=replica)

    def ends(self, trajectory_id: str, *, at: int | None = None) -> None:
        """Close a trajectory's open move, if it has one; the last move of a round sets `done`.

        `at` is the replica that gets the trajectory, None if no replica does. Another destination is called off.
        """
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
        """Close all moves to a replica that is about to leave; the replica still keeps its version for passes."""
        for trajectory_id, moving in list(self._rounds.items()):
            if moving.open[trajectory_id] == replica:
                self.ends(trajectory_id)

    def end_all(self) -> None:
        """Close all moves."""
        for trajectory_id in list(self._rounds):
            self.ends(trajectory_id)

    def queue_call_off(self, replica: int, name: str) -> None:
        """Queue a message that a replica need not wait for a trajectory or pass, by its id `name`."""
        self._called_off.setdefault(replica, []).append(name)

    def take_called_off(self) -> dict[int, list[str]]:
        """Return the queued call-offs, ids of trajectories and passes by replica, and empty the queue."""
        called_off, self._called_off = self._called_off, {}
        return called_off
