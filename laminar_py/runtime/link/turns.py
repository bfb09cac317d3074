"""Turns between replicas and environment processes: one socket per process, which all replicas connect to.

    replica -> process  AskedTurn(number, turn)   sent again to the next process, or after a while, until answered
    process -> replica  TurnAnswer(number, turn)   the same answer to each repetition
    replica -> process  Forget(trajectory_ids)     these trajectories have ended

A process leaves the address of its socket in the run's folder. A replica finds a process that restarted there. All
replicas choose the same process for a trajectory, so a turn that moved to another replica reaches the same
environment (`tests/link/test_turns.py`).
"""

import asyncio
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
from blake3 import blake3

from laminar_py.records.codec import encode
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.records.host import write_file
from laminar_py.relay.messages import RelayKeys
from laminar_py.relay.sockets import PeerClient, PeerServer, SocketFactory, read_record

if TYPE_CHECKING:
    from laminar_py.environment.host import EnvironmentHost

MOST_FRAMES = 16  # received before the event loop gets its turn
UNSENT_S = 0.02  # between two attempts to send over a connection that is not up yet
FIND_S = 0.1  # between two looks for a process that has not started
LOOK_S = 1.0  # between two looks at the address of a process
RESEND_S = 30.0  # after which a turn without an answer is sent again: a broken connection loses frames
ADDRESSES = "environments/addresses"  # in the run's folder


class AskedTurn(msgspec.Struct, frozen=True, tag="turn"):
    """A turn to answer, e.g. `AskedTurn(17, turn)`; the replica knows the answer by the number."""

    number: int
    turn: ModelTurn


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Delete the environments of these trajectories."""

    trajectory_ids: list[str]


class TurnAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to the turn with this number, e.g. `TurnAnswer(17, EnvironmentTurn(ids=ids))`."""

    number: int
    turn: EnvironmentTurn


ToProcess: TypeAlias = AskedTurn | Forget


# ---- the process of environments


class TurnServer:
    """The socket of environment process `index`; a file in the run's folder has its address.

    Raises `ConfigError` if it cannot listen, `OSError` if it cannot write the file.
    """

    def __init__(self, keys: RelayKeys, host: str, *, run_dir: Path, index: int) -> None:
        self._server = PeerServer(keys, host)
        self._answering = set[tuple[bytes, int]]()  # turns in work: name of the replica's socket, number
        folder = run_dir / ADDRESSES
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = folder / f"{index}.tmp"
        write_file(unfinished, self._server.endpoint.encode())
        unfinished.replace(folder / str(index))

    async def run(self, host: "EnvironmentHost") -> None:
        """Have `host` answer turns until cancelled. Raises the host's error, in an `ExceptionGroup`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._server.wait()
                    for sender, frame in self._server.drain(MOST_FRAMES):
                        record = read_record(ToProcess, frame, sender)  # type: ignore[arg-type]
                        self._receive(sender, record, host, tasks)
                    await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        finally:
            self._server.close()

    def _receive(
        self, sender: bytes, message: ToProcess | None, host: "EnvironmentHost", tasks: asyncio.TaskGroup
    ) -> None:
        """Start to answer a turn, or delete the environments of ended trajectories; ignore an unreadable message.

        A turn in work is not started again. A repetition after the answer gets the same answer from the host.
        """
        match message:
            case AskedTurn(number, turn) if (sender, number) not in self._answering:
                self._answering.add((sender, number))
                tasks.create_task(self._answer(sender, number, turn, host), name=f"turn-{turn.trajectory_id}")
            case Forget(trajectory_ids):
                host.forget(trajectory_ids)

    async def _answer(self, sender: bytes, number: int, turn: ModelTurn, host: "EnvironmentHost") -> None:
        """Send the host's answer to a replica; a replica that misses the answer sends its turn again."""
        answer = await host.answer(turn)
        self._answering.discard((sender, number))
        self._server.send(sender, encode(TurnAnswer(number, answer)))


# ---- a replica


class EnvironmentLink:
    """A replica's connection to environment process `index`, whose address is in a file of the run's folder."""

    def __init__(self, run_dir: Path, index: int, wire: SocketFactory, label: str) -> None:
        self._address, self._name = run_dir / ADDRESSES / str(index), str(index)
        self._connect = partial(PeerClient, wire, name=label)
        self._peer: PeerClient | None = None
        self._endpoint = ""
        self._asked: dict[int, tuple[bytes, asyncio.Future[EnvironmentTurn]]] = {}  # frame, answer
        self._unsent: dict[int, bytes] = {}  # frames of asked turns, by number
        self._numbers = count()
        self._resend_s = 0.0  # when asked turns are sent again
        self._looked_s = 0.0  # when the address was read last
        self._task: asyncio.Task[None] | None = None

    async def send_turn(self, turn: ModelTurn) -> EnvironmentTurn:
        """Send a turn until the process answers, across its restarts; return the answer. Raises `SocketError`."""
        number = next(self._numbers)
        answer: asyncio.Future[EnvironmentTurn] = asyncio.get_running_loop().create_future()
        frame = encode(AskedTurn(number, turn))
        self._asked[number], self._unsent[number] = (frame, answer), frame
        try:
            self._send_due()
            return await answer
        finally:
            del self._asked[number]
            self._unsent.pop(number, None)

    def forget(self, trajectory_id: str) -> None:
        """Ask the process to delete an environment; if the frame is lost, the controller's sweep deletes it."""
        if self._peer is not None:
            self._peer.send(encode(Forget([trajectory_id])))

    def close(self) -> None:
        """Stop to follow the process, and close the connection; a waiting `send_turn` gets no answer."""
        if self._task is not None:
            self._task.cancel()
        if self._peer is not None:
            self._peer.close()

    def _send_due(self) -> None:
        """Send unsent turns while the connection takes them; start the sending task, or raise its error."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"environment-{self._name}")
        if self._task.done():
            self._task.result()
        if self._peer is None:
            return
        for number, frame in list(self._unsent.items()):
            if not self._peer.send(frame):
                return
            del self._unsent[number]

    async def _run(self) -> None:
        """Follow the process, send turns, receive answers until cancelled; an error also ends waiting turns."""
        try:
            while True:
                await self._follow()
                self._send_due_again()
                if self._peer is None:
                    await asyncio.sleep(FIND_S)
                elif await self._peer.wait(UNSENT_S if self._unsent else LOOK_S):
                    for frame in self._peer.drain(MOST_FRAMES):
                        self._receive(read_record(TurnAnswer, frame, "an environment process"))
                    await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        except Exception as error:
            for _, answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(error)
            raise

    async def _follow(self) -> None:
        """Connect to the process at its present address; at a new address all unanswered turns are due again.

        Does nothing within `LOOK_S` of the last look, or while a connected process has no turn to answer.
        """
        now = time.monotonic()
        if self._peer is not None and (now < self._looked_s + LOOK_S or not self._asked):
            return
        self._looked_s = now
        try:
            endpoint = await asyncio.to_thread(self._address.read_text)
        except OSError:  # the process has not started yet
            return
        if endpoint != self._endpoint:
            if self._peer is not None:
                self._peer.close()
            self._peer, self._endpoint = self._connect(endpoint), endpoint
            self._resend_s = now  # `_send_due_again` sends all turns to the new process

    def _send_due_again(self) -> None:
        """Send unsent turns, and at the time `_resend_s` all turns without an answer."""
        now = time.monotonic()
        if now >= self._resend_s:
            self._resend_s = now + RESEND_S
            self._unsent = {number: frame for number, (frame, _) in self._asked.items()}
        self._send_due()

    def _receive(self, message: TurnAnswer | None) -> None:
        """Pass an answer to its waiting `send_turn`; ignore an unreadable message or a second answer."""
        if message is not None and message.number in self._asked:
            answer = self._asked[message.number][1]
            if not answer.done():
                answer.set_result(message.turn)


class RemoteEnvironments:
    """A replica's environments, in `workers` other processes; `label` is unique to the replica's process."""

    def __init__(self, run_dir: Path, workers: int, wire: SocketFactory, label: str) -> None:
        self._links = [EnvironmentLink(run_dir, index, wire, label) for index in range(workers)]

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Return the environment's answer to a turn; its `elapsed_s` includes the time of transport."""
        began = time.monotonic()
        answer = await self._link_of(turn.trajectory_id).send_turn(turn)
        return msgspec.structs.replace(answer, elapsed_s=time.monotonic() - began)

    async def forget(self, trajectory_id: str) -> None:
        """Request that the environment of an ended and stored trajectory is deleted."""
        self._link_of(trajectory_id).forget(trajectory_id)

    def close(self) -> None:
        """End the connections to the environment processes."""
        for link in self._links:
            link.close()

    def _link_of(self, trajectory_id: str) -> EnvironmentLink:
        """Return the link to a trajectory's process; a hash of the id gives the same process to every replica."""
        index = int.from_bytes(blake3(trajectory_id.encode()).digest(length=8), "little") % len(self._links)
        return self._links[index]
