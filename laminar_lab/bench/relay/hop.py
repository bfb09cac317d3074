"""A hop of the relay, from a node to its child in another process, beside a bare socket.

Both sides carry the same bytes, chunks and BLAKE3 checksums: they read a file in shared memory, send it chunk by
chunk, check each chunk at the other end and write it into shared memory. The sender's checksums exist before a
round: a root has them since the publish. The bare side has one thread at each end and mapped, warm pages. Two
successive versions differ in size, so no chunk travels as a delta.
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

from laminar_lab.bench.processes import Worker
from laminar_lab.bench.relay.tree import CHUNK_BYTES, LOCAL, WARM_VERSIONS, Tree
from laminar_lab.bench.report import Ratio, Row, Side, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.relay import CHECKSUM_BYTES, PAGE_BYTES, RelayKeys, chunk_checksum

ROWS = ("hop_GBps", "hop_over_socket", "hop_curve_over_socket", "ipc_hop_over_socket")
VERSION_BYTES = 256 * 2**20  # of a version that hops


@dataclass(frozen=True, slots=True)
class HopKind:
    """A transport of a hop, e.g. `HopKind("hop_curve", curve=True)`."""

    name: str
    curve: bool = False
    ipc: bool = False


KINDS = (HopKind("hop"), HopKind("hop_curve", curve=True), HopKind("ipc_hop", ipc=True))


@contextmanager
def hop(folder: Path, kind: HopKind, num_bytes: int) -> Iterator[Side]:
    """Yield our side: GB/s from complete at a root until complete at its child."""
    keys = RelayKeys.generate() if kind.curve else None
    weights = torch.randint(0, 256, (num_bytes + PAGE_BYTES,), dtype=torch.uint8)
    cuts = cycle((num_bytes, num_bytes + PAGE_BYTES))  # sizes that do not fit: no deltas
    with Tree(folder, keys=keys, ipc=kind.ipc) as tree:

        def measure(_: int) -> float:
            tree.publish([("weights", weights[: next(cuts)])])
            elapsed_s, report = tree.await_last()
            assert report.wire_bytes == report.num_bytes, f"it came in part as deltas: {report}"
            return num_bytes / elapsed_s / 1e9

        yield measure


def rows(*, shm: Path = SHARED_MEMORY, repeats: int = 7, num_bytes: int = VERSION_BYTES) -> list[Row]:
    """Compare both sides for each kind of hop, medians over `repeats` rounds; all files lie in `shm`."""
    found: list[Row] = []
    for kind in KINDS:
        with (
            workplace(shm) as folder,
            hop(folder / "tree", kind, num_bytes) as ours,
            bare_socket(folder, num_bytes, unix=kind.ipc) as bare,
        ):
            sides: dict[str, Side] = {"ours": ours, "bare": partial(_rate, bare, num_bytes)}
            rates = in_turn(sides, rounds=repeats, warm=WARM_VERSIONS)
        conditions = (
            f"{num_bytes / 2**20:g} MiB in chunks of {CHUNK_BYTES / 2**20:g} MiB, {'ipc' if kind.ipc else 'TCP'},"
            f" CURVE {'on' if kind.curve else 'off'}, BLAKE3 of each chunk made before and checked on arrival;"
            f" ours: until a node in another process has verified the file's digest too,"
            f" {median(rates['ours']):.2f} GB/s; bare: from mapped shared memory into mapped, warm shared memory,"
            f" one thread at each end, {median(rates['bare']):.2f} GB/s"
        )
        found.append(Ratio.between(rates["ours"], rates["bare"]).row(f"{kind.name}_over_socket", conditions))
        if kind is KINDS[0]:
            found.insert(0, Row("hop_GBps", median(rates["ours"]), "GB/s", conditions))
    return found


def _rate(bare: Side, num_bytes: int, number: int) -> float:
    return num_bytes / bare(number) / 1e9


Address = str | tuple[str, int]


@contextmanager
def bare_socket(folder: Path, num_bytes: int, *, unix: bool = False) -> Iterator[Side]:
    """Yield the bare side: seconds from the first byte in one process until another has checked the last chunk."""
    with TemporaryDirectory(dir=folder) as name, ExitStack() as stack:
        source, target = Path(name, "source"), Path(name, "target")
        source.write_bytes(os.urandom(num_bytes))
        target.write_bytes(bytes(num_bytes))
        listen: Address = f"{name}/bare.ipc" if unix else (LOCAL, 0)
        sender = stack.enter_context(Worker(partial(send, source=source, listen=listen)))
        address: Address = sender.receive(str) if unix else sender.receive(tuple)
        receiver = stack.enter_context(Worker(partial(_receive, target=target, address=address)))

        def measure(_: int) -> float:
            receiver.send("receive")
            sender.send("send")
            return receiver.receive(float) - sender.receive(float)

        yield measure


def send(pipe: Connection, *, source: Path, listen: Address) -> None:
    """Send the listener's address; then, at each message, send the file and the moment of its first byte."""
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
    """Receive the file at each message from the pipe; send the moment of its last checked chunk."""
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
    """Map a file and return it chunk by chunk; the mapping lives as long as the chunks."""
    with path.open("r+b") as file:
        pages = memoryview(mmap.mmap(file.fileno(), 0))
    return [pages[start : start + CHUNK_BYTES] for start in range(0, len(pages), CHUNK_BYTES)]


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        received = connection.recv_into(target)
        assert received, "the sender has gone"
        target = target[received:]
