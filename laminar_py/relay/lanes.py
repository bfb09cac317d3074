"""Lanes: TCP connections beside a child's control connection, which carry its chunks past the event loop.

Each lane has a thread at both ends that waits only in calls without the interpreter's lock. `Downlink` sends
chunks on `ParentLanes`, `Uplink` receives them on `ChildLanes`. The states of a child's lanes, and the records:

    none      OpenLanes(n) -> Lanes(n tickets)   on the control connection; at each connect, and at each reminder
    opening   hello: a ticket's id, and a tag under its hello key; a ticket admits one lane and then is void
    open      chunks from parent to child, each a header and a body that name what the chunk is
    broken    a lane ended, or a frame did not open: all lanes end, and the child asks for its chunks again

`relay/frames.py` seals chunks and hellos. Without seals (`relay.seal: none`) the hello is the same, and checksums
and digests prove the bytes.
"""

import asyncio
import logging
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import msgspec

from laminar_py.records import codec
from laminar_py.relay.frames import TAG_BYTES, ChunkBody, ChunkBuffer, LaneError, Sealer
from laminar_py.relay.messages import MAX_LANES, NO_DATA, Chunk, Lanes, Ticket
from laminar_py.relay.sockets import read_record

log = logging.getLogger(__name__)

_ID_BYTES = 16
HELLO_BYTES = _ID_BYTES + TAG_BYTES
HELLO = b"laminar lane 1"  # what a hello's tag is bound to, before the ticket's id
HEADER_BYTES = 512  # the two lengths, the `Chunk` without its data as a record, and zeros
LENGTHS = struct.Struct("!II")  # bytes of the record, and of the body without its tag
HELLO_S = 2.0  # for a connection to say hello
MAX_GREETED = 64  # connections that have not said hello; another one ends the oldest of them
DEAD_PEER_S = 30.0  # a host that acknowledges nothing for so long is gone
MAX_POSTED = 64  # chunks of a lane that wait for the event loop; deltas hold their bytes


class LaneWriter:
    """Sends chunks on a connected lane."""

    def __init__(self, connection: socket.socket, seal: Sealer) -> None:
        self._connection = connection
        self._seal = seal
        self._buffer = ChunkBuffer()

    def send(self, chunk: Chunk) -> None:
        """Send a chunk; wait until the kernel has it. Raises `OSError` if the lane is broken."""
        size = len(chunk.data)
        record = codec.encode(msgspec.structs.replace(chunk, data=NO_DATA))
        header = (LENGTHS.pack(len(record), size) + record).ljust(HEADER_BYTES, b"\0")
        assert len(header) == HEADER_BYTES, f"the record of a chunk has {len(record)} bytes"
        if not self._seal.tag_bytes:
            self._connection.sendall(header, socket.MSG_MORE)
            self._connection.sendall(chunk.data)
            return
        head = HEADER_BYTES + TAG_BYTES
        frame = self._buffer.take(head + size + TAG_BYTES)
        self._seal.close(header, b"", frame[:head])
        self._seal.close(chunk.data, header, frame[head:])
        self._connection.sendall(frame)


class LaneReader:
    """Receives chunks; `fill` reads from the lane until a buffer is full."""

    def __init__(self, fill: Callable[[memoryview], None], seal: Sealer, *, most_bytes: int) -> None:
        self._fill = fill
        self._seal = seal
        self._most_bytes = most_bytes
        self._frame = ChunkBuffer()
        self._opened = ChunkBuffer()  # used only by bodies that have no other place
        self._last = ChunkBody(NO_DATA)

    def receive(self) -> tuple[Chunk, ChunkBody]:
        """Wait for the next chunk; its body is good until the next call. Raises `LaneError`, `OSError`."""
        self._last.prove_unopened()
        head = self._frame.take(HEADER_BYTES + self._seal.tag_bytes)
        self._fill(head)
        header = memoryview(bytearray(HEADER_BYTES))
        self._seal.open(head, b"", header)
        record_bytes, size = LENGTHS.unpack_from(header)
        if size > self._most_bytes:
            raise LaneError(f"a chunk of {size} bytes, above the {self._most_bytes} of this node")
        chunk = read_record(Chunk, header[LENGTHS.size :][:record_bytes], "a lane")
        if chunk is None or chunk.data:
            raise LaneError("a header without the record of a chunk")
        frame = self._frame.take(size + self._seal.tag_bytes)
        self._fill(frame)
        self._last = ChunkBody(frame, self._seal, bytes(header), buffer=self._opened)
        return chunk, self._last


def make_hello(ticket: Ticket) -> bytes:
    """[HELLO_BYTES] that open one lane."""
    hello = memoryview(bytearray(HELLO_BYTES))
    hello[:_ID_BYTES] = ticket.id
    Sealer(ticket.hello_key).close(b"", HELLO + ticket.id, hello[_ID_BYTES:])
    return bytes(hello)


def _configure(connection: socket.socket) -> None:
    """Set a lane's socket to blocking calls, small delays, and an end when the other host is gone."""
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_PEER_S * 1000))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(DEAD_PEER_S))


def _end(connection: socket.socket) -> None:
    """Wake the thread that waits on a connection; that thread closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.debug("a lane was closed at both ends")


class _ChildsLanes:
    """The lanes to one child: one queue, from which the thread of each lane takes the next chunk."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Chunk | None] = SimpleQueue()
        self.connections: list[socket.socket] = []

    def end(self) -> None:
        """End all lanes; the chunks in the queue are lost, and the child asks for them again."""
        loop = asyncio.get_running_loop()
        for connection in self.connections:
            loop.remove_reader(connection)
            _end(connection)
            self.queue.put(None)
        self.connections = []


class ParentLanes:
    """A node's lanes to its children. Call all methods on the event loop; `run` admits lanes until cancelled.

    A child's lanes end together: when it asks for new ones, when one of them breaks, or when it has gone.
    """

    def __init__(self, host: str, *, sealed: bool, max_queue: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_GREETED)
        self._listener.setblocking(False)
        self._sealed = sealed
        self._max_queue = max_queue
        self._tickets: dict[bytes, tuple[bytes, Ticket]] = {}  # by id: the child that has it
        self._children: dict[bytes, _ChildsLanes] = {}
        self._greeted: dict[asyncio.Task[None], None] = {}  # the oldest first

    @property
    def port(self) -> int:
        """Port that lanes connect to."""
        port: int = self._listener.getsockname()[1]
        return port

    def offer(self, child: bytes, count: int) -> Lanes:
        """End the lanes of a child and return tickets for `count` new ones."""
        self.drop(child)
        self._children[child] = _ChildsLanes()
        tickets = tuple(
            Ticket(secrets.token_bytes(_ID_BYTES), secrets.token_bytes(32), secrets.token_bytes(32))
            for _ in range(min(count, MAX_LANES))
        )
        self._tickets |= {ticket.id: (child, ticket) for ticket in tickets}
        return Lanes(port=self.port, sealed=self._sealed, tickets=tickets)

    def send(self, child: bytes, chunk: Chunk) -> bool:
        """Queue a chunk for the lanes of a child; False if it has none open. A full queue drops the chunk."""
        lanes = self._children.get(child)
        if lanes is None or not lanes.connections:
            return False
        if lanes.queue.qsize() >= self._max_queue:
            log.warning(
                "the lanes to %s are full: dropped chunk %d of version %d", child, chunk.index, chunk.version
            )
        else:
            lanes.queue.put(chunk)
        return True

    def drop(self, child: bytes) -> None:
        """End the lanes of a child, and void its tickets."""
        self._tickets = {id: held for id, held in self._tickets.items() if held[0] != child}
        lanes = self._children.pop(child, None)
        if lanes is not None:
            lanes.end()

    async def run(self) -> None:
        """Admit lanes that say hello; end all lanes when cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError as error:  # too many open files: lanes are refused until some are closed
                    log.warning("cannot accept a lane: %s", error)
                    await asyncio.sleep(HELLO_S)
                    continue
                if len(self._greeted) >= MAX_GREETED:
                    oldest = next(iter(self._greeted))
                    del self._greeted[oldest]
                    oldest.cancel()
                task = loop.create_task(self._greet(connection))
                self._greeted[task] = None
                task.add_done_callback(lambda task: self._greeted.pop(task, None))
                await asyncio.sleep(0)  # `sock_accept` does not yield while connections wait: let greetings end
        finally:
            for task in self._greeted:
                task.cancel()
            for child in list(self._children):
                self.drop(child)

    async def _greet(self, connection: socket.socket) -> None:
        """Read a hello; open a lane for a right one, else close the connection without a word."""
        connection.setblocking(False)
        hello = b""
        opened = False
        try:
            async with asyncio.timeout(HELLO_S):
                while len(hello) < HELLO_BYTES:
                    part = await asyncio.get_running_loop().sock_recv(connection, HELLO_BYTES - len(hello))
                    if not part:
                        return
                    hello += part
            admitted = self.admit(hello)
            if admitted is not None:
                self._open(connection, *admitted)
                opened = True
        except (OSError, TimeoutError) as error:
            log.info("a connection said no hello: %r", error)
        finally:
            if not opened:
                connection.close()

    def admit(self, hello: bytes) -> tuple[bytes, Ticket] | None:
        """Return the child and the ticket of a hello, and void the ticket; None for a hello of nobody."""
        child_and_ticket = self._tickets.get(hello[:_ID_BYTES])
        if child_and_ticket is None:
            return None
        ticket = child_and_ticket[1]
        try:
            Sealer(ticket.hello_key).open(
                memoryview(hello)[_ID_BYTES:], HELLO + ticket.id, memoryview(bytearray(0))
            )
        except LaneError:
            return None
        del self._tickets[ticket.id]
        return child_and_ticket

    def _open(self, connection: socket.socket, child: bytes, ticket: Ticket) -> None:
        """Start the thread of a lane."""
        _configure(connection)
        lanes = self._children[child]
        lanes.connections.append(connection)
        loop = asyncio.get_running_loop()

        def finish() -> None:
            if connection in lanes.connections:
                self.drop(child)

        def leave() -> None:
            finish()
            connection.close()

        def run() -> None:
            writer = LaneWriter(connection, Sealer(ticket.chunk_key, sealed=self._sealed))
            try:
                while (chunk := lanes.queue.get()) is not None:
                    writer.send(chunk)
            except OSError as error:
                log.info("a lane to %s broke: %s", child.hex(), error)
            if not _post(loop, leave):
                connection.close()

        loop.add_reader(connection, finish)  # a child that sends anything after its hello, or an end, has gone
        threading.Thread(target=run, name="lane-out", daemon=True).start()

    def close(self) -> None:
        """Free the port."""
        self._listener.close()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> bool:
    """Call on the event loop from a thread; False if the loop has ended."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True


_NO_LANE = (
    "no lane to %s:%d (%s): chunks come more slowly, on the control connection; let its firewall admit this host"
    " on all ports, or set relay.seal=curve"
)
# Takes a chunk in a lane's thread; returns the rest of the work, to be called on the event loop.
ChunkTaker = Callable[[Chunk, ChunkBody], Callable[[], object] | None]


class ChildLanes:
    """A node's lanes from its parent, at most one set at a time. Call the methods on the event loop.

    `take` gets each chunk in the lane's thread. `broke` is called once after the first lane of a set has ended.
    """

    def __init__(self, count: int, take: ChunkTaker, broke: Callable[[], None], *, chunk_bytes: int) -> None:
        self._count = count
        self._take = take
        self._broke = broke
        self._chunk_bytes = chunk_bytes
        self._open: _OpenLanes | None = None
        self._refused_by: set[str] = set()  # hosts that were named in a warning

    @property
    def num_missing(self) -> int:
        """Number of lanes to ask the parent for."""
        return 0 if self._open is not None else self._count

    def open(self, host: str, offer: Lanes) -> None:
        """Connect to the parent on `host`, one lane for each ticket; ignore an offer that was not asked for."""
        if self._open is not None or not 0 < len(offer.tickets) <= self._count:
            return
        lanes = self._open = _OpenLanes(self._take, sealed=offer.sealed, most_bytes=self._chunk_bytes)
        loop = asyncio.get_running_loop()

        def finish() -> None:
            if self._open is lanes:
                self.close()
                if lanes.connected:  # else chunks came on the control connection, and none are lost
                    self._broke()

        def run(ticket: Ticket) -> None:
            try:
                lanes.receive((host, offer.port), ticket, loop)
            except (OSError, LaneError) as error:
                if lanes.connected and not lanes.ended.is_set():
                    log.warning("a lane from %s:%d broke: %s", host, offer.port, error)
                elif not lanes.connected and host not in self._refused_by:
                    self._refused_by.add(host)
                    log.warning(_NO_LANE, host, offer.port, error)
            finally:
                _post(loop, finish)

        for ticket in offer.tickets:
            threading.Thread(target=run, args=(ticket,), name="lane-in", daemon=True).start()

    def close(self) -> None:
        """End all lanes."""
        if self._open is not None:
            self._open.end()
            self._open = None


class _OpenLanes:
    """The lanes of one offer, which end together."""

    def __init__(self, take: ChunkTaker, *, sealed: bool, most_bytes: int) -> None:
        self.ended = threading.Event()
        self.connected = False  # at least one lane
        self._take = take
        self._sealed = sealed
        self._most_bytes = most_bytes
        self._connections: list[socket.socket] = []
        self._permits = threading.Semaphore(MAX_POSTED)

    def end(self) -> None:
        """Wake all threads, which then end."""
        self.ended.set()
        for connection in self._connections:
            _end(connection)
            self._permits.release()

    def receive(self, address: tuple[str, int], ticket: Ticket, loop: asyncio.AbstractEventLoop) -> None:
        """Connect and receive chunks until the lane ends. Raises `OSError`, `LaneError`."""
        with socket.create_connection(address, timeout=HELLO_S) as connection:
            _configure(connection)
            self._connections.append(connection)
            connection.sendall(make_hello(ticket))
            self.connected = True
            seal = Sealer(ticket.chunk_key, sealed=self._sealed)
            reader = LaneReader(lambda target: _fill(connection, target), seal, most_bytes=self._most_bytes)
            while not self.ended.is_set():
                rest = self._take(*reader.receive())
                if rest is not None:
                    self._permits.acquire()
                    _post(loop, partial(self._finish, rest))

    def _finish(self, rest: Callable[[], object]) -> None:
        """Do the rest of the work on a chunk, on the event loop."""
        self._permits.release()
        rest()


def _fill(connection: socket.socket, target: memoryview) -> None:
    """Read until `target` is full. Raises `OSError`, also if the other end closes the connection."""
    while target:
        received = connection.recv_into(target, 0, socket.MSG_WAITALL)
        if not received:
            raise ConnectionResetError("the other end closed it")
        target = target[received:]
