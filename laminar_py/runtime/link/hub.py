"""The controller's end of the link: reports of all replicas arrive on one socket, and commands leave from it.

Owned by `workers.replicas`. A `ReplicaConnection` belongs to one life of a replica:

    open    -> running  its process has started (`mark_started`), or sent a frame: silence counts from now on
    running -> lost     it was silent for too long, or its owner calls `lose`
    any     -> closed   its owner closes it after the process has ended (`ReplicaHub.close`), or the hub ends

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
from laminar_py.records.engine import PauseMode
from laminar_py.records.replica import ReplicaReport, Survey
from laminar_py.relay.sockets import MAX_FRAME_BYTES, PeerServer, read_record
from laminar_py.runtime.link import messages as m

CHECK_S = 0.5  # at most, between two checks for silent connections and for commands to resend
MOST_BEHIND_S = 5.0  # longest delay of a check while more frames wait
RESEND_S = 8.0  # before commands are resent: longer than a replica is quiet, since its reports acknowledge them
MOST_FRAMES = 128  # received at once: replicas resend frames that wait in the socket for long
MOST_REPORTS = 16  # processed before the event loop gets its turn
MOST_REST_S = 0.02  # longest pause after frames, in which further frames gather
FRAME_BYTES = MAX_FRAME_BYTES // 8  # of commands in one frame, unless one alone is larger
MOST_COMMAND_BYTES = MAX_FRAME_BYTES - 1024  # the frame has a head


class ReplicaConnection:
    """The controller's end of the link to one process of a replica; `lost` gets the reason to replace it."""

    def __init__(self, hub: "ReplicaHub", label: str, replica: int) -> None:
        self.replica = replica
        self.label = label
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reports_received = 0  # number of the last report that was processed
        self.last_frame_s: float | None = None  # when the last frame arrived; None before the process has started
        self._last_arrived = 0  # number of the last report that arrived
        self._hub = hub
        self._newest = 0  # number of the newest command
        self._last_sent = 0  # number of the last command that was sent
        self._waiting_since_s: float | None = None  # since when sent commands wait; None if none does
        self._unacknowledged: deque[tuple[int, bytes]] = deque()  # commands with their numbers
        self._ids = count()
        self._requests: dict[int, asyncio.Future[m.Reply | None]] = {}
        self._closed = False

    def send_command(self, command: m.Command) -> None:
        """Send a command at the end of this event loop turn, or once the replica is connected.

        A command to a closed connection is dropped.
        """
        data = encode(command)
        size = len(data)
        assert size <= MOST_COMMAND_BYTES, f"{type(command).__name__} of {size} bytes for {self.label}: split it"
        if not self._closed:
            self._newest += 1
            self._unacknowledged.append((self._newest, data))
            self._hub.send_soon(self)

    async def request_survey(self, *, within_s: float | None = None) -> Survey | None:
        """Return a survey of the replica's trajectories; None if the process ends or `within_s` (seconds) pass."""
        reply = await self._request(m.Look(next(self._ids)), within_s)
        return None if reply is None else reply.survey

    async def expect(self, version: int, trajectory_ids: Sequence[str], *, within_s: float | None = None) -> bool:
        """Return True if the replica promises to keep `version` until these trajectories arrive or are called off.

        Without an answer in `within_s` seconds, send a `CallOff` of the trajectories, and return False.
        """
        reply = await self._request(m.Expect(next(self._ids), version, list(trajectory_ids)), within_s)
        if reply is None:
            self.send_command(m.CallOff(list(trajectory_ids)))
        return reply is not None and reply.promised

    async def hold(self, mode: PauseMode) -> None:
        """Return once the replica computes nothing, or its process has ended."""
        await self._request(m.Hold(next(self._ids), mode), None)

    async def unhold(self) -> None:
        """Return once the replica computes again, or its process has ended."""
        await self._request(m.Unhold(next(self._ids)), None)

    def lose(self, reason: str) -> None:
        """Set `lost` to the first reason; the owner of the connection awaits `lost`, and replaces the process."""
        if not self.lost.done():
            self.lost.set_result(reason)

    # ---- what the hub calls

    def receive(self, frame: m.ReportFrame, now: float) -> bool:
        """Note a frame's arrival and acknowledgements; return True if its report is the next in order."""
        self.last_frame_s = now
        received = min(frame.commands_received, self._newest)
        if self._unacknowledged and self._unacknowledged[0][0] <= received:
            while self._unacknowledged and self._unacknowledged[0][0] <= received:
                self._unacknowledged.popleft()
            self._waiting_since_s = now if self._unacknowledged else None
        if self._newest > self._last_sent or frame.number <= self.reports_received:
            self._hub.send_soon(self)  # unsent commands, or an acknowledgement that the replica missed
        if frame.number != self._last_arrived + 1:
            return False
        self._last_arrived = frame.number
        return True

    def acknowledge(self, frame: m.ReportFrame) -> None:
        """Send an acknowledgement of a processed report, and pass its answers to the waiting callers."""
        self.reports_received = frame.number
        for answer in frame.answers:
            future = self._requests.pop(answer.id, None)
            if future is not None and not future.done():
                future.set_result(answer)
        if not self._closed:
            self._hub.send_soon(self)

    def is_overdue(self, now: float) -> bool:
        """Return True if sent commands wait for an acknowledgement for more than `RESEND_S`."""
        return self._waiting_since_s is not None and now > self._waiting_since_s + RESEND_S

    def next_frames(self, now: float) -> list[m.CommandFrame]:
        """Return frames with all unsent commands, and count the commands as sent. Overdue commands are unsent.

        A frame has about `FRAME_BYTES`. Each frame acknowledges the reports; the last may have no command.
        """
        if self.is_overdue(now):
            self.mark_unsent()
        frames, batch, size = list[m.CommandFrame](), list[msgspec.Raw](), 0
        for number, command in self._unacknowledged:
            if number <= self._last_sent:
                continue
            if batch and size + len(command) > FRAME_BYTES:
                frames.append(m.CommandFrame(self.reports_received, number - len(batch), tuple(batch)))
                batch, size = [], 0
            batch.append(msgspec.Raw(command))
            size += len(command)
        if batch and self._waiting_since_s is None:
            self._waiting_since_s = now
        self._last_sent = self._newest
        return [*frames, m.CommandFrame(self.reports_received, self._newest + 1 - len(batch), tuple(batch))]

    def mark_unsent(self) -> None:
        """Have `next_frames` return all unacknowledged commands again, since their frames may be lost."""
        self._last_sent = self._newest - len(self._unacknowledged)
        self._waiting_since_s = None

    def close(self) -> None:
        """End waiting and later requests without an answer; drop unacknowledged and later commands."""
        self._closed = True
        for future in self._requests.values():
            if not future.done():
                future.set_result(None)
        self._requests.clear()
        self._unacknowledged.clear()

    async def _request(
        self, question: m.Look | m.Expect | m.Hold | m.Unhold, within_s: float | None
    ) -> m.Reply | None:
        """Send a question and return the answer; None if the connection closes or `within_s` (seconds) pass."""
        if self._closed:
            return None
        answer: asyncio.Future[m.Reply | None] = asyncio.get_running_loop().create_future()
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
    """The controller's socket for all replicas, e.g. `hub.open("replica-3-1-17", 3)`; `run` serves it.

    `on_reports` gets reports that arrive together. A connection silent for `heartbeat_timeout_s` is lost.
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
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._check_s = min(CHECK_S, heartbeat_timeout_s / 8)
        self._loop = asyncio.get_running_loop()
        self._connections: dict[bytes, ReplicaConnection] = {}
        self._to_send: dict[ReplicaConnection, None] = {}
        self._due = False  # True while `_send_due` is scheduled for the end of this event loop turn
        self._checked_s = self._loop.time()
        self._processing = asyncio.Lock()  # held while reports are processed

    @property
    def endpoint(self) -> str:
        """Address that replicas connect to."""
        return self._server.endpoint

    def open(self, label: str, replica: int) -> ReplicaConnection:
        """Return a connection for a process of `replica` that is about to start; every process has a new label."""
        assert 0 < len(label.encode()) <= m.MOST_LABEL, (
            f"label {label!r}: longer than {m.MOST_LABEL} bytes, or empty"
        )
        connection = ReplicaConnection(self, label, replica)
        self._connections[label.encode()] = connection
        return connection

    def mark_started(self, connection: ReplicaConnection) -> None:
        """Start to count the silence of a connection whose process has started, unless a frame has arrived."""
        if connection.last_frame_s is None:
            connection.last_frame_s = self._loop.time()

    async def close(self, connection: ReplicaConnection) -> None:
        """Close a connection; return when the reports that arrived before are processed."""
        self._drop(connection)
        async with self._processing:
            pass  # the lock is free when `_receive` has processed its frames

    def send_soon(self, connection: ReplicaConnection) -> None:
        """Send the due frames of a connection at the end of this event loop turn."""
        self._to_send[connection] = None
        if not self._due:
            self._due = True
            self._loop.call_soon(self._send_due)

    async def run(self) -> None:
        """Receive reports, send commands and check for silent replicas, until cancelled."""
        self._checked_s = self._loop.time()
        while True:
            if await self._server.wait(self._check_s):
                began = self._loop.time()
                await self._receive()
                await asyncio.sleep(min(MOST_REST_S, self._loop.time() - began))  # more frames gather
            self._check_connections()

    def end(self) -> None:
        """Close all connections, and the socket, for which the garbage collector would otherwise wait forever."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._server.close()

    def _drop(self, connection: ReplicaConnection) -> None:
        """Close a connection, and ignore its frames from now on."""
        self._connections.pop(connection.label.encode(), None)
        self._to_send.pop(connection, None)
        connection.close()

    async def _receive(self) -> None:
        """Receive at most `MOST_FRAMES` frames; pass new reports to `on_reports`, then acknowledge them."""
        frames: list[tuple[ReplicaConnection, m.ReportFrame]] = []
        now = self._loop.time()
        for sender, data in self._server.drain(MOST_FRAMES):
            connection, frame = self._connections.get(sender), read_record(m.ReportFrame, data, sender)
            if connection is not None and frame is not None and connection.receive(frame, now):
                frames.append((connection, frame))
        async with self._processing:
            for first in range(0, len(frames), MOST_REPORTS):
                batch = frames[first : first + MOST_REPORTS]
                await self._on_reports([(connection, frame.report) for connection, frame in batch])
                for connection, frame in batch:
                    connection.acknowledge(frame)
                await asyncio.sleep(0)

    def _check_connections(self) -> None:
        """Every `_check_s`, lose silent connections and resend overdue commands; later while more frames wait."""
        now = self._loop.time()
        behind = self._server.has_more and now < self._checked_s + MOST_BEHIND_S
        if behind or now < self._checked_s + self._check_s:
            return
        # true if this process stood still, not the replicas
        stalled = now > self._checked_s + self._heartbeat_timeout_s / 2
        self._checked_s = now
        for connection in self._connections.values():
            if connection.last_frame_s is not None:
                if stalled:
                    connection.last_frame_s = now
                elif now > connection.last_frame_s + self._heartbeat_timeout_s:
                    connection.lose(f"no report in supervisor.heartbeat_timeout_s={self._heartbeat_timeout_s:g} s")
            if connection.is_overdue(now):
                self.send_soon(connection)

    def _send_due(self) -> None:
        """Send frames over the connections in `_to_send`; after a failure, wait for the replica's next frame."""
        self._due = False
        connections, self._to_send = self._to_send, {}
        for connection in connections:
            for frame in connection.next_frames(self._loop.time()):
                if not self._server.send(connection.label.encode(), encode(frame)):
                    connection.mark_unsent()
                    break
