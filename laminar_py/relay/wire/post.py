"""One socket for the short messages of many peers, each of which has a name of its own. Used by `link`.

Frames are taken in many at a time, without a wait for each: asyncio takes ten times as long over a message as the
socket itself. Invariant: as in `transport`; no send waits, and none costs whoever waits for a frame its wake-up.
"""

import asyncio
import errno

import zmq
import zmq.asyncio

from laminar_py.relay.wire.transport import RelayKeys, Wire

MOST_BYTES = 2**26  # of a frame
MOST_QUEUED = 10_000  # frames that wait for a peer which does not read; more are dropped
HEARTBEAT_S = 5.0  # of a connection, after which one that is dead is opened anew


class Post:
    """The end that all peers connect to."""

    def __init__(self, keys: RelayKeys, host: str, port: int = 0) -> None:
        self._wire = peer_wire(keys)
        self._socket = self._wire.bind(host, port, max_queue=MOST_QUEUED, max_frame_bytes=MOST_BYTES)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again need not wait for its old connection
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        endpoint = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes), f"last endpoint is {endpoint!r}"
        self.endpoint = endpoint.rstrip(b"\0").decode()

    async def wait(self, timeout_s: float) -> bool:
        """True once something has come, False after `timeout_s`."""
        return bool(await self._socket.poll(int(timeout_s * 1000)))

    @property
    def has_more(self) -> bool:
        """True where something has come."""
        return bool(self._plain.poll(0))

    def drain(self, most: int) -> list[tuple[bytes, memoryview]]:
        """What has come, at most so many frames, each with the name of its sender."""
        found: list[tuple[bytes, memoryview]] = []
        while len(found) < most:
            try:
                frames = self._plain.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            if len(frames) == 2:
                found.append((frames[0].bytes, frames[1].buffer))
        return found

    def send(self, to: bytes, frame: bytes) -> bool:
        """Hand a frame to a peer; False if that is gone, or reads nothing."""
        try:
            self._plain.send_multipart([to, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        finally:
            _wake(self._socket)
        return True

    def close(self) -> None:
        """Give the port back; connections end."""
        self._socket.close()
        self._wire.close()


def peer_wire(keys: RelayKeys) -> Wire:
    """What the peers of one process share."""
    return Wire(keys, heartbeat_s=HEARTBEAT_S)


class Peer:
    """An end that connects, under a name that nobody else has at the time; it reconnects by itself."""

    def __init__(self, wire: Wire, endpoint: str, name: str) -> None:
        self._socket = wire.dealer(max_frame_bytes=MOST_BYTES)
        self._socket.set(zmq.IDENTITY, name.encode())
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        self._socket.connect(endpoint)

    async def receive(self) -> memoryview:
        """The next frame."""
        frame: zmq.Frame = await self._socket.recv(copy=False)
        await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        return frame.buffer

    def send(self, frame: bytes) -> bool:
        """Hand a frame over; False while the connection is down."""
        try:
            self._plain.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            _wake(self._socket)
        return True

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _wake(socket: zmq.asyncio.Socket) -> None:
    """Have those look who wait for a frame: libzmq tells once that one came, perhaps to a send."""
    socket.get(zmq.EVENTS)
