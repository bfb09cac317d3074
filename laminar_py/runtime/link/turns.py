"""Turns on their way to environments that listen, as they are sampled, and answers on their way back.

Frames go straight from the replica to the process that has the environment. It says now and then how many have
come, and a replica is never more than `MOST_AHEAD` frames ahead of that: what is sampled meanwhile gathers for the
next. So a process that is busy is told less often, and no socket ever holds more of them. An answer goes back by
a frame, ahead of the call of Ray that asked for it; as many may wait in a socket as turns were asked for.
Invariant: no turn depends on a frame, and nobody waits for one alone. What is lost with a connection or a process
comes over Ray, with the whole turn or its answer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from typing import TypeAlias

import msgspec
from blake3 import blake3

from laminar_py.records.codec import decode, encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.relay.wire.post import Peer, Post
from laminar_py.relay.wire.transport import RelayKeys, SocketError, Wire, read_record
from laminar_py.runtime.cluster.backend import NamedPart

log = logging.getLogger(__name__)

SAY_EVERY = 8  # frames, of which a process says that they have come
MOST_AHEAD = 4 * SAY_EVERY  # far below what a socket takes in before it stops reading
MOST_FRAMES = 16  # heard before the event loop goes on with other work
UNSENT_S = 0.01  # between two tries to send to a process that is busy, or not connected yet
LARGEST_ANSWER = 2**20  # bytes; what is longer comes over Ray alone
AWAY_S = 5.0  # after which what gathered for a process that takes nothing is let go of


class PartsFrame(msgspec.Struct, frozen=True):
    """Frame of a sender, by its number, the first is 1."""

    number: int
    parts: list[TurnPart]


class PartsHeard(msgspec.Struct, frozen=True, tag="heard"):
    """Word that a sender's frames have come, up to that of this number, e.g. `PartsHeard(8)`."""

    number: int


class AskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn that is to be answered, over Ray, e.g. `AskedTurn(asker="replica-0-3-2", number=17, turn=turn)`."""

    asker: str  # label of the replica, by which frames find it
    number: int  # by which it knows the answer
    turn: ModelTurn


class TurnAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to the turn that was asked for by this number, e.g. `TurnAnswer(17, EnvironmentTurn(ids=ids))`."""

    number: int
    turn: EnvironmentTurn


ToReplica: TypeAlias = PartsHeard | TurnAnswer


class TurnReceiver:
    """The end of a process of environments, with an address of its own. Raises `ConfigError` without one."""

    def __init__(self, keys: RelayKeys, host: str) -> None:
        self._post = Post(keys, host)
        self.endpoint = self._post.endpoint

    def answer(self, asked: AskedTurn, turn: EnvironmentTurn) -> None:
        """Tell a replica the answer to what it asked for, if it is connected."""
        frame = encode(TurnAnswer(asked.number, turn))
        try:
            if len(frame) <= LARGEST_ANSWER:
                self._post.send(asked.asker.encode(), frame)
        except SocketError as error:
            log.warning("an answer goes over Ray alone: %s", error)

    async def run(self, hear: Callable[[Sequence[TurnPart]], None]) -> None:
        """Have `hear` told of what comes, until cancelled. Raises what that raises."""
        try:
            while True:
                await self._post.wait()
                for sender, frame in self._post.drain(MOST_FRAMES):
                    told = read_record(PartsFrame, frame)
                    if told is None:
                        continue
                    hear(told.parts)
                    if told.number % SAY_EVERY == 0:
                        self._post.send(sender, encode(PartsHeard(told.number)))
                await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        finally:
            self._post.close()


class TurnSender:
    """A replica's end of the way to one process; it connects with the first part.

    `find` gives the address that the process has now, once there is one, `connect` connects to it, and `answered`
    is told of answers.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[str]],
        connect: Callable[[str], Peer],
        answered: Callable[[TurnAnswer], None],
    ) -> None:
        self._find = find
        self._connect = connect
        self._answered = answered
        self._peer: Peer | None = None
        self._endpoint = ""
        self._number = 0  # of the last frame
        self._heard = 0  # frames that have come, or were given up
        self._gathered: list[TurnPart] = []
        self._task: asyncio.Task[None] | None = None  # that sends what could not be sent at once
        self._listening: asyncio.Task[None] | None = None  # to the process, while there is a connection

    def send(self, parts: Sequence[TurnPart]) -> None:
        """Have parts sent, in their order: at once, or as soon as the process takes them."""
        self._gathered += parts
        if (self._task is None or self._task.done()) and not self._sent():
            self._task = asyncio.get_running_loop().create_task(self._bring(), name="turn-parts")

    def close(self) -> None:
        """End the connection."""
        if self._task is not None:
            self._task.cancel()
        self._disconnect()

    @property
    def _ahead(self) -> int:
        """Frames of which nobody has said that they came."""
        return self._number - self._heard

    def _sent(self) -> bool:
        """Send all that has gathered; False while there is no connection, or it is too far ahead."""
        if self._peer is None or self._ahead >= MOST_AHEAD:
            return False
        try:
            if not self._peer.send(encode(PartsFrame(self._number + 1, self._gathered))):
                return False
        except SocketError as error:
            log.warning("what is sampled is not told: %s", error)
            return False
        self._number += 1
        self._gathered = []
        return True

    async def _bring(self) -> None:
        """Send what gathers until nothing is left; what is not taken in time comes with whole turns alone."""
        while self._gathered:
            try:
                async with asyncio.timeout(AWAY_S):
                    await self._reach()
            except Exception as error:  # noqa: BLE001 - whatever it is, no turn depends on it
                log.info("what is sampled was not heard: %s", str(error) or type(error).__name__)
                self._gathered, self._heard = [], self._number

    async def _reach(self) -> None:
        endpoint = await self._find()
        is_deaf = self._listening is None or self._listening.done()
        if endpoint != self._endpoint or is_deaf:
            self._disconnect()
            self._peer, self._endpoint, self._heard = self._connect(endpoint), endpoint, self._number
            self._listening = asyncio.get_running_loop().create_task(self._listen(self._peer), name="turn-answers")
        while not self._sent():  # noqa: ASYNC110 (nobody tells when the connection is there)
            await asyncio.sleep(UNSENT_S)

    async def _listen(self, peer: Peer) -> None:
        try:
            while True:
                await peer.wait()
                for frame in peer.drain(MOST_FRAMES):
                    self._take(read_record(ToReplica, frame))  # type: ignore[arg-type]
                await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        except SocketError as error:
            log.warning("a process of environments is not heard: %s", error)

    def _take(self, told: ToReplica | None) -> None:
        match told:
            case PartsHeard(number):
                self._heard = max(self._heard, min(number, self._number))
            case TurnAnswer():
                self._answered(told)

    def _disconnect(self) -> None:
        if self._listening is not None:
            self._listening.cancel()
        if self._peer is not None:
            self._peer.close()
        self._listening = self._peer = None


# ---- the environments of a replica


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
