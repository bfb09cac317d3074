"""Connections of the endpoint: how many there are, and what they hold before it is known whose they are.

Owned by `endpoint`. Whoever can reach the port can connect; only an agent has a key:

    STRANGER -> BUSY   a request has come with the key of an agent
    BUSY -> IDLE       it was answered
    IDLE -> BUSY       the next has come
    any -> closed      by either side

Where there are too many, or strangers have sent too much, the oldest stranger is closed, then the longest idle.
Invariant: no number of connections without a key keeps out an agent that has one, and what all of them together
make this process hold is bounded.
"""

import asyncio
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BACKLOG = 128
READ_S = 30.0
STALL_S = 60.0
MOST_AT_ONCE = 64  # requests of one agent
BODIES_KEPT = 4  # of the longest, of one agent
STRANGERS_BYTES = 2**26  # that they have sent, all together
BODIES_BYTES = 2**26  # that are read at a time
LARGEST_HELD = 2**20  # of one: longer headers are refused, and what is beyond of a body stays in the socket
BODIES_FULL = "too much is being read, or kept for this agent; try again"
REFUSAL = "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
TOO_SLOW, TOO_MANY = "408 Request Timeout", "503 Service Unavailable"


class HttpStatusError(Exception):
    """A request that has a status for an answer, e.g. `HttpStatusError(410, "the trajectory has ended")`."""

    def __init__(self, status: int, reason: str, *, closes: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.closes = closes  # the connection


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds of an endpoint, e.g. `ConnectionBounds(most=4096, max_body_bytes=2**22)`."""

    most: int  # connections
    max_body_bytes: int
    read_s: float = READ_S  # for a first request's headers, and for each body
    stall_s: float = STALL_S  # for whoever reads nothing of an answer

    @property
    def connections(self) -> int:
        """Connections, of which each has a file descriptor; others need some too."""
        return min(self.most, _descriptors() // 2)

    @property
    def backlog(self) -> int:
        """Connections that are taken in at a time, each of which has a descriptor before others make room."""
        return min(BACKLOG, _descriptors() // 8)

    @property
    def bodies_bytes(self) -> int:
        """Bytes of bodies that are read at a time."""
        return max(BODIES_BYTES, self.max_body_bytes)


class AgentConnection(asyncio.Protocol):
    """A connection, before the protocol `inner` that speaks HTTP."""

    def __init__(self, inner: asyncio.Protocol, all_of_them: "AgentConnections") -> None:
        self.inner = inner
        self.held = 0  # bytes that a stranger has sent, as far as they may be here
        self.timer: asyncio.TimerHandle | None = None
        self._all = all_of_them
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`, as are all of these."""
        assert isinstance(transport, asyncio.Transport), "it is one of a socket"
        self.transport = transport
        self.inner.connection_made(transport)
        self._all.opened(self)

    def data_received(self, data: bytes) -> None:
        """Pass it on, unless too much is here."""
        self._all.received(self, len(data))
        if not self.transport.is_closing():
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """Close it unless somebody reads before long."""
        self.inner.pause_writing()
        self._stall = asyncio.get_running_loop().call_later(self._all.bounds.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Somebody reads."""
        self._cancel_stall()
        self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Let go of it."""
        self._cancel_stall()
        self._all.closed(self)
        self.inner.connection_lost(error)

    def refuse(self, status: str) -> None:
        """Close it; what it asked has this status, unless an answer is on its way."""
        if self.transport.get_write_buffer_size() == 0:
            self.transport.write(REFUSAL.format(status).encode())
        self.close()

    def close(self) -> None:
        """Close it at once."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self.transport.close()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()


class AgentConnections:
    """Connections of an endpoint, e.g. `create_server(lambda: connections.accept(server()))`."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self._most = bounds.connections
        self._strangers: dict[AgentConnection, None] = {}  # the oldest first
        self._idle: dict[AgentConnection, None] = {}  # the longest first
        self._busy: set[AgentConnection] = set()
        self._answering: Counter[object] = Counter()  # requests that are being answered, by agent
        self._held = 0  # by strangers
        self._kept: Counter[object] = Counter()  # bytes of bodies until they are answered, by agent
        self._reading = 0  # bytes of bodies that are read

    def __len__(self) -> int:
        return len(self._strangers) + len(self._idle) + len(self._busy)

    def accept(self, inner: asyncio.Protocol) -> AgentConnection:
        """The protocol of a new connection."""
        return AgentConnection(inner, self)

    # ---- called by connections

    def opened(self, one: AgentConnection) -> None:
        """Take in another, in place of one that waits where there is no room."""
        if len(self) >= self._most and not self._make_room():
            one.refuse(TOO_MANY)
            return
        self._strangers[one] = None
        one.timer = asyncio.get_running_loop().call_later(self.bounds.read_s, self._refuse, one, TOO_SLOW)

    def received(self, one: AgentConnection, count: int) -> None:
        """Note bytes; where strangers have sent too many the oldest of them go."""
        if one in self._strangers:
            more = min(count, LARGEST_HELD - one.held)
            one.held += more
            self._held += more
            while self._held > STRANGERS_BYTES:
                self._make_room()

    def closed(self, one: AgentConnection) -> None:
        """Forget it."""
        self._forget_stranger(one)
        self._idle.pop(one, None)
        self._busy.discard(one)

    # ---- called by the endpoint

    @contextmanager
    def answering(self, transport: asyncio.BaseTransport | None, agent: object | None) -> Iterator[None]:
        """Know whose a connection is while its request is answered. Raises `HttpStatusError`.

        A connection without an agent waits for a trajectory, and may be closed like any that waits.
        """
        one = _of(transport)
        self._forget_stranger(one)
        self._idle.pop(one, None)
        self._idle[one] = None
        if agent is None:
            yield
            return
        if self._answering[agent] >= MOST_AT_ONCE:
            raise HttpStatusError(429, f"{MOST_AT_ONCE} requests are being answered")
        del self._idle[one]
        self._busy.add(one)
        with _held(self._answering, agent, 1):
            try:
                yield
            finally:
                if one in self._busy:  # else it was closed meanwhile
                    self._busy.remove(one)
                    self._idle[one] = None

    @contextmanager
    def keeping(self, agent: object | None, count: int) -> Iterator[None]:
        """Keep a body of so many bytes for an agent until it is answered. Raises `HttpStatusError`."""
        if self._kept[agent] + count > BODIES_KEPT * self.bounds.max_body_bytes:
            raise HttpStatusError(503, BODIES_FULL)
        with _held(self._kept, agent, count):
            yield

    @contextmanager
    def reading(self, count: int) -> Iterator[None]:
        """Read a body of so many bytes. Raises `HttpStatusError`."""
        if self._reading + count > self.bounds.bodies_bytes:
            raise HttpStatusError(503, BODIES_FULL)
        self._reading += count
        try:
            yield
        finally:
            self._reading -= count

    # ----

    def _make_room(self) -> bool:
        """Close one that waits; False where none does."""
        if self._strangers:
            self._refuse(next(iter(self._strangers)), TOO_MANY)
            return True
        if self._idle:
            one = next(iter(self._idle))
            self.closed(one)
            one.close()
            return True
        return False

    def _refuse(self, one: AgentConnection, status: str) -> None:
        self.closed(one)
        one.refuse(status)

    def _forget_stranger(self, one: AgentConnection) -> None:
        if one in self._strangers:
            del self._strangers[one]
            self._held -= one.held
            one.held = 0
            if one.timer is not None:
                one.timer.cancel()


def _descriptors() -> int:
    """File descriptors that this process may have."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors


@contextmanager
def _held(counter: Counter[object], agent: object, count: int) -> Iterator[None]:
    """Count for an agent meanwhile; nothing is kept of an agent that has none."""
    counter[agent] += count
    try:
        yield
    finally:
        counter[agent] -= count
        if not counter[agent]:
            del counter[agent]


def _of(transport: asyncio.BaseTransport | None) -> AgentConnection:
    """The connection of a request. Raises `ConnectionResetError` where that is closed."""
    one = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    if not isinstance(one, AgentConnection):
        raise ConnectionResetError("the connection is closed")
    return one
