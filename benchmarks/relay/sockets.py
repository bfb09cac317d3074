"""A hop of the relay beside a bare socket: the same bytes, chunks and checksums from one process to another.

Rows `*hop*_over_socket` and `*socket_GBps`. Both sides read a file in shared memory, send it chunk by chunk with
the BLAKE3 of each, check that at the other end and put the chunk into shared memory. Neither side makes the
sender's BLAKE3 in a round: a root has them since the publish, the bare sender makes them before it begins. The
bare side does nothing else: one thread at each end, straight from and into mapped pages that are warm. Invariant:
every byte is checked and in place before a round ends.
"""

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.relay.peers import Start, here
from laminar_lab.bench.relay.hop import KINDS, VERSION_BYTES, HopKind, hop
from laminar_lab.bench.relay.tree import CHUNK_BYTES, LOCAL, WARM_VERSIONS
from laminar_lab.bench.report import Row
from laminar_lab.bench.turns import Ratio, Side, Tell, in_turn
from laminar_lab.bench.workplace import workplace
from laminar_py.relay.store.digests import chunk_checksum
from laminar_py.relay.wire.messages import CHECKSUM_BYTES

Address = str | tuple[str, int]


def rows(*, shm: Path, repeats: int, tell: Tell, num_bytes: int = VERSION_BYTES) -> list[Row]:
    """Ratio and the socket's rate for each kind of hop, medians over `repeats` rounds; both sides in `shm`."""
    found: dict[str, Row] = {}
    for kind in KINDS:
        for row in _compare(kind, shm=shm, num_bytes=num_bytes, repeats=repeats):
            found.setdefault(row.name, row)  # TCP comes twice
            tell(f"{row.name} {row.value:.3f} {row.unit}")
    return list(found.values())


def _compare(kind: HopKind, *, shm: Path, num_bytes: int, repeats: int) -> list[Row]:
    with (
        workplace(shm) as folder,
        hop(folder / "tree", kind, num_bytes) as ours,
        bare_socket(folder, num_bytes, unix=kind.ipc) as bare,
    ):
        sides = {"ours": ours, "bare": lambda number: num_bytes / bare(number) / 1e9}
        rates = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS)
    ratio = Ratio.of(rates["ours"], rates["bare"])
    conditions = (
        f"{kind.tell(num_bytes)}, {median(rates['ours']):.2f} GB/s; bare: from mapped shared memory into mapped,"
        f" warm shared memory, one thread at each end, the sender's BLAKE3 made before as ours are; {ratio}"
    )
    return [
        Row(f"{kind.name}_over_socket", ratio.median, "x", conditions),
        Row("unix_socket_GBps" if kind.ipc else "socket_GBps", median(rates["bare"]), "GB/s", conditions),
    ]


@contextmanager
def bare_socket(
    folder: Path, num_bytes: int, *, start: Start = here, host: str = LOCAL, unix: bool = False
) -> Iterator[Side]:
    """Seconds from the first byte in one process until the last chunk is checked and in place in another.

    The sender's checksums are made before.
    """
    with TemporaryDirectory(dir=folder) as name, ExitStack() as stack:
        source, target = Path(name, "source"), Path(name, "target")
        source.write_bytes(os.urandom(num_bytes))
        target.write_bytes(bytes(num_bytes))
        listen: Address = f"{name}/bare.ipc" if unix else (host, 0)
        sender = stack.enter_context(start(0, partial(send, source=source, listen=listen)))
        address: Address = sender.hear(str) if unix else sender.hear(tuple)
        receiver = stack.enter_context(start(1, partial(_receive, target=target, address=address)))

        def measure(_: int) -> float:
            receiver.tell("receive")
            sender.tell("send")
            return receiver.hear(float) - sender.hear(float)

        yield measure


def send(pipe: Connection, *, source: Path, listen: Address) -> None:
    """Send the file whenever told to; says its address, then when each round's first byte left."""
    listener = socket.socket(_family(listen))
    listener.bind(listen)
    listener.listen()
    pipe.send(listener.getsockname())
    connection, _ = listener.accept()
    chunks = _chunks(source)
    while pipe.recv():
        checksums = [chunk_checksum(chunk) for chunk in chunks]
        began = time.monotonic()
        for checksum, chunk in zip(checksums, chunks, strict=True):
            connection.sendall(checksum)
            connection.sendall(chunk)
        pipe.send(began)


def _receive(pipe: Connection, *, target: Path, address: Address) -> None:
    """Receive the file whenever told to; says the end of each round."""
    connection = socket.socket(_family(address))
    connection.connect(address)
    chunks = _chunks(target)
    checksum = memoryview(bytearray(CHECKSUM_BYTES))
    while pipe.recv():
        for chunk in chunks:
            _fill(connection, checksum)
            _fill(connection, chunk)
            assert chunk_checksum(chunk) == checksum, "a chunk came damaged"
        pipe.send(time.monotonic())


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _chunks(path: Path) -> list[memoryview]:
    """Pages of a file in pieces; the mapping lives as long as they do."""
    with path.open("r+b") as file:
        pages = memoryview(mmap.mmap(file.fileno(), 0))
    return [pages[start : start + CHUNK_BYTES] for start in range(0, len(pages), CHUNK_BYTES)]


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        received = connection.recv_into(target)
        assert received, "the sender has gone"
        target = target[received:]
