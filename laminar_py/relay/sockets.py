"""ZeroMQ sockets: control connections of the relay tree (`Listener`, `Connection`), and for frames of many peers.

Nodes, subscribers and `runtime/link` use them; chunks bypass them on lanes (`relay/lanes.py`). Every socket
speaks CURVE with the run's one keypair, refuses other keys, bounds a frame before it allocates memory for it, and
does not linger when it is closed (law 7). Without keys, as in some benchmarks, a node listens on loopback or
`ipc://` only. A send never waits: it drops a record that no peer accepts. Parties repeat their state at each
connect and every few seconds, to replace such records.
"""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Awaitable
from enum import Enum
from types import SimpleNamespace
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from laminar_py.config.section import ConfigError
from laminar_py.records import codec
from laminar_py.relay.messages import NO_DATA, Chunk, Downward, RelayKeys, ToChild, ToParent, Upward

log = logging.getLogger(__name__)

IPC = "ipc://"
# Encryption takes one core for half a gigabyte a second. Connections share these threads; each uses one of them.
IO_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
CONTROL_BYTES = 2**20  # bound of records without weights; the largest is a manifest, 150 bytes a file
MAX_FRAME_BYTES = 2**26  # of a peer's frame
MAX_QUEUED = 10_000  # frames that wait for a peer which does not read; more are dropped
PEER_HEARTBEAT_S = 5.0  # ZeroMQ reconnects peers after this silence

SocketError = zmq.ZMQError  # for callers that may not import zmq

Received = TypeVar("Received")


def generate_keys() -> RelayKeys:
    """Draw a new keypair for a run."""
    public, secret = zmq.curve_keypair()
    return RelayKeys(public.decode(), secret.decode())


class LinkState(Enum):
    """State of a connection, as `Connection.receive` reports it. DOWN -> UP -> DOWN -> UP ... ; starts DOWN."""

    UP = "up"
    DOWN = "down"


def read_record(kind: type[Received], frame: memoryview, sender: str | bytes) -> Received | None:
    """Decode the record in a frame; log the sender and return None if the frame holds none of this kind."""
    try:
        return codec.decode(kind, frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning(
            "dropped a frame of %d bytes from %s, which holds no known record: %s", len(frame), sender, error
        )
        return None


def to_frames(message: Downward) -> list[bytes | memoryview]:
    """Encode a record as frames; the bytes of a chunk become a frame without a copy."""
    if isinstance(message, Chunk):
        return [codec.encode(msgspec.structs.replace(message, data=NO_DATA)), message.data]
    return [codec.encode(message)]


def from_frames(frames: list[memoryview], parent: str) -> ToChild | None:
    """Decode the frames that a parent sent; log its endpoint and return None if they are no record."""
    message: ToChild | None = read_record(ToChild, frames[0], parent)  # type: ignore[arg-type]
    if isinstance(message, Chunk) and len(frames) == 2 and not message.data:
        return msgspec.structs.replace(message, data=frames[1])
    if isinstance(message, Chunk) or len(frames) > 1:
        log.warning("dropped a %s of %d frames from %s", type(message).__name__, len(frames), parent)
        return None
    return message


def _send_error(sent: Awaitable[zmq.MessageTracker | None]) -> BaseException | None:
    """Return the error of a non-blocking send, which has finished when it returns; None if there was none."""
    assert isinstance(sent, asyncio.Future), f"a send gave a {type(sent).__name__}"
    assert sent.done(), "a send that may not block was left pending"
    return sent.exception()


def _endpoint(socket: zmq.asyncio.Socket) -> str:
    """The address that a socket is bound to, e.g. `tcp://127.0.0.1:41234`."""
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes), f"last endpoint is {endpoint!r}"
    return endpoint.rstrip(b"\0").decode()


class Listener:
    """Socket of a node for the child nodes and subscribers below it (ROUTER); each connection has a sender id."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.endpoint = _endpoint(socket)

    async def receive(self) -> tuple[bytes, ToParent]:
        """Wait for the next record; return the sender's id and the record. Drop frames that hold no record."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
            message: ToParent | None = None
            if len(frames) == 2:
                message = read_record(ToParent, frames[1].buffer, frames[0].bytes)  # type: ignore[arg-type]
            if message is not None:
                return frames[0].bytes, message

    def send(self, to: bytes, message: Downward) -> bool:
        """Send a record to connection `to`; False if the connection is gone. A full queue drops the record."""
        error = _send_error(self._socket.send_multipart([to, *to_frames(message)], zmq.NOBLOCK, copy=False))
        if isinstance(error, zmq.Again):
            log.warning("the queue to %s is full: dropped a %s", to, type(message).__name__)
        elif isinstance(error, zmq.ZMQError) and error.errno == errno.EHOSTUNREACH:
            return False
        elif error is not None:
            raise error
        return True

    def close(self) -> None:
        """Free the port and end all connections."""
        self._socket.close()


class Connection:
    """The connection to a parent (DEALER). It reconnects by itself and queues nothing while it is down."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._endpoint = endpoint
        socket.connect(endpoint)

    async def receive(self, timeout_s: float | None = None) -> "ToChild | LinkState | None":
        """Wait for the next record or change of state; None if neither comes within `timeout_s`."""
        while True:
            ready = dict(await self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
            await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
            if not ready:
                return None
            if self._monitor in ready:
                event = await recv_monitor_message(self._monitor)
                self._socket.get(zmq.EVENTS)  # lets the socket see its new connection before the first send
                return LinkState.UP if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else LinkState.DOWN
            try:
                frames = await self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection broke after the poll, and its frames went with it
                continue
            message = from_frames([frame.buffer for frame in frames], self._endpoint)
            if message is not None:
                return message

    def send(self, message: Upward) -> bool:
        """Send a record to the parent; False, and dropped, while the connection is down."""
        error = _send_error(self._socket.send(codec.encode(message), zmq.NOBLOCK))
        if error is not None and not isinstance(error, zmq.Again):
            raise error
        return error is None

    def close(self) -> None:
        """End the connection."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


class _Context(zmq.asyncio.Context):
    """A context whose finalizer does not wait for its sockets, which the garbage collector may find later."""

    def __del__(self) -> None:
        """Leave the context open."""


class SocketFactory:
    """Makes the sockets of one asyncio party. A peer that is silent for `heartbeat_s` counts as gone."""

    def __init__(self, keys: RelayKeys | None, *, heartbeat_s: float) -> None:
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._context = _Context(io_threads=IO_THREADS)
        self._authenticator: AsyncioAuthenticator | None = None

    @property
    def has_keys(self) -> bool:
        """True if the sockets encrypt and know their peers."""
        return self._keys is not None

    def listen(self, host: str, port: int, *, max_queue: int) -> Listener:
        """Open a listener on `host:port` (port 0: a free one), or on a host that is an `ipc://` address.

        At most `max_queue` records wait for a connection that does not read. Raises `ConfigError` if the
        address cannot be bound.
        """
        return Listener(self.bind(host, port, max_queue=max_queue, max_frame_bytes=CONTROL_BYTES))

    def bind(self, host: str, port: int, *, max_queue: int, max_frame_bytes: int) -> zmq.asyncio.Socket:
        """Return a ROUTER socket for frames of any format, bound to `host:port` (0: a free one) or `ipc://`.

        At most `max_queue` frames wait for one peer. The first call with keys also starts the authenticator.
        Raises `ConfigError` if the address cannot be bound, or is not local although there are no keys.
        """
        if self._keys is None and not is_local(host):
            raise ConfigError(f"relay.host={host}: without keys a node listens on 127.0.0.1 only; give it keys")
        if self._authenticator is None and self._keys is not None:
            # Without an authenticator libzmq encrypts, but admits every key.
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            shared_key = self._keys.public.encode()
            provider = SimpleNamespace(callback=lambda domain, key: key == shared_key)
            self._authenticator.configure_curve_callback(credentials_provider=provider)
        socket = self._socket(zmq.ROUTER, max_frame_bytes=max_frame_bytes)
        socket.set(zmq.SNDHWM, max_queue)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a lost connection is an error, not a silent drop
        try:
            socket.bind(host if host.startswith(IPC) else f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"relay.host={host}: cannot listen there ({error}); name an address of this machine"
            ) from error
        return socket

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> Connection:
        """Open a connection to the node at `endpoint`, which may start later."""
        return Connection(self.dealer(max_frame_bytes=max_frame_bytes), endpoint)

    def dealer(self, *, max_frame_bytes: int) -> zmq.asyncio.Socket:
        """Make an unconnected DEALER socket for frames of any format; it queues nothing without a peer."""
        socket = self._socket(zmq.DEALER, max_frame_bytes=max_frame_bytes)
        socket.set(zmq.IMMEDIATE, 1)  # no queue for an absent peer: it may come back with another state
        return socket

    def _socket(self, kind: int, *, max_frame_bytes: int) -> zmq.asyncio.Socket:
        """Make a socket with the keys, heartbeat and limits of all relay sockets; a `ROUTER` is the server."""
        socket = self._context.socket(kind)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys.public.encode(), self._keys.secret.encode()
            if kind == zmq.ROUTER:
                socket.curve_server = True
            else:
                socket.curve_serverkey = self._keys.public.encode()
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
        socket.set(zmq.SNDHWM, 0)  # a child sends few and small records
        socket.set(zmq.RCVHWM, 1024)  # credits keep an honest parent far below this
        socket.set(zmq.HEARTBEAT_IVL, max(1, int(self._heartbeat_s * 1000 / 3)))
        socket.set(zmq.HEARTBEAT_TIMEOUT, int(self._heartbeat_s * 1000))
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        return socket

    def close(self) -> None:
        """Stop the authenticator and free the context; close listeners and connections before."""
        if self._authenticator is not None:
            self._authenticator.stop()
        # `term` would wait for a socket whose making failed; `destroy` closes that socket too.
        self._context.destroy(linger=0)


def is_local(host: str) -> bool:
    """True if only this machine reaches an address."""
    return host == "localhost" or host.startswith((IPC, "127."))


def tcp_host(endpoint: str) -> str:
    """The host in an endpoint, e.g. `10.0.0.4` in `tcp://10.0.0.4:7000`."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


# ---- short frames of many peers


def peer_sockets(keys: RelayKeys) -> SocketFactory:
    """Make the factory of keys and threads that all peer sockets of one process share."""
    return SocketFactory(keys, heartbeat_s=PEER_HEARTBEAT_S)


class _PeerSocket:
    """A socket on the event loop that takes many frames at a time, without a wait for each.

    pyzmq's asyncio sockets take ten times as long over a message as the socket itself. ZeroMQ signals new messages
    once, through a file descriptor, and any call on the socket may consume that signal. So each call here ends
    with `_check_readable`.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._async_socket = socket
        self._socket: zmq.Socket[bytes] = zmq.Socket.shadow(socket)  # the same socket, without asyncio
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._check_readable)
        self._check_readable()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a message; True once one has come, False after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._readable.wait()
        return self._readable.is_set()

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return bool(self._async_socket.closed)

    def close(self) -> None:
        """End all connections."""
        if not self.closed:
            self._loop.remove_reader(self._fd)
            self._async_socket.close()

    def _check_readable(self) -> None:
        """Set the event of `wait` if a message waits, else clear it."""
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._readable.set()
        else:
            self._readable.clear()

    def _receive(self, limit: int) -> list[list[zmq.Frame]]:
        """Return up to `limit` waiting messages, each a list of frames, without a wait."""
        messages: list[list[zmq.Frame]] = []
        with contextlib.suppress(zmq.Again):
            while len(messages) < limit:
                messages.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        self._check_readable()
        return messages

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message; drop it and return False if no peer can take it now."""
        assert len(frames[-1]) <= MAX_FRAME_BYTES, f"a frame of {len(frames[-1])} bytes would end its connection"
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        finally:
            self._check_readable()
        return True


class PeerServer(_PeerSocket):
    """The socket that all peers connect to."""

    def __init__(self, keys: RelayKeys, host: str) -> None:
        self._sockets = peer_sockets(keys)
        socket = self._sockets.bind(host, 0, max_queue=MAX_QUEUED, max_frame_bytes=MAX_FRAME_BYTES)
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a peer that connects again need not wait for its old connection
        self.endpoint = _endpoint(socket)
        super().__init__(socket)

    @property
    def has_more(self) -> bool:
        """True if a message waits to be read."""
        return self._readable.is_set()

    def drain(self, limit: int) -> list[tuple[bytes, memoryview]]:
        """Return up to `limit` waiting frames, each behind the name of its sender."""
        return [(frames[0].bytes, frames[1].buffer) for frames in self._receive(limit) if len(frames) == 2]

    def send(self, to: bytes, frame: bytes) -> bool:
        """Send a frame to a peer; drop it and return False if the peer is gone or its queue is full."""
        return self._send([to, frame])

    def close(self) -> None:
        """Free the port and end all connections."""
        super().close()
        self._sockets.close()


class PeerClient(_PeerSocket):
    """The socket of one peer, under a name that no other connected peer has; it reconnects by itself."""

    def __init__(self, sockets: SocketFactory, endpoint: str, name: str) -> None:
        socket = sockets.dealer(max_frame_bytes=MAX_FRAME_BYTES)
        socket.set(zmq.IDENTITY, name.encode())
        socket.connect(endpoint)
        super().__init__(socket)

    async def receive(self) -> memoryview:
        """Wait for the next frame."""
        while True:
            await self.wait()
            await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
            for frames in self._receive(1):
                return frames[0].buffer

    def drain(self, limit: int) -> list[memoryview]:
        """Return up to `limit` waiting frames."""
        return [frames[0].buffer for frames in self._receive(limit)]

    def send(self, frame: bytes) -> bool:
        """Send a frame; drop it and return False while the connection is down."""
        return self._send([frame])
