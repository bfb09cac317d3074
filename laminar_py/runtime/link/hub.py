"""The controller's end of the link: reports of all replicas arrive on one socket, and commands leave from it.

Owned by `workers.replicas`. A `ReplicaConnection` belongs to one life of a replica:

    open    -> running  its process has started (`mark_started`), or sent a frame: silence counts from now on
    running -> lost     it was silent for too long, or its owner calls `lose`
    any     -> closed   its process has ended (`close`), or the hub has

The hub accepts each report of an open connection once, in order, and only then acknowledges it. Commands reach the
replica once, in the order of `send_command`, or are lost with its process. A closed connection delivers nothing
more (`tests/link/test_faults.py`). The work of the hub grows with the number of frames, not of replicas.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec

from laminar_py.records.codec import encode
from laminar_py.records.replica import ReplicaReport, Survey
from laminar_py.relay.sockets import MAX_FRAME_BYTES, PeerServer, read_record
from laminar_py.runtime.link.messages import MOST_LABEL, CallOff, Command, Down, Expect, Look, Reply, Up

CHECK_S = 0.5  # at most, between two checks for silent connections and for commands to resend
MOST_BEHIND_S = 5.0  # by which a check is postponed while more frames wait
RESEND_S = 2.0  # after which commands without an acknowledgement are sent again
MOST_FRAMES = 128  # received at once: replicas resend frames that wait in the socket for long
MOST_REPORTS = 16  # taken in before the event loop gets its turn
MOST_REST_S = 0.02  # in which reports gather, where there are many
FRAME_BYTES = MAX_FRAME_BYTES // 8  # of commands in one frame, unless one alone is larger
MOST_COMMAND_BYTES = MAX_FRAME_BYTES - 1024  # the frame has a head


class ReplicaConnection:
    """The controller's end of one life of a replica; `lost` gets the reason when the replica is given up."""

    def __init__(self, hub: "ReplicaHub", label: str, replica: int) -> None:
        self.replica = replica
        self.label = label
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reports_received = 0  # number of the last report that was taken in
        self.commands_received = 0  # number of the last command that the replica acknowledged
        self._came = 0  # number of the last report that arrived
        self._hub = hub
        self._sent = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._number = 0  # of the newest command
        self._ids = count()
        self._requests: dict[int, asyncio.Future[Reply | None]] = {}
        self._is_there = False  # the replica has sent a frame, and every frame to it could be sent since
        self._closed = False

    def send_command(self, command: Command) -> None:
        """Send a command at the end of this event loop turn, or once the replica is connected.

        A command to a closed connection is dropped.
        """
        data = encode(command)
        size = len(data)
        assert size <= MOST_COMMAND_BYTES, (
            f"{type(command).__name__} of {size} bytes for {self.label}: share it out"
        )
        if not self._closed:
            self._number += 1
            self._unacknowledged.append((self._number, data))
            if self._is_there:
                self._hub.send_soon(self)

    async def request_survey(self, *, within_s: float | None = None) -> Survey | None:
        """Return a survey of the replica's trajectories; None if its process ends or `within_s` passes first."""
        id = next(self._ids)
        answer = await self._request(id, Look(id), within_s)
        return None if answer is None else answer.survey

    async def expect(self, version: int, trajectory_ids: Sequence[str], *, within_s: float | None = None) -> bool:
        """Return True if the replica promises to keep `version` until these trajectories arrive or are called off.

        A late answer counts as no: a `CallOff` follows the question after `within_s`.
        """
        id = next(self._ids)
        answer = await self._request(id, Expect(id, version, list(trajectory_ids)), within_s)
        if answer is None:
            self.send_command(CallOff(list(trajectory_ids)))
        return answer is not None and answer.promised

    def lose(self, reason: str) -> None:
        """Set `lost` to the reason, by which the owner of the connection ends the replica."""
        if not self.lost.done():
            self.lost.set_result(reason)

    # ---- what the hub calls

    def receive(self, up: Up) -> bool:
        """Process a frame; return True if it has a report that is next in order."""
        self._is_there = True
        self.commands_received = max(self.commands_received, min(up.commands_received, self._number))
        while self._unacknowledged and self._unacknowledged[0][0] <= self.commands_received:
            self._unacknowledged.popleft()
        if self._number > self._sent:
            self._hub.send_soon(self)  # it could not be sent before
        if up.report is None:
            return False
        if up.number <= self.reports_received:
            self._hub.send_soon(self)  # the acknowledgement was lost
        if up.number != self._came + 1:
            return False
        self._came = up.number
        return True

    def acknowledge(self, up: Up) -> None:
        """Acknowledge the report of a frame, and pass its answers to the callers that wait for them."""
        self.reports_received = up.number
        for answer in up.answers:
            future = self._requests.pop(answer.id, None)
            if future is not None and not future.done():
                future.set_result(answer)
        if not self._closed:
            self._hub.send_soon(self)

    def next_frames(self, *, again: bool) -> list[Down]:
        """Return the frames to send now: new commands, or with `again` all commands without an acknowledgement."""
        if again:
            self._sent = self.commands_received
        commands = [(number, command) for number, command in self._unacknowledged if number > self._sent]
        self._sent = self._number
        downs, batch, size = list[Down](), list[bytes](), 0
        for number, command in commands:
            if batch and size + len(command) > FRAME_BYTES:
                downs.append(self._down(number - len(batch), batch))
                batch, size = [], 0
            batch.append(command)
            size += len(command)
        return [*downs, self._down(self._number + 1 - len(batch), batch)]

    def mark_disconnected(self) -> None:
        """Resend all unacknowledged commands with the next frame, since the frames sent before may be lost."""
        self._sent = self.commands_received
        self._is_there = False

    def close(self) -> None:
        """End all waiting and later requests without an answer; drop later commands."""
        self._closed = True
        for future in self._requests.values():
            if not future.done():
                future.set_result(None)
        self._requests.clear()
        self._unacknowledged.clear()

    @property
    def has_unacknowledged(self) -> bool:
        """True while the replica has not acknowledged all commands."""
        return bool(self._unacknowledged)

    def _down(self, first: int, commands: Sequence[bytes]) -> Down:
        return Down(self.reports_received, first, tuple(map(msgspec.Raw, commands)))

    async def _request(self, id: int, question: Look | Expect, within_s: float | None) -> Reply | None:
        """Send a question and return its answer; None if the connection closes or `within_s` passes first."""
        if self._closed:
            return None
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._requests[id] = answer
        self.send_command(question)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._requests.pop(id, None)


class ReplicaHub:
    """Serves all connections; awaits `on_reports` with the reports that arrive together.

    A connection silent for `patience_s` is lost.
    """

    def __init__(
        self,
        server: PeerServer,
        *,
        on_reports: Callable[[Sequence[tuple[ReplicaConnection, ReplicaReport]]], Awaitable[None]],
        patience_s: float,
    ) -> None:
        self._server = server
        self._on_reports = on_reports
        self._patience_s = patience_s
        self._check_s = min(CHECK_S, patience_s / 8)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[bytes, ReplicaConnection] = {}
        self._last_s: dict[
            ReplicaConnection, float
        ] = {}  # when the last frame of each connection arrived, the oldest first
        self._sent_s: dict[
            ReplicaConnection, float
        ] = {}  # when unacknowledged commands were sent, the oldest first
        self._to_send: dict[ReplicaConnection, None] = {}
        self._due = False  # `_send_due` runs at the end of this event loop turn
        self._checked_s = self._loop.time()
        self._taking = asyncio.Lock()  # held while reports are taken in

    @property
    def endpoint(self) -> str:
        """Address that replicas connect to."""
        return self._server.endpoint

    def open(self, label: str, replica: int) -> ReplicaConnection:
        """Open a connection for a replica that is about to start under this label, which no other has had."""
        assert 0 < len(label.encode()) <= MOST_LABEL, f"label {label!r}: longer than {MOST_LABEL} bytes, or empty"
        connection = ReplicaConnection(self, label, replica)
        self._connections[label.encode()] = connection
        return connection

    def mark_started(self, connection: ReplicaConnection) -> None:
        """Count the silence of a connection from now on: its process has started."""
        if self._connections.get(connection.label.encode()) is connection:
            self._last_s.setdefault(connection, self._loop.time())

    async def close(self, connection: ReplicaConnection) -> None:
        """Close a connection; return when the reports that arrived before are taken in."""
        self._drop(connection)
        async with self._taking:
            pass

    def send_soon(self, connection: ReplicaConnection) -> None:
        """Send the due frames of a connection at the end of this event loop turn."""
        self._to_send[connection] = None
        if not self._due:
            self._due = True
            self._loop.call_soon(self._send_due)

    async def run(self) -> None:
        """Serve until cancelled."""
        self._checked_s = self._loop.time()
        while True:
            if await self._server.wait(self._check_s):
                began = self._loop.time()
                await self._receive()
                await asyncio.sleep(min(MOST_REST_S, self._loop.time() - began))  # more frames gather meanwhile
            self._check_silence()

    def end(self) -> None:
        """Close all connections, and the socket, for which the garbage collector would otherwise wait forever."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._server.close()

    def _drop(self, connection: ReplicaConnection) -> None:
        self._connections.pop(connection.label.encode(), None)
        for times in (self._last_s, self._sent_s, self._to_send):
            times.pop(connection, None)
        connection.close()

    async def _receive(self) -> None:
        """Receive at most `MOST_FRAMES` frames, and take in their reports."""
        frames: list[tuple[ReplicaConnection, Up, ReplicaReport]] = []
        now = self._loop.time()
        for sender, frame in self._server.drain(MOST_FRAMES):
            connection = self._connections.get(sender)
            up = None if connection is None else read_record(Up, frame)
            if connection is None or up is None or up.label != connection.label:
                continue
            _move_to_end(self._last_s, connection, now)
            if self._receive_frame(connection, up, now) and up.report is not None:
                frames.append((connection, up, up.report))
        async with self._taking:
            for first in range(0, len(frames), MOST_REPORTS):
                batch = frames[first : first + MOST_REPORTS]
                await self._on_reports([(connection, report) for connection, _, report in batch])
                for connection, up, _ in batch:
                    connection.acknowledge(up)
                await asyncio.sleep(0)

    def _receive_frame(self, connection: ReplicaConnection, up: Up, now: float) -> bool:
        """Pass a frame to its connection; return True if its report is next in order.

        If the frame acknowledges commands, the time to resend the other commands starts again.
        """
        received = connection.commands_received
        has_report = connection.receive(up)
        if (
            connection.commands_received > received
            and self._sent_s.pop(connection, None) is not None
            and connection.has_unacknowledged
        ):
            self._sent_s[connection] = now
        return has_report

    def _check_silence(self) -> None:
        """Lose silent connections, and resend commands without an acknowledgement, unless more frames wait."""
        now = self._loop.time()
        behind = self._server.has_more and now < self._checked_s + MOST_BEHIND_S
        if behind or now < self._checked_s + self._check_s:
            return
        if now > self._checked_s + self._patience_s / 2:
            self._last_s = dict.fromkeys(self._last_s, now)  # this process stood still, not the replicas
        self._checked_s = now
        while self._last_s and (oldest := next(iter(self._last_s.items())))[1] < now - self._patience_s:
            del self._last_s[oldest[0]]
            oldest[0].lose(f"no report in {self._patience_s:g} s")
        while self._sent_s and (late := next(iter(self._sent_s.items())))[1] < now - RESEND_S:
            self._send(late[0], again=True)

    def _send_due(self) -> None:
        self._due = False
        connections, self._to_send = self._to_send, {}
        for connection in connections:
            self._send(connection, again=False)

    def _send(self, connection: ReplicaConnection, *, again: bool) -> None:
        """Send the due frames of a connection; if it is not connected, they wait for its next frame."""
        for down in connection.next_frames(again=again):
            if not self._server.send(connection.label.encode(), encode(down)):
                connection.mark_disconnected()
                self._sent_s.pop(connection, None)
                return
            if again or (down.commands and connection not in self._sent_s):
                _move_to_end(self._sent_s, connection, self._loop.time())


def _move_to_end(times: dict[ReplicaConnection, float], connection: ReplicaConnection, now: float) -> None:
    times.pop(connection, None)
    times[connection] = now
