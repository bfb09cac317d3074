"""The way of a delta: from a publish until the node of another process serves the changes, beside plain copies.

A learner, a root, its child and the child's subscriber are processes. One element in a hundred of a bf16 model
moves by one unit in the last place from version to version, and the subscriber pulls each version with the one
before as base. The clock of `delta_to_ready_over_bytes` starts when the root has made the last delta of a version
and ends when the subscriber knows the change file; that of `delta_to_served_over_bytes` ends before its pull, when
the child has told it of the version. Earlier deltas have travelled by then, so both rows tell how far the way from
node to node lags behind the comparison at the root; the rows from the publish hold all of it. The plain copies
move as many bytes as all deltas have. `delta_proven_GBps` is the pace at which a node makes a version of its
deltas and proves each chunk, from its changes to its folder.
"""

import asyncio
import logging
import mmap
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch

from laminar_lab.bench.relay_pair import CHUNK_BYTES, LOCAL, WARM_VERSIONS, receive, worker
from laminar_lab.bench.report import Ratio, Row, load_now, log_line, spread
from laminar_lab.bench.workplace import SHARED_MEMORY, workplace
from laminar_py.relay import Publisher, RelayNode, Subscriber

DELTA_ROWS = (
    "delta_to_ready_over_bytes",
    "delta_to_served_over_bytes",
    "delta_to_ready_over_memcpy",
    "publish_to_ready_over_bytes",
    "publish_to_ready_s",
    "publish_to_whole_s",
    "delta_proven_GBps",
)
MODEL_BYTES = 10**9
TENSOR_ELEMENTS = 25 * 10**6
SPARSITY = 100  # one element in so many changes
COPIES = 5  # of the deltas' bytes; the median counts


def rows(*, shm: Path = SHARED_MEMORY, repeats: int = 7, num_bytes: int = MODEL_BYTES) -> list[Row]:
    """Measure without CURVE, medians over `repeats` versions; all files lie in `shm`."""
    found: dict[str, list[float]] = {
        name: [] for name in ("delta", "served", "publish", "whole", "proven", "socket", "memcpy", "bytes")
    }
    with workplace(shm) as folder, followed(folder, num_bytes) as versions, plain_copy(num_bytes) as copy:
        for turn, times in enumerate(versions):
            if turn >= WARM_VERSIONS:
                payload = int(times["bytes"])
                times |= {"socket": copy(payload), "memcpy": memory_copy(payload)}
                for name, value in times.items():
                    found[name].append(value)
                log_line(f"version {turn - WARM_VERSIONS + 1} of {repeats}: {times}")
            if turn + 1 == WARM_VERSIONS + repeats:
                break
    milliseconds = {name: spread([1e3 * one for one in values], ".2f") for name, values in found.items()}
    conditions = (
        f"{num_bytes / 1e9:g} GB bf16, 1 in {SPARSITY} elements moves, {median(found['bytes']) / 1e6:.1f} MB of"
        f" deltas, chunks of {CHUNK_BYTES / 2**20:g} MiB, TCP, CURVE off; until a subscriber of the child has the"
        f" changes: from the last delta {milliseconds['delta']} ms ({milliseconds['served']} until it knows of the"
        f" version), from the call of publish {spread(found['publish'], '.2f')} s; until the child has proven the"
        f" version, from the call of publish {spread(found['whole'], '.2f')} s; plain copies of the deltas' bytes:"
        f" from process to process by TCP {milliseconds['socket']} ms, in memory {milliseconds['memcpy']} ms;"
        f" {load_now()}"
    )
    return [
        Ratio.between(found["delta"], found["socket"]).row(DELTA_ROWS[0], conditions),
        Ratio.between(found["served"], found["socket"]).row(DELTA_ROWS[1], conditions),
        Ratio.between(found["delta"], found["memcpy"]).row(DELTA_ROWS[2], conditions),
        Ratio.between(found["publish"], found["socket"]).row(DELTA_ROWS[3], conditions),
        Row(DELTA_ROWS[4], median(found["publish"]), "s", conditions),
        Row(DELTA_ROWS[5], median(found["whole"]), "s", conditions),
        Row(
            DELTA_ROWS[6],
            median(found["proven"]),
            "GB/s",
            f"{spread(found['proven'], '.2f')}, {os.cpu_count()} cores; {conditions}",
        ),
    ]


@contextmanager
def followed(folder: Path, num_bytes: int) -> Iterator[Iterator[dict[str, float]]]:
    """Yield an iterator that publishes a version and yields its times, in seconds, and the bytes of its deltas."""
    tensors = [torch.randn(TENSOR_ELEMENTS).bfloat16() for _ in range(max(1, num_bytes // 2 // TENSOR_ELEMENTS))]
    with ExitStack() as stack:
        store = folder / "root"
        root = stack.enter_context(worker(partial(_root, store=store)))
        endpoint: str = receive(root)
        child = stack.enter_context(worker(partial(_child, store=folder / "child", parent=endpoint)))
        publisher = Publisher(store, chunk_bytes=CHUNK_BYTES)
        stack.callback(publisher.close)

        def publish() -> Iterator[dict[str, float]]:
            version = 0
            while True:
                version += 1
                for tensor in tensors:
                    step(tensor)
                began = time.monotonic()
                publisher.publish(version, [(f"layer.{i}", tensor) for i, tensor in enumerate(tensors)])
                served, ready, whole, num_files = receive(child)
                if version <= WARM_VERSIONS // 2:  # the first has no deltas, the second perhaps no change file
                    yield {}
                    continue
                made, its_version, payload = receive(root)
                while its_version < version:
                    made, its_version, payload = receive(root)
                assert num_files == 1, f"version {version} came with {num_files} change files"
                yield {
                    "delta": ready - made,
                    "served": served - made,
                    "publish": ready - began,
                    "whole": whole - began,
                    "proven": num_bytes / (whole - ready) / 1e9,
                    "bytes": float(payload),
                }

        yield publish()


def step(tensor: torch.Tensor) -> None:
    """Move one element in `SPARSITY`, drawn at random, up or down by one unit in the last place."""
    places = torch.randint(len(tensor), (len(tensor) // SPARSITY,))
    tensor.view(torch.int16)[places] += 2 * (places % 2).to(torch.int16) - 1


class _Compared(logging.Handler):
    """Sends the time, the version and the bytes of its deltas when the root has made the last of these."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.DEBUG)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        """Send what the encoder logs."""
        assert isinstance(record.args, tuple), f"an unknown line: {record.getMessage()}"
        version, payload = record.args
        self._pipe.send((time.monotonic(), version, payload))


def _root(pipe: Connection, *, store: Path) -> None:
    """Run the root. Sends its endpoint, and then what `_Compared` says."""
    encoder = logging.getLogger("laminar_py.relay.delta_encoder")
    encoder.setLevel(logging.DEBUG)
    encoder.propagate = False
    encoder.addHandler(_Compared(pipe))

    async def run() -> None:
        node = RelayNode("root", store=store, keys=None, host=LOCAL, chunk_bytes=CHUNK_BYTES, keep_versions=1)
        await node.start()
        pipe.send(node.endpoint)
        await node.run()

    asyncio.run(run())


def _child(pipe: Connection, *, store: Path, parent: str) -> None:
    """Run the root's child and its subscriber.

    Sends for each version when the subscriber knew it, had its changes, had its folder, and the number of files.
    """

    async def run() -> None:
        node = RelayNode(
            "child", store=store, keys=None, host=LOCAL, parents=[parent], chunk_bytes=CHUNK_BYTES, keep_versions=1
        )
        await node.start()
        subscriber = Subscriber(node.endpoint, "engine", None)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(node.run())
            tasks.create_task(subscriber.run())
            base = -1
            while True:
                version = await subscriber.wait_newer(base)
                served = time.monotonic()
                pulled = await subscriber.pull(version, base=base)
                ready = time.monotonic()
                await subscriber.pull(version)
                pipe.send((served, ready, time.monotonic(), len(pulled.changes)))
                base = version

    asyncio.run(run())


@contextmanager
def plain_copy(most_bytes: int) -> Iterator["_Copy"]:
    """Yield a function that sends bytes to another process by TCP; it returns the seconds until all are there."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server((LOCAL, 0)))
        swallow = partial(_swallow, address=listener.getsockname(), most_bytes=most_bytes)
        there = stack.enter_context(worker(swallow))
        yield _Copy(stack.enter_context(listener.accept()[0]), there)


class _Copy:
    """Sends bytes to another process, e.g. `_Copy(connection, pipe)(num_bytes)`."""

    def __init__(self, connection: socket.socket, there: Connection) -> None:
        self._connection = connection
        self._there = there

    def __call__(self, num_bytes: int) -> float:
        """Return the seconds of a copy, the median of some."""
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8).numpy().data
        times = []
        for _ in range(COPIES):
            self._there.send(num_bytes)
            began = time.monotonic()
            self._connection.sendall(data)
            ended: float = receive(self._there)
            times.append(ended - began)
        return median(times)


def _swallow(pipe: Connection, *, address: tuple[str, int], most_bytes: int) -> None:
    """Receive as many bytes as each message says into warm memory; send the moment of the last."""
    memory = memoryview(mmap.mmap(-1, most_bytes))
    memory[:] = bytes(most_bytes)
    with socket.create_connection(address) as connection:
        while True:
            left = memory[: pipe.recv()]
            while left:
                left = left[connection.recv_into(left) :]
            pipe.send(time.monotonic())


def memory_copy(num_bytes: int) -> float:
    """Return the seconds of a copy in warm memory, the median of some."""
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    times: Sequence[float] = [_timed(source, target) for _ in range(COPIES)]
    return median(times)


def _timed(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.monotonic()
    target.copy_(source)
    return time.monotonic() - began
