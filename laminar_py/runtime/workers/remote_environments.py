"""Environments as a replica reaches them: each trajectory has a process of its own choice, by its name.

Invariant: whoever asks for a trajectory asks the same process, so that a turn which moved to another replica, or
whose replica died, meets the environment that has it. A call of Ray asks until there is an answer, whatever
becomes of the process. Where the environment listens its answer may come sooner, by the socket on which it hears.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from itertools import count

import msgspec
from blake3 import blake3

from laminar_py.records.codec import decode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.relay.wire.post import Peer
from laminar_py.relay.wire.transport import Wire
from laminar_py.runtime.cluster.backend import NamedPart
from laminar_py.runtime.link.turns import AskedTurn, TurnAnswer, TurnSender


class RemoteEnvironments:
    """Environments in actors of these names; `label` is the replica's, which no other has or had."""

    def __init__(self, names: Sequence[str], wire: Wire, label: str) -> None:
        self._actors = [NamedPart(name) for name in names]
        self._label = label
        self._numbers = count()
        self._awaited: dict[int, asyncio.Future[EnvironmentTurn]] = {}  # by the number of what was asked
        connect = partial(Peer, wire, name=label)
        self._senders = [
            TurnSender(partial(_turns_address, actor), connect, self._answered) for actor in self._actors
        ]

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Answer of a trajectory's environment to its last turn; its time is all that passed, the way included."""
        actor, began = self._actors[self._process(turn.trajectory_id)], time.monotonic()
        asked = AskedTurn(asker=self._label, number=next(self._numbers), turn=turn)
        answer = self._awaited[asked.number] = asyncio.get_running_loop().create_future()
        call = asyncio.create_task(_call(actor, asked, answer), name=f"ask-{turn.trajectory_id}")
        try:
            answered: EnvironmentTurn = await answer
        finally:
            del self._awaited[asked.number]
            call.cancel()
        return msgspec.structs.replace(answered, elapsed_s=time.monotonic() - began)

    def hear(self, parts: Sequence[TurnPart]) -> None:
        """Tell environments that listen what is sampled; waits for none of them."""
        told: dict[int, list[TurnPart]] = {}
        for part in parts:
            told.setdefault(self._process(part.trajectory_id), []).append(part)
        for process, its in told.items():
            self._senders[process].send(its)

    async def forget(self, trajectory_id: str) -> None:
        """Let go of a trajectory that has ended, and is stored."""
        await self._actors[self._process(trajectory_id)].call("forget", [trajectory_id])

    def close(self) -> None:
        """End the connections by which environments hear."""
        for sender in self._senders:
            sender.close()

    def _answered(self, answer: TurnAnswer) -> None:
        awaited = self._awaited.get(answer.number)
        if awaited is not None and not awaited.done():
            awaited.set_result(answer.turn)

    def _process(self, trajectory_id: str) -> int:
        """Number of the process that has a trajectory."""
        return int.from_bytes(blake3(trajectory_id.encode()).digest(length=8), "little") % len(self._actors)


async def _call(actor: NamedPart, asked: AskedTurn, answer: asyncio.Future[EnvironmentTurn]) -> None:
    """Have an answer over Ray, unless it is there before."""
    try:
        data = await actor.call("answer", asked)
        assert isinstance(data, bytes), "a turn travels as bytes"
        turn = decode(EnvironmentTurn, data)
    except Exception as error:  # noqa: BLE001 - whoever waits raises it
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(turn)
    finally:
        answer.cancel()  # which is done, unless the call was cancelled


async def _turns_address(actor: NamedPart) -> str:
    return str(await actor.call("turns_address"))
