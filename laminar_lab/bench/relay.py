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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from laminar_lab.bench import relay_delta
from laminar_lab.bench.relay_pair import CHUNK_BYTES, LOCAL, WARM_VERSIONS, RelayPair, receive, worker
from laminar_lab.bench.report import Ratio, Row, Side, in_turn
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.config.cluster import Seal
from laminar_py.relay import CHECKSUM_BYTES, PAGE_BYTES, RelayKeys, Sealer, chunk_checksum, generate_keys

ROWS = (
    *(
        "hop_GBps",
        "hop_over_socket",
        "hop_sealed_over_socket",
        "sealed_bound_over_socket",
        "hop_sealed_over_bound",
    ),
    *("lanes2_over_lanes1", "hop_curve_over_socket", *relay_delta.DELTA_ROWS),
)
VERSION_BYTES = 256 * 2**20  # of a version that hops


def rows(
    *,
    shm: Path = SHARED_MEMORY,
    repeats: int = 7,
    num_bytes: int = VERSION_BYTES,
    model_bytes: int = relay_delta.MODEL_BYTES,
) -> list[Row]:
    """Compare hops of all seals with the bare socket, medians over `repeats` rounds; all files lie in `shm`."""
    keys = generate_keys()
    found: list[Row] = []
    with workplace(shm) as folder, bare_socket(folder, num_bytes) as bare:

        def compare(**others: Side | AbstractContextManager[Side]) -> dict[str, list[float]]:
            """Let the others take turns with the bare socket."""
            with ExitStack() as stack:
                sides = {
                    name: stack.enter_context(side) if isinstance(side, AbstractContextManager) else side
                    for name, side in others.items()
                }
                return in_turn({**sides, "bare": bare}, rounds=repeats, warm=WARM_VERSIONS)

        def pair(name: str, keys: RelayKeys | None, seal: Seal = Seal.AEAD, lanes: int = 1) -> Any:
            return hop(folder / name, keys, num_bytes, seal=seal, lanes=lanes)

        rates = compare(ours=pair("plain", None))
        text = _conditions("one lane without encryption", rates, num_bytes)
        found.append(Row("hop_GBps", median(rates["ours"]), "GB/s", text))
        found.append(Ratio.between(rates["ours"], rates["bare"]).row("hop_over_socket", text))
        rates = compare(
            ours=pair("sealed", keys), two=pair("two", keys, lanes=2), aes=open_frames, blake3=hash_chunks
        )
        found += _sealed_rows(rates, num_bytes)
        rates = compare(ours=pair("curve", keys, Seal.CURVE))
        text = _conditions("CURVE, no lanes", rates, num_bytes)
        found.append(Ratio.between(rates["ours"], rates["bare"]).row("hop_curve_over_socket", text))
    return [*found, *relay_delta.rows(shm=shm, repeats=repeats, num_bytes=model_bytes)]


def _sealed_rows(rates: Mapping[str, Sequence[float]], num_bytes: int) -> list[Row]:
    """Compare sealed lanes with the bare socket, with their bound, and with each other."""
    text = _conditions("one lane with AES-256-GCM", rates, num_bytes)
    # The bare side's thread that receives and hashes is the slower one; a sealed lane's must decrypt as well.
    bounds = [1 / (1 / bare + 1 / aes) for bare, aes in zip(rates["bare"], rates["aes"], strict=True)]
    bound = (
        f"bound: one thread that receives, decrypts and hashes, from rates of the same run: AES-256-GCM"
        f" {median(rates['aes']):.2f} GB/s, BLAKE3 {median(rates['blake3']):.2f} GB/s, bare socket with BLAKE3"
        f" {median(rates['bare']):.2f} GB/s, together {median(bounds):.2f} GB/s"
    )
    cores = f"two lanes {median(rates['two']):.2f} GB/s, one {median(rates['ours']):.2f}, {os.cpu_count()} cores"
    return [
        Ratio.between(rates["ours"], rates["bare"]).row("hop_sealed_over_socket", text),
        Ratio.between(bounds, rates["bare"]).row("sealed_bound_over_socket", bound),
        Ratio.between(rates["ours"], bounds).row("hop_sealed_over_bound", bound),
        Ratio.between(rates["two"], rates["ours"]).row("lanes2_over_lanes1", cores),
    ]


def _conditions(way: str, rates: Mapping[str, Sequence[float]], num_bytes: int) -> str:
    return (
        f"{num_bytes / 2**20:g} MiB in chunks of {CHUNK_BYTES / 2**20:g} MiB, TCP, {way}, BLAKE3 of each chunk"
        f" made before and checked on arrival; ours: until a node in another process has verified the file's"
        f" digest too, {median(rates['ours']):.2f} GB/s; bare: from mapped shared memory into mapped, warm shared"
        f" memory, one thread at each end, {median(rates['bare']):.2f} GB/s"
    )


def open_frames(_: int) -> float:
    """GB/s at which one thread decrypts chunks."""
    sealer, opener = Sealer(bytes(32)), Sealer(bytes(32))
    data = memoryview(bytearray(CHUNK_BYTES))
    frame = memoryview(bytearray(CHUNK_BYTES + sealer.tag_bytes))
    num_chunks, took_s = 32, 0.0
    for _ in range(num_chunks):
        sealer.close(data, b"", frame)
        began = time.monotonic()
        opener.open(frame, b"", data)
        took_s += time.monotonic() - began
    return num_chunks * CHUNK_BYTES / took_s / 1e9


def hash_chunks(_: int) -> float:
    """GB/s at which one thread hashes chunks."""
    data, num_chunks = bytes(CHUNK_BYTES), 32
    began = time.monotonic()
    for _ in range(num_chunks):
        chunk_checksum(data)
    return num_chunks * CHUNK_BYTES / (time.monotonic() - began) / 1e9


@contextmanager
def hop(folder: Path, keys: RelayKeys | None, num_bytes: int, *, seal: Seal, lanes: int) -> Iterator[Side]:
    """Yield our side: GB/s from complete at a root until complete at its child."""
    weights = torch.randint(0, 256, (num_bytes + PAGE_BYTES,), dtype=torch.uint8)
    sizes = cycle((num_bytes, num_bytes + PAGE_BYTES))  # sizes that do not fit: no deltas
    with RelayPair(folder, keys=keys, seal=seal, lanes=lanes) as pair:

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
