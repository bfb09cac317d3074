"""Trajectories that replicas are promised: those of others, and more of a pass. Owned by `control.scheduler`.

ASKED (its source is told to give it up) -> HANDED OVER (its last word is here, it waits for its destination) ->
gone from here: the destination has it, or it ended at the source, was dropped, or goes elsewhere. The source owns
it until its last word; the next assignment has a new epoch, so a late answer of the source counts for nothing.
Invariant: a destination gets each trajectory that it was promised, or is told that it will not come; and a replica
that keeps its version for more of a pass is told when nothing of that waits.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False, kw_only=True)
class Round:
    """The moves of one plan, e.g. `Round(version=7, open={"g3.1": 2})`: g3.1 goes to replica 2 under version 7."""

    version: int
    open: dict[str, int]  # trajectory -> destination, of those under way
    asked: dict[int, list[str]] = field(default_factory=dict)  # by source
    planned: dict[str, int] = field(default_factory=dict)  # tokens that the plan counted for each
    growth: list[int] = field(default_factory=list)  # by how many more each arrived with
    num_running: int = 0  # that have arrived with what they had
    num_waiting: int = 0  # that have arrived and had not begun
    prefill: Counter[int] = field(default_factory=Counter)  # tokens that each destination computes for them
    settled: asyncio.Event = field(default_factory=asyncio.Event)  # none is under way any more


class Moves:
    """Moves that are under way, and passes of which replicas expect more."""

    def __init__(self) -> None:
        self._rounds: dict[str, Round] = {}  # of each trajectory that is under way
        self._called_off: dict[int, list[str]] = {}
        self._passes: dict[str, set[int]] = {}  # replicas that keep their version for more of a pass, by its id
        self._promised: Counter[int] = Counter()  # to each replica: moves under way, and passes

    def expect_more(self, pass_id: str, replica: int) -> None:
        """Note that a replica keeps its version for more of a pass, until nothing of it waits."""
        keepers = self._passes.setdefault(pass_id, set())
        self._promised[replica] += replica not in keepers
        keepers.add(replica)

    def expect_while(self, waits: Callable[[str], bool]) -> None:
        """Have replicas keep their version no longer for passes of which nothing waits."""
        for pass_id in [name for name in self._passes if not waits(name)]:
            for replica in self._passes.pop(pass_id):
                self._promised[replica] -= 1
                self.refuse(replica, pass_id)

    def forget(self, replica: int) -> None:
        """Note that a replica has died, which keeps nothing."""
        for keepers in self._passes.values():
            self._promised[replica] -= replica in keepers
            keepers.discard(replica)

    def begin(self, moving: Round) -> None:
        """Note the moves of a round, whose sources are asked to give them up."""
        for trajectory_id, destination in moving.open.items():
            self._rounds[trajectory_id] = moving
            self._promised[destination] += 1
            self._keep_promise(destination, trajectory_id)
        if not moving.open:
            moving.settled.set()

    def destination(self, trajectory_id: str) -> tuple[int, int] | None:
        """Replica and version that a trajectory is to go to, if it is to go anywhere."""
        moving = self._rounds.get(trajectory_id)
        return None if moving is None else (moving.open[trajectory_id], moving.version)

    def is_under_way(self, trajectory_id: str, *, to: int | None = None) -> bool:
        """True where a move of a trajectory is open, to that replica if one is named, whose promise it needs."""
        moving = self._rounds.get(trajectory_id)
        return moving is not None and to in (None, moving.open[trajectory_id])

    def expected(self, replica: int) -> bool:
        """True where anything is on its way there, or more of a pass is to come."""
        return self.num_expected(replica) > 0

    def num_expected(self, replica: int) -> int:
        """Number of trajectories on their way there, and of passes of which more is to come."""
        return self._promised[replica]

    def arrives(self, trajectory_id: str, replica: int, *, length: int, prefill: int) -> None:
        """Note that a replica is handed a trajectory with `length` tokens of response, which cost it `prefill`."""
        moving = self._rounds.get(trajectory_id)
        if moving is not None and moving.open[trajectory_id] == replica:
            moving.num_running += length > 0
            moving.num_waiting += length == 0
            moving.prefill[replica] += prefill
            if moving.planned[trajectory_id]:
                moving.growth.append(prefill - moving.planned[trajectory_id])
        self.ends(trajectory_id, at=replica)

    def ends(self, trajectory_id: str, *, at: int | None = None) -> None:
        """End the move of a trajectory that goes to replica `at`, or nowhere; another destination is told."""
        moving = self._rounds.pop(trajectory_id, None)
        if moving is None:
            return
        destination = moving.open.pop(trajectory_id)
        self._promised[destination] -= 1
        if destination != at:
            self.refuse(destination, trajectory_id)
        if not moving.open:
            moving.settled.set()

    def leave(self, replica: int) -> None:
        """End the moves to a replica that is about to leave; passes that it keeps its version for it keeps."""
        for trajectory_id, moving in list(self._rounds.items()):
            if moving.open[trajectory_id] == replica:
                self.ends(trajectory_id)

    def end_all(self) -> None:
        """End all moves."""
        for trajectory_id in list(self._rounds):
            self.ends(trajectory_id)

    def refuse(self, replica: int, name: str) -> None:
        """Call off a trajectory that a replica was promised and that never set out, or more of a pass."""
        self._called_off.setdefault(replica, []).append(name)

    def _keep_promise(self, replica: int, trajectory_id: str) -> None:
        """Call off no more what a replica has promised anew before it was told."""
        if names := [name for name in self._called_off.pop(replica, []) if name != trajectory_id]:
            self._called_off[replica] = names

    def take_called_off(self) -> dict[int, list[str]]:
        """Trajectories and passes that each replica need not expect any more; told once."""
        called_off, self._called_off = self._called_off, {}
        return called_off
