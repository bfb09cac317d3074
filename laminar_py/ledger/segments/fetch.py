"""Pieces of other hosts, from their stores: the `PieceFetch` of a `PayloadReader`.

Each process that reads pieces has one client, whose threads may share it; stores are in `segments.store`, and what
both say to each other is in `segments.wire`. Invariant: a piece is called lost at once where its store says so,
and only there. All else, a stranger at the port among it, is a store that is away, which is asked again for
`retry_s`, each time at the address that it left last. All requests of a process share these seconds, so that a
host that is gone is waited for once and not by each of them in turn.
"""

import hmac
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from laminar_py.ledger.segments import wire
from laminar_py.ledger.segments.reader import StoreAwayError
from laminar_py.ledger.segments.wire import AnswerStatus
from laminar_py.records.codec import encode
from laminar_py.records.pieces import PayloadLostError, PieceRef

RETRY_S = 60.0
ANSWER_S = 20.0  # without a byte, after which a connection is given up
PART_BYTES = 8 * 2**20  # of one request, so that a large fetch has several connections
CONNECTIONS = 4  # at a time for one fetch, and kept for each store
BLOCK_BYTES = 2**20  # received at a time: memory that stays in the processor's cache
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # between two tries; each is twice the one before


class StoreConnection:
    """Connection to the store at an address. Raises `OSError` where none is made."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, ANSWER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = self._socket.makefile("rb", BLOCK_BYTES)

    def send(self, data: bytes) -> None:
        """Send all of it. Raises `OSError`."""
        self._socket.sendall(data)

    def receive(self, size: int) -> bytes:
        """[size] the next bytes. Raises `OSError`."""
        data: bytes = self._received.read(size)
        if len(data) < size:
            raise ConnectionError("the answer ended before its end")
        return data

    def close(self) -> None:
        """End it."""
        self._received.close()
        self._socket.close()


class StoreClient:
    """Client of the stores of a run, e.g. `PayloadReader(folder, fetch=StoreClient(key, run / "stores"))`.

    `addresses` is the folder in which stores leave theirs.
    """

    def __init__(self, key: bytes, addresses: Path, *, retry_s: float = RETRY_S) -> None:
        self._key = wire.check_key(key)
        self._addresses = addresses
        self._retry_s = retry_s
        self._away: dict[str, tuple[float, float]] = {}  # since when, and until when, a store does not answer
        self._idle: dict[str, list[StoreConnection]] = {}  # connections of each store that nobody uses
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch")

    def __call__(self, store: str, refs: Sequence[PieceRef]) -> list[bytes]:
        """Whole frames, in order. Raises `PayloadLostError`, and `StoreAwayError` after `retry_s`."""
        parts = list(split(refs))
        if len(parts) == 1:
            return self._fetch(store, parts[0])
        asked = [self._threads.submit(self._fetch, store, part) for part in parts]
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

    def _fetch(self, store: str, refs: Sequence[PieceRef]) -> list[bytes]:
        body, sizes = encode(wire.make_request(refs)), [ref.num_bytes for ref in refs]
        away_since, pause_s = None, FIRST_PAUSE_S
        while True:
            kept = self._kept(store)
            try:
                connection = kept or StoreConnection(wire.find_address(self._addresses, store))
                pieces = self._ask(store, connection, body, sizes)
            except OSError as error:
                if kept is not None:  # it ended while nobody used it
                    continue
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                away_s = max(now - away_since, self._note_away(store, now))
                if away_s >= self._retry_s or self._closed.is_set():
                    raise StoreAwayError(_tell_away(store, refs, error, away_s)) from None
            else:
                self._away.pop(store, None)
                return pieces
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _note_away(self, store: str, now: float) -> float:
        """Seconds for which a store has answered no request, as far as one was made in the last `retry_s`."""
        with self._lock:
            since, until = self._away.get(store, (now, now))
            self._away[store] = (since if now - until <= self._retry_s else now), now
            return now - self._away[store][0]

    def _ask(self, store: str, connection: StoreConnection, body: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Pieces of these sizes; the connection is kept or closed. Raises `PayloadLostError`.

        `OSError` says that the store is away, or that somebody else answers.
        """
        request = wire.request_signature(self._key, body)
        try:
            connection.send(wire.REQUEST_HEAD.pack(request, len(body)) + body)
            signature, status, size = wire.ANSWER_HEAD.unpack(connection.receive(wire.ANSWER_HEAD.size))
            line = b"" if status == AnswerStatus.PIECES else connection.receive(min(size, wire.LINE_BYTES))
            right = wire.answer_signature(self._key, request, status, size, line)
            if not hmac.compare_digest(signature, right):
                raise ConnectionError("what answers there does not have the run's key")
            if status == AnswerStatus.PIECES and size != sum(sizes):
                raise ConnectionError(f"{size} bytes, where {sum(sizes)} were asked for")
            pieces = [connection.receive(one) for one in sizes] if status == AnswerStatus.PIECES else []
        except OSError:
            connection.close()
            raise
        self._keep(store, connection)
        told = line.decode(errors="replace")
        if status == AnswerStatus.LOST:
            raise PayloadLostError(f"{told} ({store})")
        if status == AnswerStatus.REFUSED:
            raise ConnectionError(told)
        return pieces

    def _kept(self, store: str) -> StoreConnection | None:
        """A connection that nobody uses."""
        with self._lock:
            return self._idle[store].pop() if self._idle.get(store) else None

    def _keep(self, store: str, connection: StoreConnection) -> None:
        with self._lock:
            kept = self._idle.setdefault(store, [])
            if len(kept) < CONNECTIONS and not self._closed.is_set():
                kept.append(connection)
                return
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


def _tell_away(store: str, refs: Sequence[PieceRef], error: Exception, away_s: float) -> str:
    segments = sorted({ref.segment for ref in refs})
    others = f" and {len(segments) - 1} more" if len(segments) > 1 else ""
    return f"{segments[0]}{others}: {store} is away for {away_s:.0f} s: {error or type(error).__name__}"
