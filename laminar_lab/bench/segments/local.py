"""Segments beside a plain file and a bare socket.

Written: MB/s of a `SegmentWriter` beside a plain file that gets the same bytes in as many calls, without sync;
and beside one that also has the BLAKE3 of each piece made. Fetched: MB/s through store and client beside a plain
TCP connection that carries as many bytes, from one buffer into one that is warm; `laminar_lab.bench.segments`
has both on two hosts. Invariant: every side moves the same bytes in each round, and sides take turns.
"""

import os
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

from laminar_lab.bench.processes import Start, Worker, here
from laminar_lab.bench.report import Ratio, Row, Side, Tell, in_turn
from laminar_lab.bench.workplace import workplace
from laminar_py.ledger.segments import LOCAL, PieceStore, SegmentWriter, StoreClient, leave_address, make_frame
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import Piece, PieceRef
from laminar_py.records.spans import Span

ROWS = (
    "segment_write_MBps segment_write_over_file segment_write_over_digested_file "
    "segment_write_over_file_3000x1 segment_write_over_file_16000x16 segment_write_over_file_16000x1 "
    "segment_fetch_MBps segment_fetch_over_socket segment_fetch_over_socket_3000x1 "
    "segment_fetch_over_socket_3000x16 segment_fetch_over_socket_16000x16 segment_fetch_over_socket_16000x256"
)
ROUND_BYTES = 32 * 2**20  # written by each side in a round
PARTS = 4  # that wrote what is fetched
WARM = 2  # rounds before those that count
OURS, BARE, DIGESTED = "ours", "bare", "digested"
STORE = "store-0"


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """Pieces that are written or fetched at a time, e.g. `PieceBatch(3000, 16)`."""

    tokens: int  # of each
    count: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.count}"


WRITTEN, ALSO_WRITTEN = PieceBatch(3000, 16), [PieceBatch(3000, 1), PieceBatch(16_000, 16), PieceBatch(16_000, 1)]
FETCHED = PieceBatch(3000, 256)  # the share of a learner's rank
ALSO_FETCHED = [PieceBatch(3000, 1), PieceBatch(3000, 16), PieceBatch(16_000, 16), PieceBatch(16_000, 256)]


def rows(*, repeats: int = 15, tell: Tell, num_bytes: int = ROUND_BYTES) -> list[Row]:
    """Ratios of each case, and the rates of the typical ones."""
    return write_rows(repeats=repeats, tell=tell, num_bytes=num_bytes) + fetch_rows(repeats=repeats, tell=tell)


def write_rows(*, repeats: int, tell: Tell, num_bytes: int) -> list[Row]:
    """Ratios of each case, and the rate of the typical one."""
    found = []
    for batch in (WRITTEN, *ALSO_WRITTEN):
        with (
            workplace() as folder,
            Worker(partial(_write, folder=folder, batch=batch, num_bytes=num_bytes)) as one,
        ):
            sides: dict[str, Side] = {name: partial(_ask, one, name) for name in (OURS, BARE, DIGESTED)}
            rates = in_turn(sides, rounds=repeats, warm=WARM)
        ratio, digested = Ratio.of(rates[OURS], rates[BARE]), Ratio.of(rates[OURS], rates[DIGESTED])
        told = (
            f"{num_bytes / 2**20:g} MiB in pieces of {batch.tokens:,} tokens (8 bytes each), {batch.count} at a"
            f" time, into the page cache: {_tell_rates(rates)}; {{}}, {_tell_load()}"
        )
        if batch == WRITTEN:
            conditions = told.format(ratio)
            found += [
                Row("segment_write_MBps", median(rates[OURS]), "MB/s", conditions),
                Row("segment_write_over_file", ratio.median, "x", conditions),
                Row("segment_write_over_digested_file", digested.median, "x", told.format(digested)),
            ]
        else:
            found.append(Row(f"segment_write_over_file_{batch}", ratio.median, "x", told.format(ratio)))
        tell(f"written, {batch}: {_tell_rates(rates)}")
    return found


def fetch_rows(*, repeats: int, tell: Tell) -> list[Row]:
    """Ratios of each case, and the rate of the typical one."""
    found = []
    for batch in (FETCHED, *ALSO_FETCHED):
        with workplace() as folder, fetch_sides(folder, batch) as sides:
            rates = in_turn(sides, rounds=repeats, warm=WARM)
        ratio = Ratio.of(rates[OURS], rates[BARE])
        told = f"{tell_fetch(batch)}, loopback: {_tell_rates(rates)}; {ratio}, {_tell_load()}"
        if batch == FETCHED:
            found.append(Row("segment_fetch_MBps", median(rates[OURS]), "MB/s", told))
        suffix = "" if batch == FETCHED else f"_{batch}"
        found.append(Row(f"segment_fetch_over_socket{suffix}", ratio.median, "x", told))
        tell(f"fetched, {batch}: {_tell_rates(rates)}")
    return found


def tell_fetch(batch: PieceBatch) -> str:
    """Conditions of what is fetched."""
    return (
        f"{batch.count} pieces of {batch.tokens:,} tokens (8 bytes each) from {PARTS} segments in the page cache;"
        " bare: sendall of one buffer, recv_into a warm one"
    )


def _tell_rates(rates: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {median(found):,.0f} MB/s" for name, found in rates.items())


def _tell_load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def make_pieces(batch: PieceBatch, count: int) -> list[Piece]:
    """So many pieces whose bytes are all different."""
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


def _ask(worker: Worker, name: str, _: int) -> float:
    """MB/s of a side that is in another process, which has the allocator of a run's."""
    return worker.ask(name, float)


def _write(pipe: Connection, *, folder: Path, batch: PieceBatch, num_bytes: int) -> None:
    """Write by the means that are named, each time into a new folder; say MB/s."""
    count = max(1, num_bytes // (8 * batch.tokens * batch.count)) * batch.count
    pieces = make_pieces(batch, count)
    batches = [pieces[first : first + batch.count] for first in range(0, count, batch.count)]
    frames = [[b"".join(make_frame(piece).buffers) for piece in some] for some in batches]
    whole = [b"".join(some) for some in frames]
    size = sum(map(len, whole))
    while True:
        name = pipe.recv()
        path = folder / name
        path.mkdir()
        if name == OURS:
            writer = SegmentWriter(path, "replica-0")
            began = time.perf_counter()
            for some in batches:
                writer.write_all(some)
            elapsed_s = time.perf_counter() - began
        else:
            elapsed_s = _write_plain(path / "plain", whole, frames if name == DIGESTED else [])
        shutil.rmtree(path)
        pipe.send(size / elapsed_s / 1e6)


def _write_plain(path: Path, whole: Sequence[bytes], frames: Sequence[Sequence[bytes]]) -> float:
    """Seconds for a plain file, and for the digests of these."""
    with path.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for some in frames:
            for frame in some:
                blake3(frame).digest()
        for data in whole:
            file.write(data)
        return time.perf_counter() - began


# ---- fetched


@contextmanager
def fetch_sides(
    folder: Path, batch: PieceBatch, *, start: Start = here, host: str = LOCAL
) -> Iterator[dict[str, Side]]:
    """MB/s of a fetch on host 1 from the store of host 0, which has the address `host`, and of a bare socket."""
    writers = [SegmentWriter(folder, f"replica-{part}") for part in range(PARTS)]
    pieces = make_pieces(batch, batch.count)
    refs = [writers[index % PARTS].write(piece) for index, piece in enumerate(pieces)]
    num_bytes = sum(ref.num_bytes for ref in refs)
    key = secrets.token_bytes(32)
    with ExitStack() as stack:
        store = stack.enter_context(start(0, partial(_serve, folder=folder, key=key, host=host)))
        bare = stack.enter_context(start(0, partial(_send, num_bytes=num_bytes, host=host)))
        store.hear(str)
        work = partial(_fetch, folder=folder, bare=bare.hear(tuple), key=key, refs=encode(refs))
        client = stack.enter_context(start(1, work))

        yield {name: partial(_ask, client, name) for name in (OURS, BARE)}


def _serve(pipe: Connection, *, folder: Path, key: bytes, host: str) -> None:
    leave_address(folder, STORE, PieceStore(folder, key=key).start(host))
    pipe.send("serving")
    threading.Event().wait()


def _send(pipe: Connection, *, num_bytes: int, host: str) -> None:
    """Send so many bytes whenever a byte comes."""
    data = secrets.token_bytes(num_bytes)
    with socket.create_server((host, 0)) as listener:
        pipe.send(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(data)


def _fetch(pipe: Connection, *, folder: Path, bare: tuple[str, int], key: bytes, refs: bytes) -> None:
    """Fetch by the means that are named; say MB/s."""
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
