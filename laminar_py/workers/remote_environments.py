"""Environments as a replica reaches them: each trajectory has a process of its own choice, by its name.

Invariant: whoever asks for a trajectory asks the same process, so that a turn which moved to another replica, or
whose replica died, meets the environment that has it.
"""

import time
from collections.abc import Sequence
from functools import partial

import msgspec
from blake3 import blake3

from laminar_py.cluster.named import NamedActor
from laminar_py.link.turn_parts import TurnPartSender
from laminar_py.records.codec import decode, encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.relay.wire.post import Peer
from laminar_py.relay.wire.transport import Wire


class RemoteEnvironments:
    """Environments in actors of these names; `label` is the replica's, which no other has at the time."""

    def __init__(self, names: Sequence[str], wire: Wire, label: str) -> None:
        self._actors = [NamedActor(name) for name in names]
        connect = partial(Peer, wire, name=label)
        self._senders = [TurnPartSender(partial(_parts_address, actor), connect) for actor in self._actors]

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Answer of a trajectory's environment to its last turn; its time is all that passed, the way included."""
        actor, began = self._actors[self._process(turn.trajectory_id)], time.monotonic()
        answer = decode(EnvironmentTurn, await actor.ask("answer", encode(turn)))
        return msgspec.structs.replace(answer, elapsed_s=time.monotonic() - began)

    def hear(self, parts: Sequence[TurnPart]) -> None:
        """Tell environments that listen what is sampled; waits for none of them."""
        told: dict[int, list[TurnPart]] = {}
        for part in parts:
            told.setdefault(self._process(part.trajectory_id), []).append(part)
        for process, its in told.items():
            self._senders[process].send(its)

    async def forget(self, trajectory_id: str) -> None:
        """Let go of a trajectory that has ended, and is stored."""
        await self._actors[self._process(trajectory_id)].ask("forget", encode([trajectory_id]))

    def close(self) -> None:
        """End the connections by which environments hear."""
        for sender in self._senders:
            sender.close()

    def _process(self, trajectory_id: str) -> int:
        """Number of the process that has a trajectory."""
        return int.from_bytes(blake3(trajectory_id.encode()).digest(length=8), "little") % len(self._actors)


async def _parts_address(actor: NamedActor) -> str:
    return (await actor.ask("parts_address", b"")).decode()
