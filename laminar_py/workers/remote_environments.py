"""Environments as a replica reaches them: each trajectory has a process of its own choice, by its name.

Invariant: whoever asks for a trajectory asks the same process, so that a turn which moved to another replica, or
whose replica died, meets the environment that has it.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from laminar_py.cluster.named import NamedActor
from laminar_py.records.codec import decode, encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart

log = logging.getLogger(__name__)

HEAR_S = 5.0  # for a process that is away


class RemoteEnvironments:
    """Environments in actors of these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._actors = [NamedActor(name) for name in names]

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Answer of a trajectory's environment to its last turn; its time is all that passed, the way included."""
        actor, began = self._of(turn.trajectory_id), time.monotonic()
        answer = decode(EnvironmentTurn, await actor.ask("answer", encode(turn)))
        return msgspec.structs.replace(answer, elapsed_s=time.monotonic() - began)

    async def hear(self, parts: Sequence[TurnPart]) -> None:
        """Tell environments that listen what is sampled, those of a process at a time."""
        by_actor: dict[NamedActor, list[TurnPart]] = {}
        for part in parts:
            by_actor.setdefault(self._of(part.trajectory_id), []).append(part)
        await asyncio.gather(*(_hear(actor, told) for actor, told in by_actor.items()))

    async def forget(self, trajectory_id: str) -> None:
        """Let go of a trajectory that has ended, and is stored."""
        await self._of(trajectory_id).ask("forget", encode([trajectory_id]))

    def _of(self, trajectory_id: str) -> NamedActor:
        number = int.from_bytes(blake3(trajectory_id.encode()).digest(length=8), "little")
        return self._actors[number % len(self._actors)]


async def _hear(actor: NamedActor, told: list[TurnPart]) -> None:
    """Tell a process; one that is away, or fails, hears of whole turns alone."""
    try:
        async with asyncio.timeout(HEAR_S):
            await actor.ask("hear", encode(told))
    except Exception as error:  # noqa: BLE001 - whatever it is, no turn depends on it
        log.info("what is sampled was not heard: %s", str(error) or type(error).__name__)
