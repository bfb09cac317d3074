"""Ways to bring new weights to all replicas of one host: our relay, gloo and HTTP, each in processes of its own.

Used by `relay_fanout`, which compares them; Ray's way is in `relay_ray`. A round begins with the call that gives
the tensors away and ends when the last replica has them as its engine would load them and has touched every page.
Invariant: processes, connections and memory that a side uses again are there before a round begins.
"""

import asyncio
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from laminar_py.bench.processes import READY, Measure, Worker, crew
from laminar_py.bench.relay_tree import Tree
from laminar_py.relay.subscriber import Subscriber
from laminar_py.relay.wire.transport import RelayKeys

TENSOR_BYTES = 8 * 2**20
PAGE_BYTES = 4096


def make_tensors(num_bytes: int) -> dict[str, Tensor]:
    """Random bf16 tensors of that size together."""
    generator = torch.Generator().manual_seed(0)
    sizes = [min(TENSOR_BYTES, num_bytes - start) // 2 for start in range(0, num_bytes, TENSOR_BYTES)]
    return {f"weight.{i}": torch.randn(size, generator=generator).bfloat16() for i, size in enumerate(sizes)}


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """[nbytes] of a tensor, not copied."""
    data: npt.NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return data


def touch(data: npt.NDArray[np.uint8]) -> None:
    """Read one byte of each page of `data [n]`."""
    data[::PAGE_BYTES].sum()


def load(folder: Path) -> list[Tensor]:
    """All tensors of the safetensors files in `folder`, mapped and touched."""
    tensors = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            tensors += [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118 (not a dict)
    for tensor in tensors:
        touch(raw(tensor))
    return tensors


@contextmanager
def our_side(folder: Path, tensors: dict[str, Tensor], *, num_replicas: int) -> Iterator[Measure]:
    """A publisher here, a root, and subscribers, which share the root's folder."""
    keys = RelayKeys.generate()
    with (
        Tree(folder, keys=keys, leaf=False) as tree,
        crew(num_replicas, _subscribe, tree.root.endpoint, keys) as replicas,
    ):

        def measure() -> float:
            tree.await_spare()
            began = time.monotonic()
            tree.publish(tensors.items())
            ended = max(replica.hear(float) for replica in replicas)
            tree.await_last()
            return ended - began

        yield measure


def _subscribe(pipe: Connection, number: int, endpoint: str, keys: RelayKeys) -> None:
    async def follow() -> None:
        subscriber = Subscriber(endpoint, f"replica-{number}", keys)
        version = -1
        async with asyncio.TaskGroup() as group:
            group.create_task(subscriber.run())
            pipe.send(READY)
            while True:
                await subscriber.wait_newer(version)
                pulled = await subscriber.pull()
                held = load(Path(pulled.path))
                pipe.send(time.monotonic())
                assert held, f"{pulled} has no tensors"
                version, held = pulled.version, []  # an engine has its own copy by now

    torch.set_num_threads(1)
    asyncio.run(follow())


@contextmanager
def gloo_side(folder: Path, num_bytes: int, *, num_replicas: int) -> Iterator[Measure]:
    """One process broadcasts its tensors into those of the others, which wait for it."""
    folder.mkdir()
    world = num_replicas + 1
    with crew(world, _broadcast, world, folder / "store", num_bytes) as (source, *replicas):

        def measure() -> float:
            for replica in replicas:
                replica.tell("receive")
            for replica in replicas:
                replica.await_ready()
            source.tell("send")
            source.await_ready()
            ended = max(replica.hear(float) for replica in replicas)
            return ended - source.hear(float)

        yield measure


def _broadcast(pipe: Connection, rank: int, world: int, store: Path, num_bytes: int) -> None:
    """A rank of gloo's; rank 0 says when it began, the others when they were done."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    tensors = list(make_tensors(num_bytes).values())
    pipe.send(READY)
    while pipe.recv():
        pipe.send(READY)
        moment = time.monotonic()
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        if rank:
            for tensor in tensors:
                touch(raw(tensor))
            moment = time.monotonic()
        pipe.send(moment)


@contextmanager
def http_side(folder: Path, num_bytes: int, *, num_replicas: int) -> Iterator[Measure]:
    """One process writes its tensors to a file and serves that; the others download it over open connections."""
    folder.mkdir()
    with ExitStack() as stack:
        server = stack.enter_context(Worker(_serve, folder / "source.safetensors", num_bytes))
        port = server.hear(int)
        replicas = stack.enter_context(crew(num_replicas, _download, folder, port))

        def measure() -> float:
            server.tell("write")
            began = server.hear(float)
            server.await_ready()
            for replica in replicas:
                replica.tell("download")
            return max(replica.hear(float) for replica in replicas) - began

        yield measure


def _serve(pipe: Connection, path: Path, num_bytes: int) -> None:
    """Write the file anew when told to; says its port, then when it began to write, then that it has written."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_GET(self) -> None:
            with path.open("rb") as file:
                self.send_response(200)
                self.send_header("Content-Length", str(path.stat().st_size))
                self.end_headers()
                self.connection.sendfile(file)

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    torch.set_num_threads(1)
    tensors = make_tensors(num_bytes)
    save_file(tensors, path)
    start = path.stat().st_size - num_bytes  # of the data, which has the order of the names here
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_port)
    while pipe.recv():
        pipe.send(time.monotonic())
        with path.open("r+b", buffering=0) as file:
            file.seek(start)
            for tensor in tensors.values():
                file.write(raw(tensor).data)
        pipe.send(READY)


def _download(pipe: Connection, number: int, folder: Path, port: int) -> None:
    """Fetch the file into mapped shared memory when told to; says when its tensors were loaded."""
    torch.set_num_threads(1)
    connection = HTTPConnection("127.0.0.1", port)
    target = folder / f"replica-{number}"
    target.mkdir()
    pages = mmap.mmap(-1, 1)
    pipe.send(READY)
    while pipe.recv():
        connection.request("GET", "/")
        response = connection.getresponse()
        size = int(response.headers["Content-Length"])
        if len(pages) != size:  # the first round
            (target / "model.safetensors").write_bytes(bytes(size))
            with (target / "model.safetensors").open("r+b") as file:
                pages = mmap.mmap(file.fileno(), size)
        left = memoryview(pages)
        while left:
            left = left[response.readinto(left) :]
        response.read()
        held = load(target)
        pipe.send(time.monotonic())
        assert held, "a file without tensors"
