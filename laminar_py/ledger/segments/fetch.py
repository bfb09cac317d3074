"""Pieces of other hosts, from their stores: the `PieceFetch` of a `PayloadReader`.

Each process that reads pieces has one client, whose threads may share it; stores are in `segments.store`, and what
both say to each other is in `segments.wire`. Invariant: a piece is called lost at once where its store says so,
and only there. All else, a stranger at the port among it, is a store that is away, which is asked again for
`retry_s`: it restarts on its port, or on another one, of which it leaves a note (`segments.moves`). All requests
of a process share these seconds, so that a host that is gone is waited for once and not by each of them in turn.
"""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException, HTTPResponse
from pathlib import Path

from laminar_py.ledger.segments import wire
from laminar_py.ledger.segments.moves import present_address
from laminar_py.ledger.segments.reader import StoreAwayError
from laminar_py.records.codec import encode
from laminar_py.records.pieces import PayloadLostError, PieceRef

RETRY_S = 60.0
ANSWER_S = 20.0  # without a byte, after which a connection is given up
PART_BYTES = 8 * 2**20  # of one request, so that a large fetch has several connections
CONNECTIONS = 4  # at a time for one fetch, and kept for each store
BLOCK_BYTES = 2**20  # received at a time: memory that stays in the processor's cache
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # between two tries; each is twice the one before


class StoreConnection:
    """Connection to a store, made when it is first asked. Head and body of a request are one packet, as a rule."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket: socket.socket | None = None

    def ask(self, body: bytes, signature: str) -> HTTPResponse:
        """Answer, of which the head is there. Raises `OSError` and `HTTPException`."""
        if self._socket is None:
            self._socket = socket.create_connection(wire.split_address(self.address), ANSWER_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            f"POST {wire.ROUTE} HTTP/1.1\r\nHost: {self.address}\r\nContent-Length: {len(body)}\r\n"
            f"{wire.SIGNATURE}: {signature}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        response = HTTPResponse(self._socket, method="POST")
        response.begin()
        return response

    def close(self) -> None:
        """End it."""
        if self._socket is not None:
            self._socket.close()


class StoreClient:
    """Client of the stores of a run, e.g. `PayloadReader(folder, fetch=StoreClient(key))`.

    `moves` is the folder with the notes of stores that came back at another address.
    """

    def __init__(self, key: bytes, *, retry_s: float = RETRY_S, moves: Path | None = None) -> None:
        self._key = wire.check_key(key)
        self._moves = moves
        self._away: dict[str, tuple[float, float]] = {}  # since when, and until when, nobody answers at an address
        self._found: dict[str, str] = {}  # where stores were found that serve elsewhere than was told
        self._retry_s = retry_s
        self._idle: dict[str, list[StoreConnection]] = {}  # connections of each store that nobody uses
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch")

    def __call__(self, address: str, refs: Sequence[PieceRef]) -> list[bytes]:
        """Whole frames, in order. Raises `PayloadLostError`, and `StoreAwayError` after `retry_s`."""
        parts = list(split(refs))
        if len(parts) == 1:
            return self._fetch(address, parts[0])
        asked = [self._threads.submit(self._fetch, address, part) for part in parts]
        try:
            return [piece for answer in asked for piece in answer.result()]
        finally:
            for answer in asked:
                answer.cancel()

    def close(self) -> None:
        """End all connections; who waits for a store waits no more."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            for connection in (one for kept in self._idle.values() for one in kept):
                connection.close()
            self._idle.clear()

    def _fetch(self, address: str, refs: Sequence[PieceRef]) -> list[bytes]:
        body, told = encode(wire.make_request(refs)), address
        address = self._found.get(told, told)
        away_since, pause_s = None, FIRST_PAUSE_S
        while True:
            connection, is_new = self._connect(address)
            try:
                pieces = self._ask(connection, address, body, [ref.num_bytes for ref in refs])
            except (OSError, HTTPException) as error:
                connection.close()
                if not is_new:  # it closed while nobody used it, as the others may have
                    self._forget(address)
                    continue
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                away_s = max(now - away_since, self._note_away(told, now))
                if away_s >= self._retry_s or self._closed.is_set():
                    raise StoreAwayError(_tell_away(address, refs, error, away_s)) from None
            except PayloadLostError:
                self._keep(address, connection)
                raise
            else:
                self._away.pop(told, None)
                self._keep(address, connection)
                return pieces
            if self._moves is not None:
                address = self._found[told] = present_address(self._moves, told)
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _note_away(self, address: str, now: float) -> float:
        """Seconds for which nobody has answered any request, as far as one was made in the last `retry_s`."""
        with self._lock:
            since, until = self._away.get(address, (now, now))
            self._away[address] = (since if now - until <= self._retry_s else now), now
            return now - self._away[address][0]

    def _ask(self, connection: StoreConnection, address: str, body: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Pieces of these sizes. Raises `PayloadLostError`; `OSError` and `HTTPException` say that it is away."""
        signature = wire.request_signature(self._key, body)
        response = connection.ask(body, signature)
        length = response.length or 0
        if response.status == 200:
            self._check(response, signature)
            if length != sum(sizes):
                raise HTTPException(f"{length} bytes, where {sum(sizes)} were asked for")
            return receive(response, sizes)
        line = response.read(min(length, wire.LINE_BYTES))
        self._check(response, signature, line)
        told = line.decode(errors="replace")
        if response.status == wire.LOST:
            raise PayloadLostError(f"{told} (store {address})")
        raise HTTPException(f"{response.status} {told}")

    def _check(self, response: HTTPResponse, request: str, line: bytes = b"") -> None:
        """Raise `HTTPException` unless it is a store of the run that answers."""
        right = wire.answer_signature(self._key, request, response.status, line)
        if response.headers.get(wire.SIGNATURE, "") != right:
            raise HTTPException(f"what answers there ({response.status}) does not have the run's key")

    def _connect(self, address: str) -> tuple[StoreConnection, bool]:
        """A connection that nobody else uses, and whether it is new."""
        with self._lock:
            if kept := self._idle.get(address):
                return kept.pop(), False
        return StoreConnection(address), True

    def _keep(self, address: str, connection: StoreConnection) -> None:
        with self._lock:
            kept = self._idle.setdefault(address, [])
            if len(kept) < CONNECTIONS and not self._closed.is_set():
                kept.append(connection)
                return
        connection.close()

    def _forget(self, address: str) -> None:
        with self._lock:
            kept = self._idle.pop(address, [])
        for connection in kept:
            connection.close()


def split(refs: Sequence[PieceRef]) -> Iterator[list[PieceRef]]:
    """References in their order, as many together as a request may have; several have at most `PART_BYTES`."""
    part, size, segments = list[PieceRef](), 0, set[str]()
    for ref in refs:
        many = len(part) == wire.MOST_PIECES or len(segments | {ref.segment}) > wire.MOST_SEGMENTS
        if part and (many or size + ref.num_bytes > PART_BYTES):
            yield part
            part, size, segments = [], 0, set()
        part.append(ref)
        segments.add(ref.segment)
        size += ref.num_bytes
    if part:
        yield part


def receive(response: HTTPResponse, sizes: Sequence[int]) -> list[bytes]:
    """Pieces of these sizes out of a body. Raises `HTTPException` where that ends before."""
    pieces = list[bytes]()
    block = memoryview(bytearray(min(sum(sizes), BLOCK_BYTES)))
    for run in _runs(sizes):
        size, end = sum(run), 0
        data = block[:size] if size <= len(block) else memoryview(bytearray(size))
        if response.readinto(data) < size:
            raise HTTPException("the answer ended before its end")
        for one in run:
            pieces.append(bytes(data[end : end + one]))
            end += one
    return pieces


def _runs(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Sizes in their order, so many together as a block has room for, or one that is larger."""
    run, room = list[int](), BLOCK_BYTES
    for size in sizes:
        if run and size > room:
            yield run
            run, room = [], BLOCK_BYTES
        run.append(size)
        room -= size
    if run:
        yield run


def _tell_away(address: str, refs: Sequence[PieceRef], error: Exception, away_s: float) -> str:
    segments = sorted({ref.segment for ref in refs})
    others = f" and {len(segments) - 1} more" if len(segments) > 1 else ""
    return f"{segments[0]}{others}: store {address} is away for {away_s:.0f} s: {error or type(error).__name__}"
