"""A hop from a relay node to its child, beside a bare TCP socket.

Both sides move the same bytes from one process to another through loopback, check a BLAKE3 of each chunk on
arrival and write the chunks into warm shared memory. The sender's checksums exist before a round: a root has them
since the publish. The bare side has one thread at each end. Two successive versions differ in size, so no chunk
travels as a delta.
"""

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from laminar_lab.bench import relay_delta
from laminar_lab.bench.relay_pair import CHUNK_BYTES, LOCAL, WARM_VERSIONS, RelayPair, receive, worker
from laminar_lab.bench.report import Ratio, Row, Side, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.relay import CHECKSUM_BYTES, PAGE_BYTES, RelayKeys, chunk_checksum, generate_keys

ROWS = ("hop_GBps", "hop_over_socket", "hop_curve_over_socket", *relay_delta.DELTA_ROWS)
VERSION_BYTES = 256 * 2**20  # of a version that hops


def rows(
    *,
    shm: Path = SHARED_MEMORY,
    repeats: int = 7,
    num_bytes: int = VERSION_BYTES,
    model_bytes: int = relay_delta.MODEL_BYTES,
) -> list[Row]:
    """Compare both sides, without and with CURVE, medians over `repeats` rounds; all files lie in `shm`."""
    found: list[Row] = []
    for name, keys in (("hop", None), ("hop_curve", generate_keys())):
        with (
            workplace(shm) as folder,
            hop(folder / "tree", keys, num_bytes) as ours,
            bare_socket(folder, num_bytes) as bare,
        ):
            rates = in_turn({"ours": ours, "bare": bare}, rounds=repeats, warm=WARM_VERSIONS)
        conditions = (
            f"{num_bytes / 2**20:g} MiB in chunks of {CHUNK_BYTES / 2**20:g} MiB, TCP, CURVE"
            f" {'off' if keys is None else 'on'}, BLAKE3 of each chunk made before and checked on arrival; ours:"
            f" until a node in another process has verified the file's digest too, {median(rates['ours']):.2f}"
            f" GB/s; bare: from mapped shared memory into mapped, warm shared memory, one thread at each end,"
            f" {median(rates['bare']):.2f} GB/s"
        )
        if keys is None:
            found.append(Row("hop_GBps", median(rates["ours"]), "GB/s", conditions))
        found.append(Ratio.between(rates["ours"], rates["bare"]).row(f"{name}_over_socket", conditions))
    return [*found, *relay_delta.rows(shm=shm, repeats=repeats, num_bytes=model_bytes)]


@contextmanager
def hop(folder: Path, keys: RelayKeys | None, num_bytes: int) -> Iterator[Side]:
    """Yield our side: GB/s from complete at a root until complete at its child."""
    weights = torch.randint(0, 256, (num_bytes + PAGE_BYTES,), dtype=torch.uint8)
    sizes = cycle((num_bytes, num_bytes + PAGE_BYTES))  # sizes that do not fit: no deltas
    with RelayPair(folder, keys=keys) as pair:

        def measure(_: int) -> float:
            pair.publish([("weights", weights[: next(sizes)])])
            elapsed_s, report = pair.await_last()
            assert report.wire_bytes == report.num_bytes, f"it came in part as deltas: {report}"
            return num_bytes / elapsed_s / 1e9

        yield measure


@contextmanager
def bare_socket(folder: Path, num_bytes: int) -> Iterator[Side]:
    """Yield the bare side: GB/s from the first byte in one process until another has checked the last chunk."""
    source, target = folder / "source", folder / "target"
    source.write_bytes(os.urandom(num_bytes))
    target.write_bytes(bytes(num_bytes))
    with ExitStack() as stack:
        sender = stack.enter_context(worker(partial(send, source=source)))
        receiver = stack.enter_context(worker(partial(_receive, target=target, address=receive(sender))))

        def measure(_: int) -> float:
            receiver.send("receive")
            sender.send("send")
            ended_s, began_s = float(receive(receiver)), float(receive(sender))
            return num_bytes / (ended_s - began_s) / 1e9

        yield measure


def send(pipe: Connection, *, source: Path) -> None:
    """Send the listener's address; then, at each message, send the file and the moment of its first byte."""
    listener = socket.create_server((LOCAL, 0))
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


def _receive(pipe: Connection, *, target: Path, address: tuple[str, int]) -> None:
    """Receive the file at each message from the pipe; send the moment of its last checked chunk."""
    connection = socket.create_connection(address)
    chunks = _chunks(target)
    checksum = memoryview(bytearray(CHECKSUM_BYTES))
    while pipe.recv():
        for chunk in chunks:
            _fill(connection, checksum)
            _fill(connection, chunk)
            assert chunk_checksum(chunk) == checksum, "a chunk came damaged"
        pipe.send(time.monotonic())


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
