"""The controller's end of the link: reports of all replicas arrive on one socket, and orders leave from it.

Owned by `workers.replicas`. A line is the connection to one life of a replica:

    open    -> running  its process has started (`mark_started`), or sent a frame: silence counts from now on
    running -> lost     it was silent for too long, or its owner calls `lose`
    any     -> closed   its process has ended (`close`), or the hub has

The hub takes in each report of an open line once, in order, and only then acknowledges it. Orders reach the
replica once, in the order of `send_order`, or are lost with its process. A closed line delivers nothing more
(`tests/link/test_faults.py`). The work of the hub grows with the number of frames, not of replicas.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import msgspec

from laminar_py.records.codec import encode
from laminar_py.records.replica import ReplicaReport, Survey
from laminar_py.relay.sockets import MAX_FRAME_BYTES, PeerServer, read_record
from laminar_py.runtime.link.messages import MOST_LABEL, CallOff, Down, Expect, Look, Order, Reply, Up

CHECK_S = 0.5  # at most, between two checks for silent lines and for orders to resend
MOST_BEHIND_S = 5.0  # by which a check is postponed while more frames wait
RESEND_S = 2.0  # after which orders without an acknowledgement are sent again
MOST_FRAMES = 128  # received at once: replicas resend frames that wait in the socket for long
MOST_REPORTS = 16  # taken in before the event loop gets its turn
MOST_REST_S = 0.02  # in which reports gather, where there are many
FRAME_BYTES = MAX_FRAME_BYTES // 8  # of orders in one frame, unless one alone is larger
MOST_ORDER_BYTES = MAX_FRAME_BYTES - 1024  # the frame has a head


class Line:
    """The controller's end of one life of a replica; `lost` gets the reason when the replica is given up."""

    def __init__(self, hub: "ReplicaHub", label: str, replica: int) -> None:
        self.replica = replica
        self.label = label
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reports_received = 0  # number of the last report that was taken in
        self.orders_received = 0  # number of the last order that the replica acknowledged
        self._came = 0  # number of the last report that arrived
        self._hub = hub
        self._sent = 0
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._number = 0  # of the newest order
        self._ids = count()
        self._requests: dict[int, asyncio.Future[Reply | None]] = {}
        self._is_there = False  # the replica has sent a frame, and every frame to it could be sent since
        self._closed = False

    def send_order(self, order: Order) -> None:
        """Send an order at the end of this event loop turn, or once the replica is connected.

        An order to a closed line is dropped.
        """
        data = encode(order)
        size = len(data)
        assert size <= MOST_ORDER_BYTES, f"{type(order).__name__} of {size} bytes for {self.label}: share it out"
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
            self.send_order(CallOff(list(trajectory_ids)))
        return answer is not None and answer.promised

    def lose(self, reason: str) -> None:
        """Tell the owner of the line, by `lost`, to end the replica."""
        if not self.lost.done():
            self.lost.set_result(reason)

    # ---- what the hub calls

    def receive(self, up: Up) -> bool:
        """Take in a frame; return True if it has a report that is next in order."""
        self._is_there = True
        self.orders_received = max(self.orders_received, min(up.orders_received, self._number))
        while self._unacknowledged and self._unacknowledged[0][0] <= self.orders_received:
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
            asked = self._requests.pop(answer.id, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        if not self._closed:
            self._hub.send_soon(self)

    def next_frames(self, *, again: bool) -> list[Down]:
        """Return the frames to send now: new orders, or with `again` all orders without an acknowledgement."""
        if again:
            self._sent = self.orders_received
        orders = [(number, order) for number, order in self._unacknowledged if number > self._sent]
        self._sent = self._number
        downs, some, size = list[Down](), list[bytes](), 0
        for number, order in orders:
            if some and size + len(order) > FRAME_BYTES:
                downs.append(self._down(number - len(some), some))
                some, size = [], 0
            some.append(order)
            size += len(order)
        return [*downs, self._down(self._number + 1 - len(some), some)]

    def mark_disconnected(self) -> None:
        """Resend all unacknowledged orders with the next frame, since the frames sent before may be lost."""
        self._sent = self.orders_received
        self._is_there = False

    def close(self) -> None:
        """End all waiting and later requests without an answer; drop later orders."""
        self._closed = True
        for asked in self._requests.values():
            if not asked.done():
                asked.set_result(None)
        self._requests.clear()
        self._unacknowledged.clear()

    @property
    def has_unacknowledged(self) -> bool:
        """True while the replica has not acknowledged all orders."""
        return bool(self._unacknowledged)

    def _down(self, first: int, orders: Sequence[bytes]) -> Down:
        return Down(self.reports_received, first, tuple(map(msgspec.Raw, orders)))

    async def _request(self, id: int, question: Look | Expect, within_s: float | None) -> Reply | None:
        if self._closed:
            return None
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._requests[id] = answer
        self.send_order(question)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._requests.pop(id, None)


class ReplicaHub:
    """Serves all lines; awaits `on_reports` with the reports that arrive together.

    A line silent for `patience_s` is lost.
    """

    def __init__(
        self,
        post: PeerServer,
        *,
        on_reports: Callable[[Sequence[tuple[Line, ReplicaReport]]], Awaitable[None]],
        patience_s: float,
    ) -> None:
        self._post = post
        self._on_reports = on_reports
        self._patience_s = patience_s
        self._check_s = min(CHECK_S, patience_s / 8)
        self._loop = asyncio.get_running_loop()
        self._lines: dict[bytes, Line] = {}
        self._last_s: dict[Line, float] = {}  # when the last frame of each line arrived, the oldest first
        self._sent_s: dict[Line, float] = {}  # when unacknowledged orders were sent, the oldest first
        self._to_send: dict[Line, None] = {}
        self._due = False  # `_send_due` runs at the end of this event loop turn
        self._checked_s = self._loop.time()
        self._taking = asyncio.Lock()  # held while reports are taken in

    @property
    def endpoint(self) -> str:
        """Address that replicas connect to."""
        return self._post.endpoint

    def open(self, label: str, replica: int) -> Line:
        """Open a line for a replica that is about to start under this label, which no other has had."""
        assert 0 < len(label.encode()) <= MOST_LABEL, f"label {label!r}: longer than {MOST_LABEL} bytes, or empty"
        line = Line(self, label, replica)
        self._lines[label.encode()] = line
        return line

    def mark_started(self, line: Line) -> None:
        """Count the silence of a line from now on: its process has started."""
        if self._lines.get(line.label.encode()) is line:
            self._last_s.setdefault(line, self._loop.time())

    async def close(self, line: Line) -> None:
        """Close a line; return when the reports that arrived before are taken in."""
        self._drop(line)
        async with self._taking:
            pass

    def send_soon(self, line: Line) -> None:
        """Send the due frames of a line at the end of this event loop turn."""
        self._to_send[line] = None
        if not self._due:
            self._due = True
            self._loop.call_soon(self._send_due)

    async def run(self) -> None:
        """Serve until cancelled."""
        self._checked_s = self._loop.time()
        while True:
            if await self._post.wait(self._check_s):
                began = self._loop.time()
                await self._receive()
                await asyncio.sleep(min(MOST_REST_S, self._loop.time() - began))  # more frames gather meanwhile
            self._check_silence()

    def end(self) -> None:
        """Close all lines, and the socket, for which the garbage collector would otherwise wait forever."""
        for line in list(self._lines.values()):
            self._drop(line)
        self._post.close()

    def _drop(self, line: Line) -> None:
        self._lines.pop(line.label.encode(), None)
        for of in (self._last_s, self._sent_s, self._to_send):
            of.pop(line, None)
        line.close()

    async def _receive(self) -> None:
        """Receive at most `MOST_FRAMES` frames, and take in their reports."""
        came: list[tuple[Line, Up, ReplicaReport]] = []
        now = self._loop.time()
        for sender, frame in self._post.drain(MOST_FRAMES):
            line = self._lines.get(sender)
            up = None if line is None else read_record(Up, frame)
            if line is None or up is None or up.label != line.label:
                continue
            _move_to_end(self._last_s, line, now)
            if self._receive_frame(line, up, now) and up.report is not None:
                came.append((line, up, up.report))
        async with self._taking:
            for first in range(0, len(came), MOST_REPORTS):
                some = came[first : first + MOST_REPORTS]
                await self._on_reports([(line, report) for line, _, report in some])
                for line, up, _ in some:
                    line.acknowledge(up)
                await asyncio.sleep(0)

    def _receive_frame(self, line: Line, up: Up, now: float) -> bool:
        """Pass a frame to its line. If it acknowledges some orders, the time to resend the others starts again."""
        received = line.orders_received
        has_report = line.receive(up)
        if (
            line.orders_received > received
            and self._sent_s.pop(line, None) is not None
            and line.has_unacknowledged
        ):
            self._sent_s[line] = now
        return has_report

    def _check_silence(self) -> None:
        """Lose silent lines, and resend unacknowledged orders. Called when all received frames are taken in."""
        now = self._loop.time()
        behind = self._post.has_more and now < self._checked_s + MOST_BEHIND_S
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
        lines, self._to_send = self._to_send, {}
        for line in lines:
            self._send(line, again=False)

    def _send(self, line: Line, *, again: bool) -> None:
        """Send the due frames of a line; if it is not connected, they wait for its next frame."""
        for down in line.next_frames(again=again):
            if not self._post.send(line.label.encode(), encode(down)):
                line.mark_disconnected()
                self._sent_s.pop(line, None)
                return
            if again or (down.orders and line not in self._sent_s):
                _move_to_end(self._sent_s, line, self._loop.time())


def _move_to_end(times: dict[Line, float], line: Line, now: float) -> None:
    times.pop(line, None)
    times[line] = now
