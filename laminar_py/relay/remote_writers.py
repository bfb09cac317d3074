"""Ranks of a learner on other hosts than the root's, whose rows travel to the root's host in the background.

Each such rank owns a `RemotePublisher`. `publish_sources` copies the rank's rows into memory of its own, and the
learner waits for this copy alone (law 8). A thread then sends the rows to one of the writers on the root's host,
which puts them into the version's files. Many pairs of ranks send at once, over a gloo process group that has no
other use. Rank 0 leads all ranks, as `relay/writers.py` says: the end of any rank is an error on all, and leaves
no version (`tests/relay/test_remote_writers.py`).
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from laminar_py.records.codec import decode, encode
from laminar_py.records.weights import TensorSource
from laminar_py.relay.device_copy import TensorCopier
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.version_layout import SHARD_BYTES, lay_out
from laminar_py.relay.writers import LENGTH_BYTES, RankMessage, agree_with, receive_from

log = logging.getLogger(__name__)

BLOCK_BYTES = 16 * 2**20  # at once, so that a receiver needs a small buffer

Piece = tuple[int, int, int]  # file, first byte, number of bytes


class RankLink:
    """Messages and bytes from and to another rank of `group`, e.g. `RankLink(group, 0)`.

    Raises `ConnectionError` once that rank has ended.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def send(self, message: RankMessage) -> None:
        """Send a message."""
        data = bytearray(encode(message))
        self.send_bytes(memoryview(bytearray(len(data).to_bytes(LENGTH_BYTES))))
        self.send_bytes(memoryview(data))

    def receive(self) -> RankMessage:
        """Wait for a message."""
        length = bytearray(LENGTH_BYTES)
        self.receive_bytes(memoryview(length))
        data = bytearray(int.from_bytes(length))
        self.receive_bytes(memoryview(data))
        return decode(RankMessage, bytes(data))

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes, of which the receiver knows the number."""
        with self._naming_rank():
            self._group.send([torch.frombuffer(data, dtype=torch.uint8)], self._rank, 0).wait()

    def receive_bytes(self, into: memoryview) -> None:
        """Wait for as many bytes as `into` has."""
        with self._naming_rank():
            self._group.recv([torch.frombuffer(into, dtype=torch.uint8)], self._rank, 0).wait()

    @contextmanager
    def _naming_rank(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo has no narrower type
            raise ConnectionError(f"rank {self._rank} of the learner ended while a version was written") from error


class RemotePublisher:
    """Publishes the rows of a rank on another host, e.g. `RemotePublisher(group, rank=5, writers=2)`.

    The first `writers` ranks of `group` are on the root's host and have a `Publisher` each, with the same
    `shard_bytes`.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, rank: int, writers: int, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self._rank = rank
        self._leader = RankLink(group, 0)
        self._writer = RankLink(group, writer_of(rank, writers))
        self._shard_bytes = shard_bytes
        self._rows = MappedFile(os.memfd_create("rows", os.MFD_CLOEXEC))  # of one version, one behind the other
        self._copier = TensorCopier()
        self._sender = ThreadPoolExecutor(max_workers=1, thread_name_prefix="send")
        self._sending: Future[None] | None = None  # of the last version
        log.info("rank %d sends its rows of each version to rank %d", rank, writer_of(rank, writers))

    def publish_sources(self, version: int, sources: Iterable[TensorSource]) -> float:
        """Copy this rank's rows of a version; return the seconds that the learner waited.

        A thread then sends them. All ranks call it, as `Publisher.publish_sources`, and an error of one rank is
        raised on all.
        """
        began = time.monotonic()
        if self._sending is not None:
            wait([self._sending])  # rank 0 reports its error
        receive_from(self._leader)
        error, pieces = None, list[Piece]()
        try:
            pieces = self._copy(list(sources), version)
        except Exception as failed:  # noqa: BLE001 - raised by `agree_with`
            self._copier.drop()
            error = failed
        agree_with(self._leader, error, rank=self._rank)
        self._sending = self._sender.submit(self._send, pieces)
        return time.monotonic() - began

    def close(self) -> None:
        """Wait until the last rows are sent, stop the thread and free the memory."""
        self._sender.shutdown()
        self._rows.close()

    def _copy(self, sources: Sequence[TensorSource], version: int) -> list[Piece]:
        """Copy rows one behind the other; return each one's place in the version's files."""
        stored = (stored for source in sources for stored in source.stored)
        layout = lay_out(stored, version=version, shard_bytes=self._shard_bytes)
        pieces: list[Piece] = []
        position = 0

        def place(file: int, begin: int, num_bytes: int) -> tuple[MappedFile, int]:
            nonlocal position
            pieces.append((file, begin, num_bytes))
            position += num_bytes
            return self._rows, position - num_bytes

        self._copier.copy_rows(sources, layout, place)
        return pieces

    def _send(self, pieces: Sequence[Piece]) -> None:
        """Send the rows to this rank's writer, and wait until the version is complete."""
        error: OSError | None = None
        self._rows.keep_mapped()
        self._copier.page_lock(self._rows)
        try:
            self._writer.send(RankMessage(data=encode(pieces)))
            position = 0
            for _, _, size in blocks(pieces):
                view = self._rows.mapped_view(position, size)
                self._writer.send_bytes(view or memoryview(bytearray(self._rows.read(position, size))))
                position += size
        except OSError as failed:
            error = failed
        agree_with(self._leader, error, rank=self._rank)
        agree_with(self._leader, None, rank=self._rank)


def writer_of(rank: int, writers: int) -> int:
    """Return the writer to which a rank on another host sends its rows."""
    return rank % writers


def blocks(pieces: Iterable[Piece]) -> Iterable[Piece]:
    """Yield pieces in turn, cut into blocks of at most `BLOCK_BYTES`."""
    for file, first, size in pieces:
        for begin in range(first, first + size, BLOCK_BYTES):
            yield file, begin, min(BLOCK_BYTES, first + size - begin)


def receive_rows(links: Sequence[RankLink], files: Sequence[MappedFile]) -> None:
    """Receive the rows of ranks on other hosts and write them into a version's files, straight where mapped.

    Receives all rows also after an error, which it raises then: their senders may wait for this one.
    """
    errors: list[OSError] = []
    for link in links:
        try:
            for file, begin, size in blocks(decode(list[Piece], link.receive().data)):
                view = files[file].mapped_view(begin, size)
                data = memoryview(bytearray(size)) if view is None else view
                link.receive_bytes(data)
                if view is None:
                    try:
                        files[file].write(begin, np.frombuffer(data, np.uint8))
                    except OSError as error:
                        errors.append(error)
        except ConnectionError as error:
            errors.append(error)
    if errors:
        raise errors[0]
