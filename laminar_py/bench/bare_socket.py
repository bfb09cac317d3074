"""What one hop of the relay is compared with: two processes, a socket between them and nothing else of ours.

Used by `relay_hop`. A file in shared memory goes chunk by chunk from its mapped pages into those of another, with
a checksum before each chunk. Invariant: every byte is checked and in place
before a round ends.
"""

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from laminar_py.bench.processes import Measure, Worker
from laminar_py.bench.relay_node import CHUNK_BYTES
from laminar_py.relay.store.digests import chunk_checksum
from laminar_py.relay.wire.messages import CHECKSUM_BYTES


@contextmanager
def bare_socket(folder: Path, num_bytes: int, *, unix: bool) -> Iterator[Measure]:
    """Two processes and a socket: from the first chunk's checksum until the last chunk is in place and checked."""
    source, target = folder / "source", folder / "target"
    source.write_bytes(os.urandom(num_bytes))
    target.write_bytes(bytes(num_bytes))
    with (
        Worker(_send, source, folder / "bare.ipc" if unix else None) as sender,
        Worker(_receive, target, sender.hear(object)) as receiver,
    ):

        def measure() -> float:
            receiver.tell("receive")
            sender.tell("send")
            return receiver.hear(float) - sender.hear(float)

        yield measure


def _send(pipe: Connection, source: Path, unix: Path | None) -> None:
    """Send the file whenever told to; says where it listens, then when each round began."""
    family, address = (socket.AF_UNIX, str(unix)) if unix else (socket.AF_INET, ("127.0.0.1", 0))
    listener = socket.socket(family)
    listener.bind(address)
    listener.listen()
    pipe.send(listener.getsockname())
    connection, _ = listener.accept()
    chunks = _chunks(source)
    while pipe.recv():
        began = time.monotonic()
        for chunk in chunks:
            connection.sendall(chunk_checksum(chunk))
            connection.sendall(chunk)
        pipe.send(began)


def _receive(pipe: Connection, target: Path, address: str | tuple[str, int]) -> None:
    """Receive the file whenever told to; says when each round ended."""
    connection = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)
    connection.connect(address)
    chunks = _chunks(target)
    checksum = memoryview(bytearray(CHECKSUM_BYTES))
    while pipe.recv():
        for chunk in chunks:
            _fill(connection, checksum)
            _fill(connection, chunk)
            assert chunk_checksum(chunk) == checksum, "a chunk came damaged"
        pipe.send(time.monotonic())


def _chunks(path: Path) -> list[memoryview]:
    """The pages of a file in pieces; the mapping lives as long as they do."""
    with path.open("r+b") as file:
        pages = memoryview(mmap.mmap(file.fileno(), 0))
    return [pages[start : start + CHUNK_BYTES] for start in range(0, len(pages), CHUNK_BYTES)]


def _fill(connection: socket.socket, target: memoryview) -> None:
    while target:
        received = connection.recv_into(target)
        assert received, "the sender has gone"
        target = target[received:]
