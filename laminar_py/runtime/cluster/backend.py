"""The cluster of a run: this host alone, with forked processes, or a Ray cluster.

`open_cluster` opens it. From then on parts start there (`part.Part`), and functions run on its nodes.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol

from laminar_py.records.codec import encode
from laminar_py.runtime.cluster.calls import Answer, Kind, Scalar, as_scalar, value_of
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.forked import SESSION, ForkedCluster, NamedProcess
from laminar_py.runtime.cluster.placement import Node, Place

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
RAY_HERE = "local"  # cluster.address of a Ray cluster that the run starts on this machine
AWAY_S = 0.1  # before a call to a named process is repeated: the dead process may still have the name


class Process(Protocol):
    """A process of the run, seen from the process that started it."""

    def call_method(self, method: str, *arguments: Scalar) -> "Future[Future[Answer]]":
        """Call a method once the process is up; the inner future is the answer of the method."""
        ...

    def kill(self) -> None:
        """End the process."""
        ...


class Cluster(Protocol):
    """Starts processes on nodes. Implemented by `ForkedCluster` and `RayCluster`."""

    here: str  # this process's node

    def start(self, kind: Kind, *, title: str, concurrency: int, place: Place, known_as: str = "") -> Process:
        """Start a process that hosts an object of `kind`, and return it.

        Other processes of the run call it by the name `known_as`. `ps` and `top` show its `title`.
        """
        ...

    def nodes(self) -> list[Node]:
        """Return the nodes with their free GPUs, the controller's node first."""
        ...

    async def on_node(self, node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
        """Run a function in a process on a node, and return its answer."""
        ...


_opened: list[Cluster] = []


@contextlib.contextmanager
def open_cluster(address: str | None) -> Iterator[None]:
    """Open the cluster at `cluster.address`; all processes of the run end when it closes.

    None: this host, with forked processes; `local`: a Ray cluster started on this machine; any other address: a
    running Ray cluster, which keeps running. Raises `ConfigError` if there is no cluster to join.
    """
    with contextlib.ExitStack() as stack:
        cluster: Cluster
        if address is None:
            cluster = forked = ForkedCluster()
            stack.callback(forked.close)
        else:
            from laminar_py.runtime.cluster.ray_cluster import joined_ray, local_ray  # a second, and 100 MB

            stack.enter_context(_no_session())
            cluster = stack.enter_context(local_ray() if address == RAY_HERE else joined_ray(address))
        _opened.append(cluster)
        stack.callback(_opened.remove, cluster)
        yield


@contextlib.contextmanager
def _no_session() -> Iterator[None]:
    """Let processes of this run find each other by Ray, also if a forked process started the run."""
    outer = os.environ.pop(SESSION, None)
    try:
        yield
    finally:
        if outer is not None:
            os.environ[SESSION] = outer


def cluster() -> Cluster:
    """Return the open cluster."""
    assert _opened, "a cluster is open"
    return _opened[-1]


def nodes() -> list[Node]:
    """Return the live nodes with their free GPUs, this process's node first."""
    return cluster().nodes()


async def on_node(
    node: str, function: Callable[..., bytes], *arguments: str | bytes, apart: bool = False
) -> bytes:
    """Run a function of this package on a node, and return its answer. Raises `NoAnswerError`, `RemoteCallError`.

    On this node the function runs on a thread, and raises its own errors. With `apart`, for heavy work, it runs in
    a process of low priority on this node, too.
    """
    if not apart and node == cluster().here:
        return await asyncio.to_thread(function, *arguments)
    return await cluster().on_node(node, function, *arguments)


class NamedPart:
    """Calls a part by name from any process of the run, also after the part has restarted.

    E.g. `NamedPart("math-3.1.environment-0")`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        if SESSION in os.environ:
            self._process: _Named = NamedProcess(name)
        else:
            from laminar_py.runtime.cluster.ray_cluster import NamedActor

            self._process = NamedActor(name)

    async def call(self, method: str, *arguments: object) -> Scalar:
        """Return the answer of a method. If the process dies meanwhile, call the next process of that name.

        Raises `RemoteCallError` if the method raises.
        """
        sent = [as_scalar(argument) for argument in arguments]
        while True:
            try:
                return value_of(await self._process.call_method(method, *sent))
            except NoAnswerError as error:
                if type(error) is not NoAnswerError:
                    raise  # an error of the method itself
                log.info("%s does not answer: %s", self._name, error)
                await asyncio.sleep(AWAY_S)


class _Named(Protocol):
    async def call_method(self, method: str, *arguments: Scalar) -> Answer: ...


def free_port(ip: str) -> bytes:
    """Return an encoded free port of this host at the address `ip`."""
    with socket.create_server((ip, 0)) as listener:
        return encode(listener.getsockname()[1])
