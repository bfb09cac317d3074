"""Other ways to bring new weights to many processes: gloo and HTTP, on one host or over several.

Used by `fanout` and `hosts`. Processes, connections and memory exist before a round begins. `Peers.check` fails
unless a round brought the same bytes to each process.
"""

import hashlib
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from http.client import HTTPConnection
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from laminar_lab.bench.processes import PATIENCE_S, READY, Start, Worker
from laminar_lab.bench.relay.tree import LOCAL, Bytes, raw
from laminar_lab.bench.report import Side
from laminar_py.relay import PAGE_BYTES

TENSOR_BYTES = 8 * 2**20
DIGEST = "digest"
GO = "go"
SOURCE = "source.safetensors"
PATIENCE = timedelta(seconds=PATIENCE_S)


def make_tensors(num_bytes: int, *, tensor_bytes: int = TENSOR_BYTES, seed: int = 0) -> dict[str, Tensor]:
    """Make random bf16 tensors of that size together."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(tensor_bytes, num_bytes - start) for start in range(0, num_bytes, tensor_bytes)]
    return {
        f"weight.{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(torch.bfloat16)
        for i, size in enumerate(sizes)
    }


def touch(data: Bytes) -> None:
    """Read one byte of each page of `data [n]`."""
    data[::PAGE_BYTES].sum()


def load(folder: Path) -> list[Tensor]:
    """Map the tensors of the safetensors files in `folder` and touch each page."""
    tensors = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    for tensor in tensors:
        touch(raw(tensor))
    assert tensors, f"{folder} has no tensors"
    return tensors


@dataclass(frozen=True, slots=True)
class Peers:
    """Processes that carry bytes from the first to the others, and the seconds of a round."""

    workers: list[Worker]
    measure: Side
    conditions: str  # how the bytes travel and what a round is, for a table

    def check(self) -> None:
        """Fail unless every process has the same bytes."""
        digests = {worker.request(DIGEST, str) for worker in self.workers}
        assert len(digests) == 1, f"{len(digests)} different contents after a round"


def _span(workers: list[Worker]) -> tuple[float, float]:
    """Have the workers make a round; return its first beginning and its last end."""
    for worker in workers:
        worker.send(GO)
    spans = [worker.receive(tuple) for worker in workers]
    return min(began for began, _ in spans), max(ended for _, ended in spans)


def _serve_rounds(
    pipe: Connection,
    go: Callable[[], object],
    held: Callable[[], Iterable[Tensor]],
    *,
    before: Callable[[], object] = int,
) -> None:
    """Make a round at each word of the pipe and send its beginning and end.

    At `DIGEST` send the digest of `held`.
    """
    pipe.send(READY)
    while True:
        if pipe.recv() == DIGEST:
            digest = hashlib.blake2b()
            for tensor in held():
                digest.update(raw(tensor).data)
            pipe.send(digest.hexdigest())
            continue
        before()
        began = time.monotonic()
        kept = go()
        pipe.send((began, time.monotonic()))
        del kept  # an engine has its own copy by then


# ---- gloo


@dataclass(frozen=True, slots=True, kw_only=True)
class Gloo:
    """A process group whose rank 0 broadcasts its tensors into the tensors of the other ranks."""

    count: int  # ranks
    num_bytes: int
    rendezvous: str  # URL at which they meet
    interface: str  # network interface of the group
    tensor_bytes: int = TENSOR_BYTES

    @contextmanager
    def side(self, start: Start) -> Iterator[Peers]:
        """Start each rank on the host of its number; a round begins when all ranks are there."""
        with ExitStack() as stack:
            workers = [stack.enter_context(start(rank, partial(self._run, rank))) for rank in range(self.count)]
            for worker in workers:
                worker.await_ready()

            def measure(_: int) -> float:
                began, ended = _span(workers)
                return ended - began

            setting = (
                "broadcast from and into memory that is not shared, neither encrypted nor digested; a round begins"
            )
            yield Peers(workers, measure, f"{setting} when every rank is there")

    def _run(self, rank: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        dist.init_process_group(
            "gloo", init_method=self.rendezvous, rank=rank, world_size=self.count, timeout=PATIENCE
        )
        tensors = list(make_tensors(self.num_bytes, tensor_bytes=self.tensor_bytes, seed=rank).values())
        dist.broadcast(torch.zeros(PAGE_BYTES), 0)  # connects

        def go() -> None:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)
            if rank:
                for tensor in tensors:
                    touch(raw(tensor))

        _serve_rounds(pipe, go, lambda: tensors, before=dist.barrier)


# ---- HTTP


@contextmanager
def http_side(
    start: Start, folder: Path, *, count: int, num_bytes: int, host: str = LOCAL, with_writing: bool = True
) -> Iterator[Peers]:
    """Yield the HTTP side: the first of `count` processes writes and serves a file, the others download it.

    A round begins with the writing; without writing, it begins with the first request.
    """
    folder.mkdir()
    source = folder / SOURCE
    with ExitStack() as stack:
        server = stack.enter_context(start(0, partial(_serve, path=source, num_bytes=num_bytes, host=host)))
        port, size = server.receive(tuple)
        workers = []
        for number in range(1, count):
            target = folder / f"host-{number}"
            fetch = partial(_download, folder=target, address=(host, port), size=size)
            workers.append(stack.enter_context(start(number, fetch)))
        for worker in (server, *workers):
            worker.await_ready()

        def measure(_: int) -> float:
            written = server.request(GO, tuple)[0] if with_writing else math.inf
            requested, ended = _span(workers)
            return ended - min(written, requested)

        setting = (
            "http.server with sendfile, http.client, connections left open, into mapped shared memory, neither"
            " encrypted nor digested; a round begins with"
        )
        yield Peers(
            [server, *workers], measure, f"{setting} {'the writing' if with_writing else 'the first request'}"
        )


class FileHandler(SimpleHTTPRequestHandler):
    """Sends the files of a folder with `sendfile`."""

    protocol_version = "HTTP/1.1"  # connections stay open

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send the body."""
        self.connection.sendfile(source)

    def log_message(self, *_: object) -> None:
        """Say nothing on stderr."""


class FileServer(ThreadingHTTPServer):
    """Server that accepts connections of many hosts at once."""

    request_queue_size = 64


def _serve(pipe: Connection, *, path: Path, num_bytes: int, host: str) -> None:
    """Send port and size; then serve the file, and write it again at each word of the pipe."""
    torch.set_num_threads(1)
    tensors = make_tensors(num_bytes)
    save_file(tensors, path)
    size = path.stat().st_size
    server = FileServer((host, 0), partial(FileHandler, directory=str(path.parent)))
    Thread(target=server.serve_forever, daemon=True).start()
    pipe.send((server.server_port, size))

    def write() -> None:
        with path.open("r+b", buffering=0) as file:
            file.seek(size - num_bytes)  # the data, in the order of the names
            for tensor in tensors.values():
                file.write(raw(tensor).data)

    _serve_rounds(pipe, write, tensors.values)


def _download(pipe: Connection, *, folder: Path, address: tuple[str, int], size: int) -> None:
    """Fetch the file into mapped shared memory at each word of the pipe, and load its tensors."""
    torch.set_num_threads(1)
    connection = HTTPConnection(*address)
    folder.mkdir()
    path = folder / "model.safetensors"
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), size)

    def fetch() -> list[Tensor]:
        connection.request("GET", f"/{SOURCE}")
        response = connection.getresponse()
        left = memoryview(pages)
        while left:
            left = left[response.readinto(left) :]
        response.read()
        return load(folder)

    _serve_rounds(pipe, fetch, lambda: load(folder))
