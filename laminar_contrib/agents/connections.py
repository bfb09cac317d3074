"""Connections of the endpoint: their number and their memory are bounded. `endpoint` owns them.

Every client that reaches the port can connect, but only an agent has a key:

    STRANGER -> BUSY   a request arrives with the key of an agent
    BUSY -> IDLE       the endpoint has answered it
    IDLE -> BUSY       the next request arrives
    any -> closed      by either side

If there are too many connections, or strangers have sent too many bytes, the endpoint closes the oldest stranger,
then the connection that is idle longest. So connections without a key never keep out an agent that has one
(`tests/environment/agents/test_connections.py`).
"""

import asyncio
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BACKLOG = 128
READ_S = 30.0
STALL_S = 60.0
MOST_AT_ONCE = 64  # requests of one agent in flight
BODIES_KEPT = 4  # bodies of the largest size that one agent may have in flight
STRANGERS_BYTES = 2**26  # that all strangers together have sent
BODIES_BYTES = 2**26  # of all bodies that we read at a time
LARGEST_HELD = 2**20  # bytes of one stranger in our memory: longer headers fail, longer bodies stay in the socket
BODIES_FULL = "too much is being read, or kept for this agent; try again"
REFUSAL = "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
TOO_SLOW, TOO_MANY = "408 Request Timeout", "503 Service Unavailable"


class HttpStatusError(Exception):
    """An HTTP status answers a request, e.g. `HttpStatusError(410, "the trajectory has ended")`."""

    def __init__(self, status: int, reason: str, *, closes: bool = False) -> None:
        super().__init__(reason)
        self.status = status
        self.closes = closes  # True: close the connection, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds of an endpoint, e.g. `ConnectionBounds(most=4096, max_body_bytes=2**22)`."""

    most: int  # connections, and never more than half of the file descriptors of this process
    max_body_bytes: int
    read_s: float = READ_S  # timeout of a first request's headers, and of each body
    stall_s: float = STALL_S  # timeout of a client that does not read its answer

    @property
    def backlog(self) -> int:
        """Connections that the kernel accepts before we can close others to make room."""
        return min(BACKLOG, _num_descriptors() // 8)


class AgentConnection(asyncio.Protocol):
    """A connection. It counts bytes and passes them to the protocol `inner`, which speaks HTTP."""

    def __init__(self, inner: asyncio.Protocol, connections: "AgentConnections") -> None:
        self.inner = inner
        self.held = 0  # bytes of a stranger in our memory, at most LARGEST_HELD
        self.timer: asyncio.TimerHandle | None = None
        self._connections = connections
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Implement `asyncio.Protocol`, as the next methods do."""
        assert isinstance(transport, asyncio.Transport), "it is one of a socket"
        self.transport = transport
        self.inner.connection_made(transport)
        self._connections.add_stranger(self)

    def data_received(self, data: bytes) -> None:
        """Pass data to HTTP, unless the connection was closed for sending too much."""
        self._connections.count_bytes(self, len(data))
        if not self.transport.is_closing():
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass the end of the input to HTTP."""
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """Close the connection unless the client reads within `stall_s`."""
        self.inner.pause_writing()
        self._stall = asyncio.get_running_loop().call_later(self._connections.bounds.stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Keep the connection: the client reads again."""
        self._cancel_stall()
        self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        self._cancel_stall()
        self._connections.remove(self)
        self.inner.connection_lost(error)

    def refuse(self, status: str) -> None:
        """Answer with this status and close the connection; send no status if an answer is half sent."""
        if self.transport.get_write_buffer_size() == 0:
            self.transport.write(REFUSAL.format(status).encode())
        self.close()

    def close(self) -> None:
        """Close the connection at once, without sending the rest of an answer."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        self.transport.close()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()


class AgentConnections:
    """All connections of an endpoint, e.g. `create_server(lambda: connections.accept(server()))`."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self._most = min(bounds.most, _num_descriptors() // 2)
        self._strangers: dict[AgentConnection, None] = {}  # the oldest first
        self._idle: dict[AgentConnection, None] = {}  # the longest idle first
        self._busy: set[AgentConnection] = set()
        self._bodies: dict[object, list[int]] = {}  # bytes of each body in flight, by agent
        self._held = 0  # bytes of all strangers in our memory
        self._reading = 0  # bytes of bodies that we read now

    def __len__(self) -> int:
        return len(self._strangers) + len(self._idle) + len(self._busy)

    def accept(self, inner: asyncio.Protocol) -> AgentConnection:
        """Make the protocol of a new connection."""
        return AgentConnection(inner, self)

    # ---- called by connections

    def add_stranger(self, one: AgentConnection) -> None:
        """Add a connection as a stranger; close another one if there are too many."""
        if len(self) >= self._most and not self._make_room():
            one.refuse(TOO_MANY)
            return
        self._strangers[one] = None
        one.timer = asyncio.get_running_loop().call_later(self.bounds.read_s, self._refuse, one, TOO_SLOW)

    def count_bytes(self, one: AgentConnection, count: int) -> None:
        """Count the bytes of a stranger; close the oldest strangers while they hold too many."""
        if one in self._strangers:
            more = min(count, LARGEST_HELD - one.held)
            one.held += more
            self._held += more
            while self._held > STRANGERS_BYTES:
                self._make_room()

    def remove(self, one: AgentConnection) -> None:
        """Remove a closed connection."""
        self._forget_stranger(one)
        self._idle.pop(one, None)
        self._busy.discard(one)

    # ---- called by the endpoint

    @contextmanager
    def admit(self, transport: asyncio.BaseTransport | None, agent: object | None, count: int) -> Iterator[None]:
        """Mark a connection as the agent's while its request with `count` bytes of body is in flight.

        Without an agent, an external client waits for a trajectory; such a connection counts as idle. Raises
        `HttpStatusError` if the agent has too much in flight.
        """
        one = _connection_of(transport)
        self._forget_stranger(one)
        self._idle.pop(one, None)
        self._idle[one] = None
        bodies = self._bodies.setdefault(agent, [])
        if agent is not None and len(bodies) >= MOST_AT_ONCE:
            raise HttpStatusError(429, f"the agent has {MOST_AT_ONCE} requests in flight; try again")
        if sum(bodies) + count > BODIES_KEPT * self.bounds.max_body_bytes:
            raise HttpStatusError(503, BODIES_FULL)
        bodies.append(count)
        if agent is not None:
            del self._idle[one]
            self._busy.add(one)
        try:
            yield
        finally:
            bodies.remove(count)
            if not bodies:
                self._bodies.pop(agent, None)
            if one in self._busy:  # the client may have closed it meanwhile
                self._busy.remove(one)
                self._idle[one] = None

    @contextmanager
    def reserve_reading(self, count: int) -> Iterator[None]:
        """Reserve `count` bytes while a body is read. Raises `HttpStatusError`."""
        if self._reading + count > max(BODIES_BYTES, self.bounds.max_body_bytes):
            raise HttpStatusError(503, BODIES_FULL)
        self._reading += count
        try:
            yield
        finally:
            self._reading -= count

    # ----

    def _make_room(self) -> bool:
        """Close the oldest stranger, or else the longest idle connection. Returns False if there is neither."""
        if self._strangers:
            self._refuse(next(iter(self._strangers)), TOO_MANY)
            return True
        if self._idle:
            one = next(iter(self._idle))
            self.remove(one)
            one.close()
            return True
        return False

    def _refuse(self, one: AgentConnection, status: str) -> None:
        self.remove(one)
        one.refuse(status)

    def _forget_stranger(self, one: AgentConnection) -> None:
        if one in self._strangers:
            del self._strangers[one]
            self._held -= one.held
            one.held = 0
            if one.timer is not None:
                one.timer.cancel()


def _num_descriptors() -> int:
    """Return how many file descriptors this process may open."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors


def _connection_of(transport: asyncio.BaseTransport | None) -> AgentConnection:
    """Return the connection of a request. Raises `ConnectionResetError` if the client has closed it."""
    one = transport.get_protocol() if isinstance(transport, asyncio.Transport) else None
    if not isinstance(one, AgentConnection):
        raise ConnectionResetError("the connection is closed")
    return one
