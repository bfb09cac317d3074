"""The controller's end of the link: reports of all replicas come in on one socket, and orders go out.

Owned by `workers.replicas`. A line is one life of a replica:

    open    -> running  its process has started (`begin`), or spoken: from now on it may not be silent
    running -> lost     it was silent for too long, or its owner has no more use for it (`lose`)
    any     -> closed   its process has ended (`close`), or the hub has

Invariant: each report of an open line is taken in once, in order, and told only then; orders reach the replica
once, in the order in which they were put, or are lost with its process. Once a line is closed nothing of it is
taken in any more. Work grows with what is said, not with the number of replicas.
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

LOOK_S = 0.5  # at most, between two looks for lines that are silent, or that have not heard
MOST_BEHIND_S = 5.0  # that a look is put off while there is more to take in
RESEND_S = 2.0  # after which orders that were not heard are sent again
MOST_FRAMES = 128  # heard at once: what waits in the socket for long is sent again
MOST_REPORTS = 16  # taken in before the event loop goes on with other work
MOST_REST_S = 0.02  # in which reports gather, where there are many
FRAME_BYTES = MAX_FRAME_BYTES // 8  # of orders in one frame, unless one alone is larger
MOST_ORDER_BYTES = MAX_FRAME_BYTES - 1024  # the frame has a head


class Line:
    """The controller's end of one replica's life; `lost` has the reason once it is of no use any more."""

    def __init__(self, hub: "ReplicaHub", label: str, replica: int) -> None:
        self.replica = replica
        self.label = label
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.told = 0  # reports that were taken in
        self.heard = 0  # orders that came to the replica
        self._came = 0  # reports, taken in or being so
        self._hub = hub
        self._sent = 0
        self._unheard: deque[tuple[int, bytes]] = deque()
        self._number = 0  # of the last order
        self._ids = count()
        self._asked: dict[int, asyncio.Future[Reply | None]] = {}
        self._is_there = False  # it has spoken, and could be reached since
        self._closed = False

    def put(self, order: Order) -> None:
        """Have the replica do something: at the end of this turn of the event loop, or once it is there."""
        data = encode(order)
        size = len(data)
        assert size <= MOST_ORDER_BYTES, f"{type(order).__name__} of {size} bytes for {self.label}: share it out"
        if not self._closed:
            self._number += 1
            self._unheard.append((self._number, data))
            if self._is_there:
                self._hub.has_word(self)

    async def look(self, *, within_s: float | None = None) -> Survey | None:
        """Survey of what it has at this moment; None if its process ends, or the time is over, first."""
        id = next(self._ids)
        answer = await self._ask(id, Look(id), within_s)
        return None if answer is None else answer.survey

    async def expect(self, version: int, trajectory_ids: Sequence[str], *, within_s: float | None = None) -> bool:
        """True if it promises to keep `version` until these have come or are called off.

        What comes late is no promise: the question is followed by a `CallOff` once the time is over.
        """
        id = next(self._ids)
        answer = await self._ask(id, Expect(id, version, list(trajectory_ids)), within_s)
        if answer is None:
            self.put(CallOff(list(trajectory_ids)))
        return answer is not None and answer.promised

    def lose(self, reason: str) -> None:
        """Have its owner end it."""
        if not self.lost.done():
            self.lost.set_result(reason)

    # ---- what the hub calls

    def hear(self, up: Up) -> bool:
        """Take the replica's word; True if it brings a report that is to be taken in now."""
        self._is_there = True
        self.heard = max(self.heard, min(up.heard, self._number))
        while self._unheard and self._unheard[0][0] <= self.heard:
            self._unheard.popleft()
        if self._number > self._sent:
            self._hub.has_word(self)  # it could not be reached before
        if up.report is None:
            return False
        if up.number <= self.told:
            self._hub.has_word(self)  # what told it was lost
        if up.number != self._came + 1:
            return False
        self._came = up.number
        return True

    def tell(self, up: Up) -> None:
        """Say that a report was taken in, and give the answers beside it to those who asked."""
        self.told = up.number
        for answer in up.answers:
            asked = self._asked.pop(answer.id, None)
            if asked is not None and not asked.done():
                asked.set_result(answer)
        if not self._closed:
            self._hub.has_word(self)

    def words(self, *, again: bool) -> list[Down]:
        """Frames of what is to be said now; with `again` of all that was not heard."""
        if again:
            self._sent = self.heard
        orders = [(number, order) for number, order in self._unheard if number > self._sent]
        self._sent = self._number
        downs, some, size = list[Down](), list[bytes](), 0
        for number, order in orders:
            if some and size + len(order) > FRAME_BYTES:
                downs.append(self._down(number - len(some), some))
                some, size = [], 0
            some.append(order)
            size += len(order)
        return [*downs, self._down(self._number + 1 - len(some), some)]

    def was_cut_off(self) -> None:
        """Say all that was not heard with the next word: what was sent before may be lost."""
        self._sent = self.heard
        self._is_there = False

    def close(self) -> None:
        """Whoever waits for an answer gets none, nor does whoever asks from now on."""
        self._closed = True
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(None)
        self._asked.clear()
        self._unheard.clear()

    @property
    def waits(self) -> bool:
        """True while orders are out that were not heard."""
        return bool(self._unheard)

    def _down(self, first: int, orders: Sequence[bytes]) -> Down:
        return Down(self.told, first, tuple(map(msgspec.Raw, orders)))

    async def _ask(self, id: int, question: Look | Expect, within_s: float | None) -> Reply | None:
        if self._closed:
            return None
        answer: asyncio.Future[Reply | None] = asyncio.get_running_loop().create_future()
        self._asked[id] = answer
        self.put(question)
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            return None
        finally:
            self._asked.pop(id, None)


class ReplicaHub:
    """Hub of all lines; `take` has the new reports of a moment. A line that is silent for `patience_s` is lost."""

    def __init__(
        self,
        post: PeerServer,
        *,
        take: Callable[[Sequence[tuple[Line, ReplicaReport]]], Awaitable[None]],
        patience_s: float,
    ) -> None:
        self._post = post
        self._take = take
        self._patience_s = patience_s
        self._look_s = min(LOOK_S, patience_s / 8)
        self._loop = asyncio.get_running_loop()
        self._lines: dict[bytes, Line] = {}
        self._last_s: dict[Line, float] = {}  # when each was heard of last, the longest ago first
        self._sent_s: dict[Line, float] = {}  # when orders were sent that are not heard, the longest ago first
        self._to_say: dict[Line, None] = {}
        self._due = False  # what is to be said goes out at the end of this turn of the loop
        self._looked_s = self._loop.time()
        self._taking = asyncio.Lock()  # while reports are taken in

    @property
    def endpoint(self) -> str:
        """Address that replicas connect to."""
        return self._post.endpoint

    def open(self, label: str, replica: int) -> Line:
        """The line of a replica that is about to start under this label, which no other has had."""
        assert 0 < len(label.encode()) <= MOST_LABEL, f"label {label!r}: longer than {MOST_LABEL} bytes, or empty"
        line = Line(self, label, replica)
        self._lines[label.encode()] = line
        return line

    def begin(self, line: Line) -> None:
        """Have a line count as silent from now on until it speaks: its process has started."""
        if self._lines.get(line.label.encode()) is line:
            self._last_s.setdefault(line, self._loop.time())

    async def close(self, line: Line) -> None:
        """Hear no more of it; returns when what came of it before was taken in."""
        self._drop(line)
        async with self._taking:
            pass

    def has_word(self, line: Line) -> None:
        """Say what a line has to say at the end of this turn of the event loop."""
        self._to_say[line] = None
        if not self._due:
            self._due = True
            self._loop.call_soon(self._say)

    async def run(self) -> None:
        """Serve until cancelled."""
        self._looked_s = self._loop.time()
        while True:
            if await self._post.wait(self._look_s):
                began = self._loop.time()
                await self._receive()
                await asyncio.sleep(min(MOST_REST_S, self._loop.time() - began))  # more gathers meanwhile
            self._look()

    def end(self) -> None:
        """Close all lines, and the socket, over which the garbage collector would wait for ever."""
        for line in list(self._lines.values()):
            self._drop(line)
        self._post.close()

    def _drop(self, line: Line) -> None:
        self._lines.pop(line.label.encode(), None)
        for of in (self._last_s, self._sent_s, self._to_say):
            of.pop(line, None)
        line.close()

    async def _receive(self) -> None:
        """Hear what there is, a bounded part of it, and take the reports in."""
        came: list[tuple[Line, Up, ReplicaReport]] = []
        now = self._loop.time()
        for sender, frame in self._post.drain(MOST_FRAMES):
            line = self._lines.get(sender)
            up = None if line is None else read_record(Up, frame)
            if line is None or up is None or up.label != line.label:
                continue
            _move_to_end(self._last_s, line, now)
            if self._hear(line, up, now) and up.report is not None:
                came.append((line, up, up.report))
        async with self._taking:
            for first in range(0, len(came), MOST_REPORTS):
                some = came[first : first + MOST_REPORTS]
                await self._take([(line, report) for line, _, report in some])
                for line, up, _ in some:
                    line.tell(up)
                await asyncio.sleep(0)

    def _hear(self, line: Line, up: Up, now: float) -> bool:
        """Have a line take a word; orders that it has not heard yet have time anew if it has heard others."""
        heard = line.heard
        has_report = line.hear(up)
        if line.heard > heard and self._sent_s.pop(line, None) is not None and line.waits:
            self._sent_s[line] = now
        return has_report

    def _look(self) -> None:
        """Lose lines that are silent, and say again what was not heard. Called when all that came is taken in."""
        now = self._loop.time()
        behind = self._post.has_more and now < self._looked_s + MOST_BEHIND_S
        if behind or now < self._looked_s + self._look_s:
            return
        if now > self._looked_s + self._patience_s / 2:
            self._last_s = dict.fromkeys(self._last_s, now)  # this process stood still, not they
        self._looked_s = now
        while self._last_s and (oldest := next(iter(self._last_s.items())))[1] < now - self._patience_s:
            del self._last_s[oldest[0]]
            oldest[0].lose(f"no word of it in {self._patience_s:g} s")
        while self._sent_s and (late := next(iter(self._sent_s.items())))[1] < now - RESEND_S:
            self._send(late[0], again=True)

    def _say(self) -> None:
        self._due = False
        lines, self._to_say = self._to_say, {}
        for line in lines:
            self._send(line, again=False)

    def _send(self, line: Line, *, again: bool) -> None:
        """Send what a line has to say; to one that is not connected when it speaks next."""
        for down in line.words(again=again):
            if not self._post.send(line.label.encode(), encode(down)):
                line.was_cut_off()
                self._sent_s.pop(line, None)
                return
            if again or (down.orders and line not in self._sent_s):
                _move_to_end(self._sent_s, line, self._loop.time())


def _move_to_end(times: dict[Line, float], line: Line, now: float) -> None:
    times.pop(line, None)
    times[line] = now
