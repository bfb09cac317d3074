"""What runs on one host of the many-hosts benchmark, in a process inside that host's network namespace.

Used by relay_hosts.py. A function of `work` gets its pipe first, says once what others need to reach it, and then
does a round whenever told to. Invariant: no process outlives the benchmark, even if that is killed.
"""

import ctypes
import functools
import http.server
import os
import shutil
import socket
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from laminar_py.bench.processes import READY, Worker
from laminar_py.bench.relay_network import INTERFACE
from laminar_py.bench.relay_node import relay
from laminar_py.relay.wire.messages import ParentLost, VersionComplete
from laminar_py.relay.wire.transport import RelayKeys

PIECE_BYTES = 2**20  # that bare sockets and downloads move at a time
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of `setns`
PATIENCE = timedelta(seconds=120)

Address = tuple[str, int]
Answer = TypeVar("Answer")


class HostWorker(Worker):
    """A process inside a namespace, e.g. `HostWorker(network.hosts[0], receive_bare, "10.0.0.1")`."""

    def __init__(self, namespace: Path, work: Callable[..., None], *arguments: object) -> None:
        super().__init__(_inside, namespace, work, arguments)

    def ask(self, word: object, kind: type[Answer]) -> Answer:
        """Its answer to something."""
        self.tell(word)
        return self.hear(kind)

    def cpu_ticks(self) -> int:
        """Processor time it has used, in the kernel's ticks."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self._process.kill()
        self._process.join()


class RelayHost(HostWorker):
    """A relay node on a host of its own, which listens from here on."""

    def __init__(
        self,
        namespace: Path,
        name: str,
        *,
        store: Path,
        keys: RelayKeys,
        parents: Sequence[str],
        host: str,
        chunk_bytes: int,
    ) -> None:
        super().__init__(namespace, relay, name, store, keys, parents, host, chunk_bytes)
        self.store = store
        self.endpoint = self.hear(str)
        self._lost: list[float] = []  # when it gave a parent up

    def completed(self, version: int) -> tuple[float, VersionComplete]:
        """When the version was complete and verified there; versions must be asked for in order."""
        while True:
            moment, event = self.hear(tuple)
            if isinstance(event, ParentLost):
                self._lost.append(moment)
                continue
            assert isinstance(event, VersionComplete), f"waited for version {version}: {event}"
            if event.version == version:
                return moment, event

    def lost_since(self, moment: float) -> list[float]:
        """When it gave parents up after `moment`, of what `completed` has read."""
        return [lost for lost in self._lost if lost > moment]


def _inside(pipe: Connection, namespace: Path, work: Callable[..., None], arguments: Sequence[object]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with namespace.open("rb") as file:
        if libc.setns(file.fileno(), NEW_NETWORK):  # of this thread, and of those that it starts
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    work(pipe, *arguments)


def learn(pipe: Connection, store: Path, root: str, keys: RelayKeys, chunk_bytes: int) -> None:
    """A learner: told (version, bytes), it publishes that many random ones and says `Published`."""
    import torch

    from laminar_py.relay.publisher import Publisher
    from laminar_py.relay.store.shards import HEADER_BYTES

    torch.set_num_threads(1)
    publisher = Publisher(store, root, keys, chunk_bytes=chunk_bytes)
    while True:
        version, num_bytes = pipe.recv()
        generator = torch.Generator().manual_seed(version)
        size = (num_bytes - HEADER_BYTES,)
        weights = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        publisher.publish(version, [("weights", weights)])
        pipe.send(publisher.sealed(version))


def receive_bare(pipe: Connection, host: str) -> None:
    """The far end of `send_bare`, for any number of rounds; says where it listens."""
    listener = socket.create_server((host, 0))
    pipe.send(listener.getsockname())
    piece = memoryview(bytearray(PIECE_BYTES))
    while True:
        connection, _ = listener.accept()
        with connection:
            left = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
            while left:
                left -= connection.recv_into(piece)
            connection.sendall(b".")


def send_bare(pipe: Connection, far: Address) -> None:
    """Told a number of bytes, sends them over a new connection; says the seconds."""
    piece = os.urandom(PIECE_BYTES)
    while True:
        left = pipe.recv()
        with socket.create_connection(far) as connection:
            began = time.monotonic()
            connection.sendall(left.to_bytes(8, "little"))
            while left:
                connection.sendall(piece[:left])
                left -= min(left, PIECE_BYTES)
            assert connection.recv(1) == b".", "the receiver has gone"
            pipe.send(time.monotonic() - began)


class _Server(http.server.ThreadingHTTPServer):
    request_queue_size = 64  # all hosts may come at once
    daemon_threads = True


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: progress is told by the benchmark."""


def serve_http(pipe: Connection, host: str, folder: Path) -> None:
    """Python's own server of a folder; says its address."""
    server = _Server((host, 0), functools.partial(_Handler, directory=str(folder)))
    pipe.send(server.server_address)
    server.serve_forever()


def download(pipe: Connection, url: str, path: Path) -> None:
    """Told to, gets the file into `path`; says when it began and ended."""
    pipe.send(READY)
    while pipe.recv():
        began = time.monotonic()
        with urllib.request.urlopen(url) as response, path.open("wb") as file:
            shutil.copyfileobj(response, file, PIECE_BYTES)
        pipe.send((began, time.monotonic()))


def broadcast_gloo(pipe: Connection, rank: int, far: Address, num_ranks: int, path: Path, num_bytes: int) -> None:
    """`torch.distributed`, from and into mapped shared memory; told to, says when it began and ended."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group(
        "gloo", init_method=f"tcp://{far[0]}:{far[1]}", rank=rank, world_size=num_ranks, timeout=PATIENCE
    )
    weights = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    dist.broadcast(weights[:PIECE_BYTES].clone(), 0)  # connects
    pipe.send(READY)
    while pipe.recv():
        dist.barrier()
        began = time.monotonic()
        dist.broadcast(weights, 0)
        pipe.send((began, time.monotonic()))
