"""Speed of one link: two ends that pass chunks on as nodes do, before a tree and its chunks are chosen.

Run on two hosts at the start of a run. The receiving end asks for bursts of chunks of one size,
each twice as long as the one before, until one takes long enough to tell; then for those of a larger size. Two
sizes are two equations, so bandwidth and the fixed time of a chunk both come out. Invariant: each end ends by
itself, whatever became of the other.

    receiving: connected -> (Fetch(size, n) -> Chunk * n)* -> Done
    sending:   Fetch(size, n) -> Chunk * n, until Done
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from laminar_py.relay.store.digests import chunk_checksum
from laminar_py.relay.wire.messages import Chunk, Done, Fetch
from laminar_py.relay.wire.transport import CONTROL_BYTES, Link, LinkState, RelayKeys, SocketError, Wire

SIZES = (64 * 2**10, 256 * 2**10, 2**20, 4 * 2**20)  # bytes of a chunk; a `Fetch` names one by its place
BURST_S = 0.06  # a burst that takes so long counts
CONTACT_S = 30.0  # until both ends are there and done, at most: each may be a process that starts
_FIRST_BURST, _LONGEST_BURST = 8, 1024  # chunks
_BURST_BYTES = 64 * 2**20  # at most
_HEARTBEAT_S = 5.0


class MeasurementError(Exception):
    """The other end cannot be measured; the message says why."""


class LinkSpeed(msgspec.Struct, frozen=True):
    """A measured link, e.g. 9.4 Gb/s with 150 microseconds for each chunk: `LinkSpeed(1.175e9, 1.5e-4)`."""

    bytes_per_s: float
    overhead_s: float


async def send_chunks(host: str, port: int, keys: RelayKeys) -> None:
    """Listen on `host:port` and send what the other end asks for. Raises `MeasurementError`."""
    data = memoryview(bytes(SIZES[-1]))
    checksums = [chunk_checksum(data[:size]) for size in SIZES]
    async with _contact(keys, f"nobody asked, or not to the end, at {host}:{port}") as wire:
        listener = wire.listen(host, port, max_queue=2 * _LONGEST_BURST)
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
    """Measure the way from the end that sends at `endpoint`, in about half a second. Raises `MeasurementError`."""
    async with _contact(keys, f"nothing came from {endpoint}") as wire:
        link = wire.connect(endpoint, max_frame_bytes=SIZES[-1] + CONTROL_BYTES)
        try:
            while await link.receive() is not LinkState.UP:
                continue
            small_s = await _seconds_per_chunk(link, 0)
            place = larger_size(small_s)
            large_s = await _seconds_per_chunk(link, place)
            link.send(Done(0))
            return link_speed(small_s, large_s, SIZES[place])
        finally:
            link.close(linger_s=1.0)


@asynccontextmanager
async def _contact(keys: RelayKeys, silence: str) -> AsyncIterator[Wire]:
    """Sockets for `CONTACT_S` at most; whatever goes wrong with them, no run ends over a measurement."""
    try:
        wire = Wire(keys, heartbeat_s=_HEARTBEAT_S)
        try:
            async with asyncio.timeout(CONTACT_S):
                yield wire
        finally:
            wire.close()
    except TimeoutError:
        raise MeasurementError(f"{silence} in {CONTACT_S:g} s") from None
    except (SocketError, OSError, ValueError, AssertionError) as error:
        raise MeasurementError(f"{type(error).__name__}: {error}") from error


def larger_size(small_s: float) -> int:
    """Place in `SIZES`, not 0, of the largest whose first burst hardly takes longer than one that counts."""
    most = 2 * BURST_S / (_FIRST_BURST * small_s) * SIZES[0]  # bytes, were there no fixed time
    return max([1, *(place for place, size in enumerate(SIZES) if size <= most)])


def link_speed(small_s: float, large_s: float, large_bytes: int) -> LinkSpeed:
    """The link that takes `overhead + bytes / bandwidth` for a chunk of either size."""
    if large_s <= small_s:  # another process had the core meanwhile
        return LinkSpeed(large_bytes / large_s, 0.0)
    bytes_per_s = (large_bytes - SIZES[0]) / (large_s - small_s)
    return LinkSpeed(bytes_per_s, max(0.0, small_s - SIZES[0] / bytes_per_s))


async def _seconds_per_chunk(link: Link, place: int) -> float:
    """Seconds of a chunk, from a burst that is long enough to tell."""
    size = SIZES[place]
    target = bytearray(size)
    num_chunks, most = _FIRST_BURST, min(_LONGEST_BURST, _BURST_BYTES // size)
    while True:
        took_s = await _receive_burst(link, place, num_chunks, target)
        if took_s >= BURST_S or num_chunks == most:
            return took_s / (num_chunks - 1)
        num_chunks = min(most, 2 * num_chunks)


async def _receive_burst(link: Link, place: int, num_chunks: int, target: bytearray) -> float:
    """Seconds from the first chunk to the last, each checked and copied as a node does."""
    link.send(Fetch(version=place, file=0, first_chunk=0, credits=num_chunks))
    began = 0.0
    for index in range(num_chunks):
        chunk = await link.receive()
        if not isinstance(chunk, Chunk):
            raise MeasurementError(f"the connection broke: {chunk}")
        if chunk_checksum(chunk.data) != chunk.checksum:
            raise MeasurementError(f"chunk {chunk.index} came damaged")
        target[:] = chunk.data
        if index == 0:
            began = time.monotonic()
    return time.monotonic() - began
