"""The client of stores: it fetches pieces from other hosts, as the `PieceFetch` of a `PayloadReader`.

Each process that reads pieces has one client, which its threads share. `segments.store` is the server and
`segments.wire` the protocol. A piece is lost only if its store says so. After any other failure, also a stranger
at the port, the client retries for `retry_s`, each time at the store's latest address. All requests of a process
share these seconds, so that a process waits for a lost host once (`tests/segments/test_fetch.py`).
"""

import hmac
import io
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import laminar_py.ledger.segments.wire as wire
from laminar_py.ledger.segments.reader import StoreAwayError
from laminar_py.ledger.segments.wire import AnswerStatus
from laminar_py.records.codec import encode
from laminar_py.records.pieces import PayloadLostError, PieceRef

RETRY_S = 60.0
ANSWER_S = 20.0  # without a byte, before a connection is closed
PART_BYTES = 8 * 2**20  # per request, so that a large fetch uses several connections
CONNECTIONS = 4  # at a time per fetch, and kept idle per store
BLOCK_BYTES = 2**20  # per receive, which stays in the CPU cache
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # between two tries; a pause doubles each time

_Connection: TypeAlias = io.BufferedRWPair


class StoreClient:
    """Client of a run's stores, e.g. `PayloadReader(folder, fetch=StoreClient(key, run / "stores"))`.

    Stores write their addresses into the folder `addresses`.
    """

    def __init__(self, key: bytes, addresses: Path, *, retry_s: float = RETRY_S) -> None:
        self._key = wire.check_key(key)
        self._addresses = addresses
        self._retry_s = retry_s
        self._away: dict[str, tuple[float, float]] = {}  # first and last failure, by store that does not answer
        self._idle: dict[str, list[_Connection]] = {}  # idle connections of each store
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch")

    def __call__(self, store: str, refs: Sequence[PieceRef]) -> list[bytes]:
        """Fetch the frames of pieces, in order.

        Raises `PayloadLostError`, and `StoreAwayError` after `retry_s`.
        """
        parts = list(split(refs))
        if len(parts) == 1:
            return self._fetch(store, parts[0])
        answers = [self._threads.submit(self._fetch, store, part) for part in parts]
        try:
            return [piece for answer in answers for piece in answer.result()]
        finally:
            for answer in answers:
                answer.cancel()

    def close(self) -> None:
        """Close all connections, and fail the calls that wait for a store."""
        self._closed.set()
        self._threads.shutdown(cancel_futures=True)
        with self._lock:
            for connection in (idle for kept in self._idle.values() for idle in kept):
                connection.close()
            self._idle.clear()

    def _fetch(self, store: str, refs: Sequence[PieceRef]) -> list[bytes]:
        """Request pieces of a store, and retry with growing pauses while the store is away.

        Raises `StoreAwayError` after `retry_s`, and `PayloadLostError` if the store lacks a piece.
        """
        body, sizes = encode(wire.make_request(refs)), [ref.num_bytes for ref in refs]
        away_since, pause_s = None, FIRST_PAUSE_S
        while True:
            kept = self._pop_idle(store)
            try:
                connection = kept or _connect(wire.find_address(self._addresses, store))
                pieces = self._request(store, connection, body, sizes)
            except OSError as error:
                if kept is not None:  # the store closed it while it was idle
                    continue
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                away_s = max(now - away_since, self._away_s(store, now))
                if away_s >= self._retry_s or self._closed.is_set():
                    raise StoreAwayError(_away_message(store, refs, error, away_s)) from None
            else:
                self._away.pop(store, None)
                return pieces
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    def _away_s(self, store: str, now: float) -> float:
        """Note a failure; return the seconds since a store's first one, unless the last is `retry_s` ago."""
        with self._lock:
            since, until = self._away.get(store, (now, now))
            self._away[store] = (since if now - until <= self._retry_s else now), now
            return now - self._away[store][0]

    def _request(self, store: str, connection: _Connection, body: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Send a request and receive pieces of these sizes; keep or close the connection.

        Raises `PayloadLostError`, and `OSError` if the store does not answer or another process answers.
        """
        request = wire.request_signature(self._key, body)
        try:
            connection.write(wire.REQUEST_HEAD.pack(request, len(body)) + body)
            connection.flush()
            signature, status, size = wire.ANSWER_HEAD.unpack(_receive(connection, wire.ANSWER_HEAD.size))
            line = b"" if status == AnswerStatus.PIECES else _receive(connection, min(size, wire.LINE_BYTES))
            expected = wire.answer_signature(self._key, request, status, size, line)
            if not hmac.compare_digest(signature, expected):
                raise ConnectionError("the process that answers does not have the run's key")
            if status == AnswerStatus.PIECES and size != sum(sizes):
                raise ConnectionError(f"{size} bytes instead of {sum(sizes)}")
            pieces = [_receive(connection, size) for size in sizes] if status == AnswerStatus.PIECES else []
        except OSError:
            connection.close()
            raise
        self._keep(store, connection)
        reason = line.decode(errors="replace")
        if status == AnswerStatus.LOST:
            raise PayloadLostError(f"{reason} ({store})")
        if status == AnswerStatus.REFUSED:
            raise ConnectionError(reason)
        return pieces

    def _pop_idle(self, store: str) -> _Connection | None:
        """Return an idle connection, None without any."""
        with self._lock:
            return self._idle[store].pop() if self._idle.get(store) else None

    def _keep(self, store: str, connection: _Connection) -> None:
        with self._lock:
            kept = self._idle.setdefault(store, [])
            if len(kept) < CONNECTIONS and not self._closed.is_set():
                kept.append(connection)
                return
        connection.close()


def _connect(address: tuple[str, int]) -> _Connection:
    """Connect to a store. Raises `OSError`."""
    connected = socket.create_connection(address, ANSWER_S)
    with connected:  # the file keeps the socket open
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = connected.makefile("rwb", BLOCK_BYTES)
        assert isinstance(connection, io.BufferedRWPair)
        return connection


def _receive(connection: _Connection, size: int) -> bytes:
    """Receive the next [size] bytes. Raises `OSError`."""
    data = connection.read(size)
    if len(data) < size:
        raise ConnectionError("the answer was cut off")
    return data


def split(refs: Sequence[PieceRef]) -> Iterator[list[PieceRef]]:
    """Split references, in order, into requests of at most `PART_BYTES` and within the bounds of `wire`."""
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


def _away_message(store: str, refs: Sequence[PieceRef], error: Exception, away_s: float) -> str:
    segments = sorted({ref.segment for ref in refs})
    others = f" and {len(segments) - 1} more" if len(segments) > 1 else ""
    return f"{segments[0]}{others}: {store} did not answer for {away_s:.0f} s: {error or type(error).__name__}"
