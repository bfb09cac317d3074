"""The controller's end of the link: reports of all replicas arrive on one socket, and commands leave from it.

Owned by `workers.replicas`. A `ReplicaConnection` belongs to one life of a replica:

    open    -> running  its process has started (`mark_started`), or sent a frame: silence counts from now on
    running -> lost     it was silent for too long, or its owner calls `lose`
    any     -> closed   its process has ended (`close`), or the hub has

The hub accepts each report of an open connection once, in order, and only then acknowledges it. Commands reach the
replica once, in the order of `send_command`, or are lost with its process. A closed connection delivers nothing
more (`tests/link/test_faults.py`).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec

from laminar_py.records.codec import encode
from laminar_py.records.replica import ReplicaReport, Survey
from laminar_py.relay.sockets import MAX_FRAME_BYTES, PeerServer, read_record
from laminar_py.runtime.link.messages import (
    MOST_LABEL,
    CallOff,
    Command,
    CommandFrame,
    Expect,
    Look,
    Reply,
    ReportFrame,
)

CHECK_S = 0.5  # at most, between two checks for silent connections and for commands to resend
MOST_BEHIND_S = 5.0  # by which a check is postponed while more frames wait
RESEND_S = 8.0  # until commands are sent again: longer than a replica is quiet, since reports acknowledge them
MOST_FRAMES = 128  # received at once: replicas resend frames that wait in the socket for long
MOST_REPORTS = 16  # processed before the event loop gets its turn
MOST_REST_S = 0.02  # in which reports gather, where there are many
FRAME_BYTES = MAX_FRAME_BYTES // 8  # of commands in one frame, unless one alone is larger
MOST_COMMAND_BYTES = MAX_FRAME_BYTES - 1024  # the frame has a head


class ReplicaConnection:
    """The controller's end of one life of a replica; `lost` gets the reason when the replica is given up."""

    def __init__(self, hub: "ReplicaHub", label: str, replica: int) -> None:
        self.replica = replica
        self.label = label
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reports_received = 0  # number of the last report that was processed
        self.last_frame_s: float | None = None  # when the last frame arrived; None before the process has started
        self._came = 0  # number of the last report that arrived
        self._hub = hub
        self._number = 0  # of the newest command
        self._sent = 0  # number of the last command that was sent
        self._sent_s: float | None = None  # when the first of the unacknowledged commands was sent
        self._unacknowledged: deque[tuple[int, bytes]] = deque()  # commands with their numbers
        self._ids = count()
        self._requests: dict[int, asyncio.Future[Reply | None]] = {}
        self._closed = False

    def send_command(self, command: Command) -> None:
        """Send a command at the end of this event loop turn, or once the replica is connected.

        A command to a closed connection is dropped.
        """
        data = encode(command)
        size = len(data)
        assert size <= MOST_COMMAND_BYTES, f"{type(command).__name__} of {size} bytes for {self.label}: split it"
        if not self._closed:
            self._number += 1
            self._unacknowledged.append((self._number, data))
            self._hub.send_soon(self)

    async def request_survey(self, *, within_s: float | None = None) -> Survey | None:
        """Return a survey of the replica's trajectories; None if its process ends or `within_s` passes first."""
        reply = await self._request(Look(next(self._ids)), within_s)
        return None if reply is None else reply.survey

    async def expect(self, version: int, trajectory_ids: Sequence[str], *, within_s: float | None = None) -> bool:
        """Return True if the replica promises to keep `version` until these trajectories arrive or are called off.

        A late answer counts as no: a `CallOff` follows the question after `within_s`.
        """
        reply = await self._request(Expect(next(self._ids), version, list(trajectory_ids)), within_s)
        if reply is None:
            self.send_command(CallOff(list(trajectory_ids)))
        return reply is not None and reply.promised

    def lose(self, reason: str) -> None:
        """Set `lost` to the reason, by which the owner of the connection ends the replica."""
        if not self.lost.done():
            self.lost.set_result(reason)

    # ---- what the hub calls

    def receive(self, up: ReportFrame, now: float) -> bool:
        """Process the acknowledgements in a frame; return True if its report is next in order."""
        self.last_frame_s = now
        received = min(up.commands_received, self._number)
        if self._unacknowledged and self._unacknowledged[0][0] <= received:
            while self._unacknowledged and self._unacknowledged[0][0] <= received:
                self._unacknowledged.popleft()
            self._sent_s = now if self._unacknowledged else None
        if self._number > self._sent or up.number <= self.reports_received:
            self._hub.send_soon(self)  # commands that could not be sent before, or a lost acknowledgement
        if up.number != self._came + 1:
            return False
        self._came = up.number
        return True

    def acknowledge(self, up: ReportFrame) -> None:
        """Acknowledge a processed report, and pass its answers to the callers that wait for them."""
        self.reports_received = up.number
        for answer in up.answers:
            future = self._requests.pop(answer.id, None)
            if future is not None and not future.done():
                future.set_result(answer)
        if not self._closed:
            self._hub.send_soon(self)

    def is_overdue(self, now: float) -> bool:
        """Return True if commands were sent long ago, and are not acknowledged."""
        return self._sent_s is not None and now > self._sent_s + RESEND_S

    def next_frames(self, now: float) -> list[CommandFrame]:
        """Return the frames to send now: commands that are not sent yet, or are overdue."""
        if self.is_overdue(now):
            self.mark_unsent()
        frames, batch, size = list[CommandFrame](), list[msgspec.Raw](), 0
        for number, command in self._unacknowledged:
            if number <= self._sent:
                continue
            if batch and size + len(command) > FRAME_BYTES:
                frames.append(CommandFrame(self.reports_received, number - len(batch), tuple(batch)))
                batch, size = [], 0
            batch.append(msgspec.Raw(command))
            size += len(command)
        if batch and self._sent_s is None:
            self._sent_s = now
        self._sent = self._number
        return [*frames, CommandFrame(self.reports_received, self._number + 1 - len(batch), tuple(batch))]

    def mark_unsent(self) -> None:
        """Send all unacknowledged commands with the next frames, since the frames sent before may be lost."""
        self._sent = self._number - len(self._unacknowledged)
        self._sent_s = None

    def close(self) -> None:
        """End all waiting and later requests without an answer; drop later commands."""
        self._closed = True
        for future in self._requests.values():
            if not future.done():
                future.set_result(None)
        self._requests.clear()
        self._unacknowledged.clear()

    async def _request(self, question: Look | Expect, within_s: float | None) -> Reply | None:
        """Send a question and return its answer; None if the connection closes or `within_s` passes first."""
        if self._closed:
            return None
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._requests[question.id] = answer
        self.send_command(question)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._requests.pop(question.id, None)


class ReplicaHub:
    """Serves all connections; awaits `on_reports` with the reports that arrive together.

    A connection silent for `heartbeat_timeout_s` is lost.
    """

    def __init__(
        self,
        server: PeerServer,
        *,
        on_reports: Callable[[Sequence[tuple[ReplicaConnection, ReplicaReport]]], Awaitable[None]],
        heartbeat_timeout_s: float,
    ) -> None:
        self._server = server
        self._on_reports = on_reports
        self._patience_s = heartbeat_timeout_s
        self._check_s = min(CHECK_S, heartbeat_timeout_s / 8)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[bytes, ReplicaConnection] = {}
        self._to_send: dict[ReplicaConnection, None] = {}
        self._due = False  # `_send_due` runs at the end of this event loop turn
        self._checked_s = self._loop.time()
        self._processing = asyncio.Lock()  # held while reports are processed

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
        if connection.last_frame_s is None:
            connection.last_frame_s = self._loop.time()

    async def close(self, connection: ReplicaConnection) -> None:
        """Close a connection; return when the reports that arrived before are processed."""
        self._drop(connection)
        async with self._processing:
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
            self._check_connections()

    def end(self) -> None:
        """Close all connections, and the socket, for which the garbage collector would otherwise wait forever."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._server.close()

    def _drop(self, connection: ReplicaConnection) -> None:
        self._connections.pop(connection.label.encode(), None)
        self._to_send.pop(connection, None)
        connection.close()

    async def _receive(self) -> None:
        """Receive at most `MOST_FRAMES` frames, and process their reports."""
        frames: list[tuple[ReplicaConnection, ReportFrame]] = []
        now = self._loop.time()
        for sender, frame in self._server.drain(MOST_FRAMES):
            connection = self._connections.get(sender)
            up = None if connection is None else read_record(ReportFrame, frame)
            if connection is None or up is None:
                continue
            if connection.receive(up, now):
                frames.append((connection, up))
        async with self._processing:
            for first in range(0, len(frames), MOST_REPORTS):
                batch = frames[first : first + MOST_REPORTS]
                await self._on_reports([(connection, up.report) for connection, up in batch])
                for connection, up in batch:
                    connection.acknowledge(up)
                await asyncio.sleep(0)

    def _check_connections(self) -> None:
        """Lose silent connections, and resend overdue commands, unless more frames wait."""
        now = self._loop.time()
        behind = self._server.has_more and now < self._checked_s + MOST_BEHIND_S
        if behind or now < self._checked_s + self._check_s:
            return
        stalled = now > self._checked_s + self._patience_s / 2  # this process stood still, not the replicas
        self._checked_s = now
        for connection in self._connections.values():
            if connection.last_frame_s is not None:
                if stalled:
                    connection.last_frame_s = now
                elif now > connection.last_frame_s + self._patience_s:
                    connection.lose(f"no report in supervisor.heartbeat_timeout_s={self._patience_s:g} s")
            if connection.is_overdue(now):
                self.send_soon(connection)

    def _send_due(self) -> None:
        """Send the due frames; commands for a replica without a connection wait until it sends a frame again."""
        self._due = False
        connections, self._to_send = self._to_send, {}
        for connection in connections:
            for down in connection.next_frames(self._loop.time()):
                if not self._server.send(connection.label.encode(), encode(down)):
                    connection.mark_unsent()
                    break
