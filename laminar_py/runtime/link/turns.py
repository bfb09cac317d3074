"""Environments as a replica reaches them, and turns that are streamed to them while they are sampled.

A replica calls the process of an environment by name (`RemoteEnvironments`), and repeats the call on the next
process of that name until there is an answer. All replicas choose the same process for a trajectory, so a turn
that moved to another replica reaches the same environment.

Environments that listen also get the tokens of a turn over a socket, as frames from the replica. The process
acknowledges every eighth frame, and a replica stays at most `MOST_AHEAD` frames ahead; tokens gather meanwhile for
the next frame. So a busy process gets fewer frames, and no socket holds more than these. The answer may come back
as a frame before the call returns. No turn depends on a frame: a lost frame costs nothing but time, since the call
has the whole turn (`tests/link/test_turns.py`).
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
from laminar_py.relay.sockets import PeerClient, PeerServer, RelayKeys, SocketError, SocketFactory, read_record
from laminar_py.runtime.cluster.backend import NamedPart

log = logging.getLogger(__name__)

ACKNOWLEDGE_EVERY = 8  # frames
MOST_AHEAD = 4 * ACKNOWLEDGE_EVERY  # far below what a socket takes in before it stops reading
MOST_FRAMES = 16  # received before the event loop gets its turn
UNSENT_S = 0.01  # between two tries to send to a process that is busy, or not connected yet
LARGEST_ANSWER = 2**20  # bytes; a longer answer comes by the call alone
AWAY_S = 5.0  # after which tokens that a process does not take are dropped


class PartsFrame(msgspec.Struct, frozen=True):
    """Parts of turns from one replica, in a frame with its number; the first is 1."""

    number: int
    parts: list[TurnPart]


class PartsHeard(msgspec.Struct, frozen=True, tag="heard"):
    """Acknowledgement of all frames up to this number, e.g. `PartsHeard(8)`."""

    number: int


class AskedTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A call for the answer to a turn, e.g. `AskedTurn(asker="replica-0-3-2", number=17, turn=turn)`."""

    asker: str  # label of the replica, by which frames find it
    number: int  # by which it knows the answer
    turn: ModelTurn


class TurnAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to the call with this number, e.g. `TurnAnswer(17, EnvironmentTurn(ids=ids))`."""

    number: int
    turn: EnvironmentTurn


ToReplica: TypeAlias = PartsHeard | TurnAnswer


class TurnReceiver:
    """The environment process's socket for frames of replicas. Raises `ConfigError` if it cannot listen."""

    def __init__(self, keys: RelayKeys, host: str) -> None:
        self._post = PeerServer(keys, host)
        self.endpoint = self._post.endpoint

    def answer(self, asked: AskedTurn, turn: EnvironmentTurn) -> None:
        """Send the answer to a replica as a frame, if it is connected."""
        frame = encode(TurnAnswer(asked.number, turn))
        try:
            if len(frame) <= LARGEST_ANSWER:
                self._post.send(asked.asker.encode(), frame)
        except SocketError as error:
            log.warning("an answer is sent without a frame: %s", error)

    async def run(self, hear: Callable[[Sequence[TurnPart]], None]) -> None:
        """Call `hear` with the parts of each frame until cancelled. Raises the error that `hear` raises."""
        try:
            while True:
                await self._post.wait()
                for sender, frame in self._post.drain(MOST_FRAMES):
                    told = read_record(PartsFrame, frame)
                    if told is None:
                        continue
                    hear(told.parts)
                    if told.number % ACKNOWLEDGE_EVERY == 0:
                        self._post.send(sender, encode(PartsHeard(told.number)))
                await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        finally:
            self._post.close()


class TurnSender:
    """A replica's connection to one environment process; it connects with the first part.

    `find` waits for the address of the process, `connect` connects to it, and `answered` gets the answers.
    """

    def __init__(
        self,
        find: Callable[[], Awaitable[str]],
        connect: Callable[[str], PeerClient],
        answered: Callable[[TurnAnswer], None],
    ) -> None:
        self._find = find
        self._connect = connect
        self._answered = answered
        self._peer: PeerClient | None = None
        self._endpoint = ""
        self._number = 0  # of the last frame
        self._heard = 0  # frames that were acknowledged, or given up
        self._gathered: list[TurnPart] = []
        self._task: asyncio.Task[None] | None = None  # sends parts that could not be sent at once
        self._listening: asyncio.Task[None] | None = None  # to the process, while there is a connection

    def send_parts(self, parts: Sequence[TurnPart]) -> None:
        """Send parts in their order: at once, or as soon as the process takes them."""
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
        """Number of frames without an acknowledgement."""
        return self._number - self._heard

    def _sent(self) -> bool:
        """Send the gathered parts; return False without a connection, or too far ahead of the acknowledgements."""
        if self._peer is None or self._ahead >= MOST_AHEAD:
            return False
        try:
            if not self._peer.send(encode(PartsFrame(self._number + 1, self._gathered))):
                return False
        except SocketError as error:
            log.warning("parts of turns are not sent: %s", error)
            return False
        self._number += 1
        self._gathered = []
        return True

    async def _bring(self) -> None:
        """Send gathered parts until none is left; drop those that the process does not take in time."""
        while self._gathered:
            try:
                async with asyncio.timeout(AWAY_S):
                    await self._reach()
            except Exception as error:  # noqa: BLE001 - whatever it is, no turn depends on it
                log.info("parts of turns were dropped: %s", str(error) or type(error).__name__)
                self._gathered, self._heard = [], self._number

    async def _reach(self) -> None:
        endpoint = await self._find()
        is_deaf = self._listening is None or self._listening.done()
        if endpoint != self._endpoint or is_deaf:
            self._disconnect()
            self._peer, self._endpoint, self._heard = self._connect(endpoint), endpoint, self._number
            self._listening = asyncio.get_running_loop().create_task(self._listen(self._peer), name="turn-answers")
        while not self._sent():  # noqa: ASYNC110 (no event says when the connection is up)
            await asyncio.sleep(UNSENT_S)

    async def _listen(self, peer: PeerClient) -> None:
        try:
            while True:
                await peer.wait()
                for frame in peer.drain(MOST_FRAMES):
                    self._take(read_record(ToReplica, frame))  # type: ignore[arg-type]
                await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        except SocketError as error:
            log.warning("no answers come from an environment process: %s", error)

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
    """Environments in processes of these names; `label` is unique to this life of the replica."""

    def __init__(self, names: Sequence[str], wire: SocketFactory, label: str) -> None:
        self._actors = [NamedPart(name) for name in names]
        self._label = label
        self._numbers = count()
        self._awaited: dict[int, asyncio.Future[EnvironmentTurn]] = {}  # by the number of the call
        connect = partial(PeerClient, wire, name=label)
        self._senders = [
            TurnSender(partial(_turns_address, actor), connect, self._answered) for actor in self._actors
        ]

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Return the environment's answer to a turn; `elapsed_s` includes the time of transport."""
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
        """Stream parts of turns to environments that listen, without waiting."""
        told: dict[int, list[TurnPart]] = {}
        for part in parts:
            told.setdefault(self._process(part.trajectory_id), []).append(part)
        for process, its in told.items():
            self._senders[process].send_parts(its)

    async def forget(self, trajectory_id: str) -> None:
        """Have the environment of a trajectory that has ended and is stored deleted."""
        await self._actors[self._process(trajectory_id)].call("forget", [trajectory_id])

    def close(self) -> None:
        """End the connections to the environment processes."""
        for sender in self._senders:
            sender.close()

    def _answered(self, answer: TurnAnswer) -> None:
        awaited = self._awaited.get(answer.number)
        if awaited is not None and not awaited.done():
            awaited.set_result(answer.turn)

    def _process(self, trajectory_id: str) -> int:
        """Return the index of the process that has a trajectory."""
        return int.from_bytes(blake3(trajectory_id.encode()).digest(length=8), "little") % len(self._actors)


async def _call(actor: NamedPart, asked: AskedTurn, answer: asyncio.Future[EnvironmentTurn]) -> None:
    """Call for an answer and set it, unless a frame has brought it before."""
    try:
        data = await actor.call("answer", asked)
        assert isinstance(data, bytes), "a turn travels as bytes"
        turn = decode(EnvironmentTurn, data)
    except Exception as error:  # noqa: BLE001 - `answer` raises it
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(turn)
    finally:
        answer.cancel()  # which is done, unless the call was cancelled


async def _turns_address(actor: NamedPart) -> str:
    return str(await actor.call("turns_address"))
