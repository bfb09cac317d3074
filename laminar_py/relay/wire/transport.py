"""ZeroMQ sockets of the relay tree, wrapped so that records go in and come out; `post` beside it has the link's.

Used by node and subscriber. Invariant: every socket speaks CURVE with the run's one keypair, refuses
all other keys, bounds a frame before memory for it is allocated, and does not linger when closed unless
told to. Without keys, which benchmarks compare with, a node listens on loopback or `ipc://` alone.
Sends never wait: what has nowhere to go is dropped, and states are said anew on connect and every few seconds.
"""

import asyncio
import errno
import logging
import os
from collections.abc import Awaitable
from enum import Enum
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from laminar_py.config.section import ConfigError
from laminar_py.records import codec
from laminar_py.relay.wire.messages import NOTHING, Chunk, Downward, ToChild, ToParent, Upward

log = logging.getLogger(__name__)

IPC = "ipc://"
# Encryption takes a core for half a gigabyte a second: connections share these threads, one has one of them.
IO_THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
CONTROL_BYTES = 2**20  # bound of records without weights; the largest is a manifest, 150 bytes a file

SocketError = zmq.ZMQError  # what a socket raises, for those who may not import zmq

Received = TypeVar("Received")


class PortInUseError(ConfigError):
    """A port that another process has."""


class RelayKeys(msgspec.Struct, frozen=True):
    """The keypair that all parties of one run hold, e.g. `RelayKeys.generate()`; whoever has it is let in."""

    public: str  # 40 characters, Z85
    secret: str  # 40 characters, Z85

    @classmethod
    def generate(cls) -> "RelayKeys":
        """New keys for a run."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    def __repr__(self) -> str:
        return f"RelayKeys(public={self.public!r}, secret=...)"  # logs must not hold the secret


class LinkState(Enum):
    """State of a connection, told by `Link.receive`. DOWN -> UP -> DOWN -> UP ... ; starts DOWN."""

    UP = "up"
    DOWN = "down"


class _OneKey:
    """Credentials provider of the authenticator: one key is known, all others are not."""

    def __init__(self, public: str) -> None:
        self._public = public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """True if a client with this key may connect."""
        return key == self._public


def _configure(
    socket: "zmq.Socket[bytes] | zmq.asyncio.Socket",
    keys: RelayKeys | None,
    *,
    server: bool,
    max_frame_bytes: int,
    heartbeat_s: float,
) -> None:
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        if server:
            socket.curve_server = True
        else:
            socket.curve_serverkey = keys.public.encode()
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.MAXMSGSIZE, max_frame_bytes)
    socket.set(zmq.SNDHWM, 0)  # upwards go a few small records
    socket.set(zmq.RCVHWM, 1024)  # credits keep what comes from an honest parent far below
    socket.set(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000 / 3)))
    socket.set(zmq.HEARTBEAT_TIMEOUT, int(heartbeat_s * 1000))
    socket.set(zmq.RECONNECT_IVL, 50)
    socket.set(zmq.RECONNECT_IVL_MAX, 1000)


def read_record(kind: type[Received], frame: memoryview) -> Received | None:
    """The record in a frame, None with a warning if a peer sent something else."""
    try:
        return codec.decode(kind, frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        log.warning("dropped a frame of %d bytes: %s", len(frame), error)
        return None


def pack(message: Downward) -> list[bytes | memoryview]:
    """The frames of a record; the bytes of a chunk are not copied."""
    if isinstance(message, Chunk):
        return [codec.encode(msgspec.structs.replace(message, data=NOTHING)), message.data]
    return [codec.encode(message)]


def unpack(frames: list[memoryview]) -> ToChild | None:
    """The record in frames from a parent, None with a warning if it is none."""
    message: ToChild | None = read_record(ToChild, frames[0])  # type: ignore[arg-type]
    if isinstance(message, Chunk) and len(frames) == 2 and not message.data:
        return msgspec.structs.replace(message, data=frames[1])
    if isinstance(message, Chunk) or len(frames) > 1:
        log.warning("dropped a record of %d frames", len(frames))
        return None
    return message


def _error_of(sent: Awaitable[zmq.MessageTracker | None]) -> BaseException | None:
    assert isinstance(sent, asyncio.Future), f"a send gave a {type(sent).__name__}"
    assert sent.done(), "a send that may not block was left pending"
    return sent.exception()


class Listener:
    """Socket for nodes and subscribers below (ROUTER). Each connection has a sender id of its own."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        endpoint = socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes), f"last endpoint is {endpoint!r}"
        self.endpoint = endpoint.rstrip(b"\0").decode()

    async def receive(self) -> tuple[bytes, ToParent]:
        """The next record and who sent it."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
            message: ToParent | None = None
            if len(frames) == 2:
                message = read_record(ToParent, frames[1].buffer)  # type: ignore[arg-type]
            if message is not None:
                return frames[0].bytes, message

    def send(self, to: bytes, message: Downward) -> bool:
        """Hand a record to a connection; False if that is gone. One that reads nothing loses what is too much."""
        error = _error_of(self._socket.send_multipart([to, *pack(message)], zmq.NOBLOCK, copy=False))
        if isinstance(error, zmq.Again):
            log.warning("a connection below takes nothing: dropped a %s", type(message).__name__)
        elif isinstance(error, zmq.ZMQError) and error.errno == errno.EHOSTUNREACH:
            return False
        elif error is not None:
            raise error
        return True

    def close(self) -> None:
        """Give the port back; connections end."""
        self._socket.close()


class Link:
    """The connection upwards (DEALER), which reconnects by itself. Nothing is queued while it is down."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._monitor, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        socket.connect(endpoint)

    async def receive(self, timeout_s: float | None = None) -> "ToChild | LinkState | None":
        """The next record, or a change of the connection; None after `timeout_s` without either."""
        while True:
            ready = dict(await self._poller.poll(None if timeout_s is None else int(timeout_s * 1000)))
            await asyncio.sleep(0)  # see Listener.receive
            if not ready:
                return None
            if self._monitor in ready:
                return await self._state()
            try:
                frames = await self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:  # the connection broke since, and took with it what it had brought
                continue
            message = unpack([frame.buffer for frame in frames])
            if message is not None:
                return message

    async def _state(self) -> LinkState:
        event = await recv_monitor_message(self._monitor)
        self._socket.get(zmq.EVENTS)  # lets the socket see its new connection before the first send
        return LinkState.UP if event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else LinkState.DOWN

    def send(self, message: Upward) -> bool:
        """Hand a record to the node above; False, and dropped, while the link is down."""
        error = _error_of(self._socket.send(codec.encode(message), zmq.NOBLOCK))
        if error is not None and not isinstance(error, zmq.Again):
            raise error
        return error is None

    def close(self, *, linger_s: float = 0.0) -> None:
        """End the connection, after at most `linger_s` for the last record to leave."""
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=int(linger_s * 1000))


class Wire:
    """Sockets of one asyncio party. A peer that is silent for `heartbeat_s` is taken for gone."""

    def __init__(self, keys: RelayKeys | None, *, heartbeat_s: float) -> None:
        self._keys = keys
        self._heartbeat_s = heartbeat_s
        self._context = zmq.asyncio.Context(io_threads=IO_THREADS)
        self._authenticator: AsyncioAuthenticator | None = None

    def listen(self, host: str, port: int, *, max_queue: int) -> Listener:
        """A listener on `host:port`, port 0 for a free one, or on a host that is an `ipc://` address.

        At most `max_queue` records wait for a connection that does not read. Raises `ConfigError` if the address
        cannot be had, `PortInUseError` if that is because another process has its port.
        """
        return Listener(self.bind(host, port, max_queue=max_queue, max_frame_bytes=CONTROL_BYTES))

    def bind(self, host: str, port: int, *, max_queue: int, max_frame_bytes: int) -> zmq.asyncio.Socket:
        """The socket of `listen`, for records of another kind."""
        if self._keys is None and not is_local(host):
            raise ConfigError(f"relay.host={host}: without keys a node listens on 127.0.0.1 only; give it keys")
        if self._authenticator is None and self._keys is not None:
            # Without it libzmq would encrypt, but let in every key.
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(credentials_provider=_OneKey(self._keys.public))
        socket = self._socket(zmq.ROUTER, server=True, max_frame_bytes=max_frame_bytes)
        socket.set(zmq.SNDHWM, max_queue)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a lost connection is an error, not a silent drop
        try:
            socket.bind(host if host.startswith(IPC) else f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            socket.close()
            raise _bind_error(host, port, error) from error
        return socket

    def connect(self, endpoint: str, *, max_frame_bytes: int) -> Link:
        """A link to the node at `endpoint`, which need not be there yet."""
        return Link(self.dealer(max_frame_bytes=max_frame_bytes), endpoint)

    def dealer(self, *, max_frame_bytes: int) -> zmq.asyncio.Socket:
        """The socket of `connect`, not connected yet, for records of another kind."""
        socket = self._socket(zmq.DEALER, server=False, max_frame_bytes=max_frame_bytes)
        socket.set(zmq.IMMEDIATE, 1)  # no queue towards a peer that is not there: it may come back with new state
        return socket

    def _socket(self, kind: int, *, server: bool, max_frame_bytes: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        _configure(
            socket, self._keys, server=server, max_frame_bytes=max_frame_bytes, heartbeat_s=self._heartbeat_s
        )
        return socket

    def close(self) -> None:
        """Free the context; listeners and links must be closed before."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)  # with a socket that failed while it was made, for which `term` would wait


def is_local(host: str) -> bool:
    """True if only this machine reaches an address."""
    return host == "localhost" or host.startswith((IPC, "127."))


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(
            f"relay.base_port={port}: in use on {host}; choose a free range, or leave it out for free ports"
        )
    return ConfigError(f"relay.host={host}: cannot listen there ({error}); name an address of this machine")
