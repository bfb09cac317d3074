"""Environments as a replica reaches them: each trajectory has a process of its own choice, by its name.

Invariant: whoever asks for a trajectory asks the same process, so that a turn which moved to another replica, or
whose replica died, meets the environment that has it.
"""

import asyncio
import logging
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

log = logging.getLogger(__name__)

HEAR_S = 5.0  # for a process that is away


class RemoteEnvironments:
    """Environments in actors of these names; `label` is the replica's, which no other has at the time."""

    def __init__(self, names: Sequence[str], wire: Wire, label: str) -> None:
        self._actors = [NamedActor(name) for name in names]
        connect = partial(Peer, wire, name=label)
        self._senders = [TurnPartSender(partial(_hears_at, actor), connect) for actor in self._actors]

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Answer of a trajectory's environment to its last turn; its time is all that passed, the way included."""
        actor, began = self._actors[self._place(turn.trajectory_id)], time.monotonic()
        answer = decode(EnvironmentTurn, await actor.ask("answer", encode(turn)))
        return msgspec.structs.replace(answer, elapsed_s=time.monotonic() - began)

    async def hear(self, parts: Sequence[TurnPart]) -> None:
        """Tell environments that listen what is sampled, those of a process at a time."""
        by_place: dict[int, list[TurnPart]] = {}
        for part in parts:
            by_place.setdefault(self._place(part.trajectory_id), []).append(part)
        given = [(self._senders[place], told) for place, told in by_place.items()]
        await asyncio.gather(*(_send(sender, told) for sender, told in given if not sender.offer(told)))

    async def forget(self, trajectory_id: str) -> None:
        """Let go of a trajectory that has ended, and is stored."""
        await self._actors[self._place(trajectory_id)].ask("forget", encode([trajectory_id]))

    def _place(self, trajectory_id: str) -> int:
        """Place of its process among the names."""
        return int.from_bytes(blake3(trajectory_id.encode()).digest(length=8), "little") % len(self._actors)


async def _hears_at(actor: NamedActor) -> str:
    return (await actor.ask("hears_at", b"")).decode()


async def _send(sender: TurnPartSender, told: list[TurnPart]) -> None:
    """Tell a process; one that is away hears of whole turns alone."""
    try:
        async with asyncio.timeout(HEAR_S):
            await sender.send(told)
    except Exception as error:  # noqa: BLE001 - whatever it is, no turn depends on it
        log.info("what is sampled was not heard: %s", str(error) or type(error).__name__)
