"""Connections of the endpoint: their number is bounded, and aiohttp bounds the memory of each.

Every client that reaches the port can connect, but only an agent has a key:

    STRANGER -> BUSY   a request arrives with a key
    BUSY -> IDLE       the endpoint has answered it
    IDLE -> BUSY       the next request arrives
    any -> closed      by either side

At the bound, a new connection takes the place of the oldest stranger, or else of the connection that is idle
longest. So clients without a key never keep out an agent (`tests/environment/agents/test_connections.py`).
"""

import asyncio
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

BACKLOG = 128
MAX_HEADERS, MAX_HEADER_BYTES = 32, 4096  # so a client may send 128 KiB of headers
REFUSAL = "HTTP/1.1 {}\r\nConnection: close\r\nContent-Length: 0\r\nRetry-After: 1\r\n\r\n"
TOO_SLOW, TOO_MANY = "408 Request Timeout", "503 Service Unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds of an endpoint, e.g. `ConnectionBounds(connections=4096, body_bytes=2**22)`."""

    connections: int  # and never more than half of the file descriptors of this process
    body_bytes: int
    read_s: float = 30.0  # timeout of a first request's headers, and of each body
    stall_s: float = 60.0  # timeout of a client that does not read its response

    @property
    def backlog(self) -> int:
        """Connections that the kernel accepts before we can close others to make room."""
        return min(BACKLOG, _num_descriptors() // 8)


class AgentConnection(web.RequestHandler):
    """A connection, which speaks HTTP. aiohttp bounds its headers and pauses reading of long bodies."""

    def __init__(self, connections: "AgentConnections", server: web.Server, **options: Any) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            max_headers=MAX_HEADERS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            **options,
        )
        self._connections = connections
        self._stall: asyncio.TimerHandle | None = None
        self.header_timer: asyncio.TimerHandle | None = None  # of a stranger

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add the new connection to `AgentConnections`; asyncio calls this."""
        super().connection_made(transport)
        self._connections.add(self)

    def connection_lost(self, error: BaseException | None) -> None:
        """Forget the connection."""
        self._cancel_stall()
        self._connections.remove(self)
        super().connection_lost(error)

    def pause_writing(self) -> None:
        """Close the connection unless the client reads within `stall_s`."""
        super().pause_writing()
        assert self.transport is not None, "it is open"
        stall_s = self._connections.bounds.stall_s
        self._stall = asyncio.get_running_loop().call_later(stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Keep the connection: the client reads again."""
        self._cancel_stall()
        super().resume_writing()

    def refuse(self, status: str) -> None:
        """Close the connection with this status; send no status into a response that is half sent."""
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.write(REFUSAL.format(status).encode())
            self.transport.close()

    def _cancel_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()


class AgentConnections:
    """All connections of an endpoint, e.g. `create_server(partial(AgentConnection, connections, server))`."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self._most = min(bounds.connections, _num_descriptors() // 2)
        self._open: set[AgentConnection] = set()
        self._strangers: dict[AgentConnection, None] = {}  # the oldest first
        self._idle: dict[AgentConnection, None] = {}  # the longest idle first

    def add(self, connection: AgentConnection) -> None:
        """Add a connection as a stranger, and close another connection if there are too many."""
        if len(self._open) >= self._most:
            closable = next(iter(self._strangers), None) or next(iter(self._idle), connection)
            self.remove(closable)
            closable.refuse(TOO_MANY)
            if closable is connection:  # all others are busy
                return
        self._open.add(connection)
        self._strangers[connection] = None
        read_s = self.bounds.read_s
        connection.header_timer = asyncio.get_running_loop().call_later(read_s, connection.refuse, TOO_SLOW)

    def remove(self, connection: AgentConnection) -> None:
        """Remove a closed connection."""
        self._open.discard(connection)
        self._mark_busy(connection)

    @contextmanager
    def serving(self, connection: AgentConnection, *, can_close: bool = False) -> Iterator[None]:
        """Mark a connection as busy while its request is in flight, and as idle afterwards.

        With `can_close`, the connection counts as idle during the request, too.
        """
        self._mark_busy(connection)
        if can_close:
            self._idle[connection] = None
        try:
            yield
        finally:
            if connection in self._open:  # the client may have closed it meanwhile
                self._idle[connection] = None

    def _mark_busy(self, connection: AgentConnection) -> None:
        self._strangers.pop(connection, None)
        self._idle.pop(connection, None)
        if connection.header_timer is not None:
            connection.header_timer.cancel()


def _num_descriptors() -> int:
    """Return how many file descriptors this process may open."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors
