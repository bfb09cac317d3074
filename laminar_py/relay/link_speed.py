"""Measures the speed of one link between two hosts, before a run chooses its relay tree.

`runtime/cluster/links.py` runs `send_chunks` on one host and `measure_link` on the other. The receiving end
requests bursts of equal chunks, each burst twice as long as the one before, until one takes long enough to
measure; then of a larger size. Two sizes give two equations, so both bandwidth and the fixed time of a chunk come
out. Each end ends by itself, even if the other one dies
(`tests/relay/test_link_speed.py::test_strangers_are_not_measured_and_each_end_ends_by_itself`).

    receiving: connected -> (Fetch(size, n) -> Chunk * n)* -> Done
    sending:   Fetch(size, n) -> Chunk * n, until Done
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from laminar_py.relay.digests import chunk_checksum
from laminar_py.relay.messages import Chunk, Done, Fetch
from laminar_py.relay.sockets import (
    CONTROL_BYTES,
    Connection,
    LinkState,
    RelayKeys,
    SocketError,
    SocketFactory,
)

SIZES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)  # bytes of a chunk; a `Fetch` names one by its place
BURST_S = 0.06  # a burst that takes at least so long counts
CONTACT_S = 30.0  # until both ends, each perhaps a process that starts, are done
_FIRST_BURST, _LONGEST_BURST = 8, 1024  # chunks
_MAX_BURST_BYTES = 64 * 2**20
_HEARTBEAT_S = 5.0


class MeasurementError(Exception):
    """The link cannot be measured; the message says why."""


class LinkSpeed(msgspec.Struct, frozen=True):
    """A measured link, e.g. 9.4 Gb/s with 150 microseconds for each chunk: `LinkSpeed(1.175e9, 1.5e-4)`."""

    bytes_per_s: float
    overhead_s: float


async def send_chunks(host: str, port: int, keys: RelayKeys) -> None:
    """Listen on `host:port` and send the bursts that the other end requests. Raises `MeasurementError`."""
    data = memoryview(bytes(SIZES[-1]))
    checksums = [chunk_checksum(data[:size]) for size in SIZES]
    async with _limited_sockets(keys, f"nobody asked, or not to the end, at {host}:{port}") as sockets:
        listener = sockets.listen(host, port, max_queue=2 * _LONGEST_BURST)
        try:
            while True:
                to, message = await listener.receive()
                if isinstance(message, Done):
                    return
                if isinstance(message, Fetch) and message.version < len(SIZES):
                    place = message.version
                    for index in range(min(message.credits, _LONGEST_BURST)):
                        chunk = Chunk(
                            version=place,
                            file=0,
                            index=index,
                            checksum=checksums[place],
                            data=data[: SIZES[place]],
                        )
                        listener.send(to, chunk)
        finally:
            listener.close()


async def measure_link(endpoint: str, keys: RelayKeys) -> LinkSpeed:
    """Measure the link from the sender at `endpoint`, in about half a second. Raises `MeasurementError`."""
    async with _limited_sockets(keys, f"nothing came from {endpoint}") as sockets:
        connection = sockets.connect(endpoint, max_frame_bytes=SIZES[-1] + CONTROL_BYTES)
        try:
            while await connection.receive() is not LinkState.UP:
                continue
            small_s = await _seconds_per_chunk(connection, 0)
            place = larger_size(small_s)
            large_s = await _seconds_per_chunk(connection, place)
            connection.send(Done(0))
            return link_speed(small_s, large_s, SIZES[place])
        finally:
            connection.close(linger_s=1.0)


@asynccontextmanager
async def _limited_sockets(keys: RelayKeys, timeout_message: str) -> AsyncIterator[SocketFactory]:
    """Give sockets for at most `CONTACT_S`; every error of them becomes `MeasurementError`, which ends no run."""
    try:
        sockets = SocketFactory(keys, heartbeat_s=_HEARTBEAT_S)
        try:
            async with asyncio.timeout(CONTACT_S):
                yield sockets
        finally:
            sockets.close()
    except TimeoutError:
        raise MeasurementError(f"{timeout_message} in {CONTACT_S:g} s") from None
    except (SocketError, OSError, ValueError, AssertionError) as error:
        raise MeasurementError(f"{type(error).__name__}: {error}") from error


def larger_size(small_s: float) -> int:
    """Place in `SIZES`, not 0, of the largest size whose first burst takes hardly longer than `BURST_S`."""
    max_bytes = 2 * BURST_S / (_FIRST_BURST * small_s) * SIZES[0]  # if a chunk had no fixed time
    return max([1, *(place for place, size in enumerate(SIZES) if size <= max_bytes)])


def link_speed(small_s: float, large_s: float, large_bytes: int) -> LinkSpeed:
    """Solve `overhead + bytes / bandwidth` for the times of a chunk of `SIZES[0]` and one of `large_bytes`."""
    if large_s <= small_s:  # another process had the core meanwhile
        return LinkSpeed(large_bytes / large_s, 0.0)
    bytes_per_s = (large_bytes - SIZES[0]) / (large_s - small_s)
    return LinkSpeed(bytes_per_s, max(0.0, small_s - SIZES[0] / bytes_per_s))


async def _seconds_per_chunk(connection: Connection, place: int) -> float:
    """Seconds that a chunk of `SIZES[place]` takes, from a burst that is long enough to measure."""
    size = SIZES[place]
    target = bytearray(size)
    num_chunks, limit = _FIRST_BURST, min(_LONGEST_BURST, _MAX_BURST_BYTES // size)
    while True:
        took_s = await _receive_burst(connection, place, num_chunks, target)
        if took_s >= BURST_S or num_chunks == limit:
            return took_s / (num_chunks - 1)
        num_chunks = min(limit, 2 * num_chunks)


async def _receive_burst(connection: Connection, place: int, num_chunks: int, target: bytearray) -> float:
    """Seconds from the first chunk to the last; each is checked and copied as a node would do."""
    connection.send(Fetch(version=place, file=0, first_chunk=0, credits=num_chunks))
    began = 0.0
    for index in range(num_chunks):
        chunk = await connection.receive()
        if not isinstance(chunk, Chunk):
            raise MeasurementError(f"the connection broke: {chunk}")
        if chunk_checksum(chunk.data) != chunk.checksum:
            raise MeasurementError(f"chunk {chunk.index} came damaged")
        target[:] = chunk.data
        if index == 0:
            began = time.monotonic()
    return time.monotonic() - began
