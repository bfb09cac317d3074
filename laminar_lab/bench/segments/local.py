"""Segments beside a plain file and a bare socket.

Written: MB/s of a `SegmentWriter` beside a plain file that gets the same bytes in as many calls, without sync, and
beside a plain file with the BLAKE3 of each piece. Fetched: MB/s through store and client beside a plain TCP
connection that carries as many bytes from one buffer into a warm one. Every side moves the same bytes in each
round.
"""

import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from blake3 import blake3

from laminar_lab.bench.processes import Worker
from laminar_lab.bench.report import Ratio, Row, Side, in_turn, load_now
from laminar_lab.bench.workplace import workplace
from laminar_py.ledger.segments import LOCAL, PieceStore, SegmentWriter, StoreClient, leave_address, make_frame
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import Piece, PieceRef
from laminar_py.records.spans import Span

ROWS = ("segment_write_over_file", "segment_write_over_digested_file", "segment_fetch_over_socket")
ROUND_BYTES = 32 * 2**20  # written by each side in a round
PARTS = 4  # writers of the fetched segments
WARM = 2  # rounds before the ones that count
OURS, BARE, DIGESTED = "ours", "bare", "digested"
STORE = "store-0"


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """Pieces that are written or fetched at a time, e.g. `PieceBatch(3000, 16)`."""

    tokens: int  # of each
    count: int


def rows(
    *, repeats: int = 15, tokens: int = 3000, written: int = 16, fetched: int = 256, num_bytes: int = ROUND_BYTES
) -> list[Row]:
    """Write so many pieces of so many tokens at a time, and fetch so many; a learner's rank fetches 256."""
    batch = PieceBatch(tokens, written)
    return [
        *write_rows(batch, repeats=repeats, num_bytes=num_bytes),
        fetch_row(PieceBatch(tokens, fetched), repeats=repeats),
    ]


def write_rows(batch: PieceBatch, *, repeats: int, num_bytes: int) -> list[Row]:
    """Compare a writer with a plain file, and with a plain file plus the BLAKE3 of each piece."""
    with workplace() as folder, Worker(partial(_write, folder=folder, batch=batch, num_bytes=num_bytes)) as writer:
        sides: dict[str, Side] = {name: partial(_request_rate, writer, name) for name in (OURS, BARE, DIGESTED)}
        rates = in_turn(sides, rounds=repeats, warm=WARM)
    conditions = (
        f"{num_bytes / 2**20:g} MiB in pieces of {batch.tokens:,} tokens (8 bytes each), {batch.count} at a time,"
        f" into the page cache: {describe_rates(rates)}"
    )
    return [
        Ratio.between(rates[OURS], rates[BARE]).row("segment_write_over_file", conditions),
        Ratio.between(rates[OURS], rates[DIGESTED]).row("segment_write_over_digested_file", conditions),
    ]


def fetch_row(batch: PieceBatch, *, repeats: int) -> Row:
    """Compare a fetch with a bare socket over loopback."""
    with workplace() as folder, fetch_sides(folder, batch) as sides:
        rates = in_turn(sides, rounds=repeats, warm=WARM)
    conditions = (
        f"{batch.count} pieces of {batch.tokens:,} tokens (8 bytes each) from {PARTS} segments in the page cache;"
        f" bare: sendall of one buffer, recv_into a warm one, loopback: {describe_rates(rates)}"
    )
    return Ratio.between(rates[OURS], rates[BARE]).row("segment_fetch_over_socket", conditions)


def describe_rates(rates: dict[str, list[float]]) -> str:
    """Describe the median rate of each side, and the machine's load."""
    return f"{', '.join(f'{name} {median(found):,.0f} MB/s' for name, found in rates.items())}; {load_now()}"


def make_pieces(batch: PieceBatch, count: int) -> list[Piece]:
    """Make so many pieces whose bytes all differ."""
    size = 4 * batch.tokens
    return [
        Piece(
            trajectory_id=f"g{index // 8}.{index % 8}",
            epoch=1,
            start=0,
            spans=(Span(7, 0, batch.tokens),),
            ids=secrets.token_bytes(size),
            logprobs=secrets.token_bytes(size),
        )
        for index in range(count)
    ]


# ---- written


def _request_rate(worker: Worker, name: str, _: int) -> float:
    """Return MB/s of a side in another process, which has the allocator of a run's processes."""
    return worker.request(name, float)


def _write(pipe: Connection, *, folder: Path, batch: PieceBatch, num_bytes: int) -> None:
    """Write with the side that each message names, each time into a new folder; send MB/s."""
    count = max(1, num_bytes // (8 * batch.tokens * batch.count)) * batch.count
    pieces = make_pieces(batch, count)
    batches = [pieces[first : first + batch.count] for first in range(0, count, batch.count)]
    frames = [[b"".join(make_frame(piece).buffers) for piece in written] for written in batches]
    whole = [b"".join(written) for written in frames]
    size = sum(map(len, whole))
    while True:
        name = pipe.recv()
        path = folder / name
        path.mkdir()
        if name == OURS:
            writer = SegmentWriter(path, "replica-0")
            began = time.perf_counter()
            for pieces in batches:
                writer.write_all(pieces)
            elapsed_s = time.perf_counter() - began
        else:
            elapsed_s = _write_plain(path / "plain", whole, frames if name == DIGESTED else [])
        shutil.rmtree(path)
        pipe.send(size / elapsed_s / 1e6)


def _write_plain(path: Path, whole: Sequence[bytes], frames: Sequence[Sequence[bytes]]) -> float:
    """Return the seconds to write a plain file, and to digest `frames`."""
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for batch in frames:
            for frame in batch:
                blake3(frame).digest()
        for data in whole:
            file.write(data)
        return time.perf_counter() - began


# ---- fetched


@contextmanager
def fetch_sides(folder: Path, batch: PieceBatch) -> Iterator[dict[str, Side]]:
    """Yield both sides: MB/s of a fetch from a store in another process, and of a bare socket."""
    writers = [SegmentWriter(folder, f"replica-{part}") for part in range(PARTS)]
    pieces = make_pieces(batch, batch.count)
    refs = [writers[index % PARTS].write(piece) for index, piece in enumerate(pieces)]
    num_bytes = sum(ref.num_bytes for ref in refs)
    key = secrets.token_bytes(32)
    with ExitStack() as stack:
        store = stack.enter_context(Worker(partial(_serve, folder=folder, key=key)))
        bare = stack.enter_context(Worker(partial(_send, num_bytes=num_bytes)))
        store.receive(str)
        work = partial(_fetch, folder=folder, bare=bare.receive(tuple), key=key, refs=encode(refs))
        client = stack.enter_context(Worker(work))

        yield {name: partial(_request_rate, client, name) for name in (OURS, BARE)}


def _serve(pipe: Connection, *, folder: Path, key: bytes) -> None:
    leave_address(folder, STORE, PieceStore(folder, key=key).start(LOCAL))
    pipe.send("serving")
    threading.Event().wait()


def _send(pipe: Connection, *, num_bytes: int) -> None:
    """Send so many bytes whenever a byte arrives."""
    data = secrets.token_bytes(num_bytes)
    with socket.create_server((LOCAL, 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(data)


def _fetch(pipe: Connection, *, folder: Path, bare: tuple[str, int], key: bytes, refs: bytes) -> None:
    """Fetch with the side that each message names; send MB/s."""
    wanted: Sequence[PieceRef] = decode(list[PieceRef], refs)
    client = StoreClient(key, folder)
    size = sum(ref.num_bytes for ref in wanted)
    buffer = memoryview(bytearray(size))
    with socket.create_connection(bare) as connection:
        while True:
            name = pipe.recv()
            began = time.perf_counter()
            if name == OURS:
                client(STORE, wanted)
            else:
                connection.sendall(b"1")
                left = buffer
                while left:
                    left = left[connection.recv_into(left) :]
            pipe.send(size / (time.perf_counter() - began) / 1e6)
