"""Sockets for short messages of many peers, each of which has a name of its own. Used by `link`.

Frames are taken in many at a time, without a wait for each: pyzmq's asyncio takes ten times as long over a message
as the socket itself. ZeroMQ tells of news once, by a file descriptor, and any call on the socket may swallow that:
so each call here ends with a look. Invariant: what has come is noticed, and no send waits.
"""

import asyncio
import contextlib
import errno

import zmq
import zmq.asyncio

from laminar_py.relay.wire.transport import RelayKeys, Wire

MOST_BYTES = 2**26  # of a frame
MOST_QUEUED = 10_000  # frames that wait for a peer which does not read; more are dropped
HEARTBEAT_S = 5.0  # of a connection, after which one that is dead is opened anew


class _Box:
    """A socket on the event loop."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._owner = socket
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._loop = asyncio.get_running_loop()
        self._any = asyncio.Event()
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._look)
        self._look()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """True once something has come, False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._any.wait()
        return self._any.is_set()

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return bool(self._owner.closed)

    def close(self) -> None:
        """End all connections."""
        if not self.closed:
            self._loop.remove_reader(self._fd)
            self._owner.close()

    def _look(self) -> None:
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._any.set()
        else:
            self._any.clear()

    def _receive(self, most: int) -> list[list[zmq.Frame]]:
        """Messages that have come, at most so many."""
        found: list[list[zmq.Frame]] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < most:
                found.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        self._look()
        return found

    def _send(self, frames: list[bytes]) -> bool:
        """False, and dropped, where nobody takes it now."""
        assert len(frames[-1]) <= MOST_BYTES, f"a frame of {len(frames[-1])} bytes would end its connection"
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        finally:
            self._look()
        return True


class Post(_Box):
    """The end that all peers connect to."""

    def __init__(self, keys: RelayKeys, host: str, port: int = 0) -> None:
        self._wire = peer_wire(keys)
        socket = self._wire.bind(host, port, max_queue=MOST_QUEUED, max_frame_bytes=MOST_BYTES)
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again need not wait for its old connection
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes), f"last endpoint is {endpoint!r}"
        self.endpoint = endpoint.rstrip(b"\0").decode()
        super().__init__(socket)

    @property
    def has_more(self) -> bool:
        """True where something has come."""
        return self._any.is_set()

    def drain(self, most: int) -> list[tuple[bytes, memoryview]]:
        """Frames that have come, at most so many, each with the name of its sender."""
        return [(frames[0].bytes, frames[1].buffer) for frames in self._receive(most) if len(frames) == 2]

    def send(self, to: bytes, frame: bytes) -> bool:
        """Hand a frame to a peer; False if that is gone, or reads nothing."""
        return self._send([to, frame])

    def close(self) -> None:
        """Give the port back; connections end."""
        super().close()
        self._wire.close()


class Peer(_Box):
    """An end that connects, under a name that nobody else has at the time; it reconnects by itself."""

    def __init__(self, wire: Wire, endpoint: str, name: str) -> None:
        socket = wire.dealer(max_frame_bytes=MOST_BYTES)
        socket.set(zmq.IDENTITY, name.encode())
        socket.connect(endpoint)
        super().__init__(socket)

    async def receive(self) -> memoryview:
        """The next frame."""
        while True:
            await self.wait()
            await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
            for frames in self._receive(1):
                return frames[0].buffer

    def drain(self, most: int) -> list[memoryview]:
        """Frames that have come, at most so many."""
        return [frames[0].buffer for frames in self._receive(most)]

    def send(self, frame: bytes) -> bool:
        """Hand a frame over; False while the connection is down."""
        return self._send([frame])


def peer_wire(keys: RelayKeys) -> Wire:
    """Keys and threads that the peers of one process share."""
    return Wire(keys, heartbeat_s=HEARTBEAT_S)
