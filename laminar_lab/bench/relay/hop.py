"""A hop of the relay, from a node to its child in another process, beside a bare socket.

The socket carries the same bytes, chunks and checksums. Both sides read a file in shared memory, send it chunk
by chunk with the BLAKE3 of each, check that at the other end and put the chunk into shared memory. Neither side
makes the sender's BLAKE3 in a round: a root has them since the publish, the bare sender makes them before it
begins. The bare side does nothing else: one thread at each end, straight from and into mapped pages that are
warm. Invariants: every byte is checked and in place before a round ends; no two versions in a row have the same
size, so no chunk travels as a delta.
"""

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from laminar_lab.bench.processes import Start, here
from laminar_lab.bench.relay.tree import CHUNK_BYTES, LOCAL, WARM_VERSIONS, Tree
from laminar_lab.bench.report import Ratio, Row, Side, Tell, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.relay import CHECKSUM_BYTES, PAGE_BYTES, RelayKeys, chunk_checksum

ROWS = (
    "hop_GBps hop_over_socket socket_GBps hop_curve_GBps hop_curve_over_socket ipc_hop_GBps "
    "ipc_hop_over_socket unix_socket_GBps"
)
VERSION_BYTES = 256 * 2**20  # of a version that hops


@dataclass(frozen=True, slots=True)
class HopKind:
    """A transport of a hop, e.g. `HopKind("hop_curve", curve=True)`."""

    name: str
    curve: bool = False
    ipc: bool = False

    def tell(self, num_bytes: int) -> str:
        """Conditions, for a table."""
        return (
            f"{num_bytes / 2**20:g} MiB in chunks of {CHUNK_BYTES / 2**20:g} MiB, {'ipc' if self.ipc else 'TCP'},"
            f" CURVE {'on' if self.curve else 'off'}, BLAKE3 of each chunk made before and checked on arrival;"
            " ours: until a node in another process has verified the file's digest, too"
        )


KINDS = (HopKind("hop"), HopKind("hop_curve", curve=True), HopKind("ipc_hop", ipc=True))


@contextmanager
def hop(folder: Path, kind: HopKind, num_bytes: int) -> Iterator[Side]:
    """GB/s between a root and a child: from complete at the root until complete at the child."""
    keys = RelayKeys.generate() if kind.curve else None
    weights = torch.randint(0, 256, (num_bytes + PAGE_BYTES,), dtype=torch.uint8)
    cuts = cycle((num_bytes, num_bytes + PAGE_BYTES))  # sizes that do not fit: no deltas
    with Tree(folder, keys=keys, leaf=True, ipc=kind.ipc) as tree:

        def measure(_: int) -> float:
            tree.publish([("weights", weights[: next(cuts)])])
            elapsed_s, report = tree.await_last()
            assert report.wire_bytes == report.num_bytes, f"it came in part as deltas: {report}"
            return num_bytes / elapsed_s / 1e9

        yield measure


Address = str | tuple[str, int]


def rows(*, shm: Path = SHARED_MEMORY, repeats: int = 7, tell: Tell, num_bytes: int = VERSION_BYTES) -> list[Row]:
    """Rates of both sides and their ratio for each kind of hop, medians over `repeats` rounds; both in `shm`."""
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
        Row(f"{kind.name}_GBps", median(rates["ours"]), "GB/s", conditions),
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
