"""The cluster of a run: this host alone, with forked processes, or a Ray cluster.

`open_cluster` opens it. From then on parts start there (`part.Part`), and functions run on its nodes.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

from laminar_py.records.codec import encode
from laminar_py.runtime.cluster.calls import (
    ActorClass,
    Answer,
    FailureKind,
    FunctionCalls,
    Raised,
    Scalar,
    path_of,
)
from laminar_py.runtime.cluster.errors import RemoteCallError
from laminar_py.runtime.cluster.forked import LOOPBACK as LOOPBACK
from laminar_py.runtime.cluster.forked import ForkedCluster
from laminar_py.runtime.cluster.placement import Node, NodeSlot


class Process(Protocol):
    """A process of the run, seen from the process that started it."""

    async def ready(self) -> None:
        """Wait until the process can be called. Raises `NoAnswerError` if it does not start."""
        ...

    async def call(self, method: str, *arguments: Scalar) -> Answer:
        """Call a method of the object that the process hosts. Raises `NoAnswerError` if the process ends first."""
        ...

    def kill(self) -> None:
        """End the process."""
        ...


class Cluster(Protocol):
    """Starts processes on nodes. Implemented by `ForkedCluster` and `RayCluster`."""

    here: str  # this process's node

    def start(self, actor_class: ActorClass, *, title: str, concurrency: int, place: NodeSlot) -> Process:
        """Start a process that hosts an object of `actor_class`; `ps` and `top` show its `title`."""
        ...

    def nodes(self) -> list[Node]:
        """Return the nodes with their free GPUs, the controller's node first."""
        ...


_opened: list[Cluster] = []


@contextlib.contextmanager
def open_cluster(address: str | None) -> Iterator[None]:
    """Open the cluster at `cluster.address`; all processes of the run end when it closes.

    None: this host, with forked processes; else a running Ray cluster, which keeps running. Raises `ConfigError`
    if there is no cluster to join.
    """
    with contextlib.ExitStack() as stack:
        cluster: Cluster
        if address is None:
            cluster = forked = ForkedCluster()
            stack.callback(forked.close)
        else:
            from laminar_py.runtime.cluster.ray_cluster import joined_ray  # a second, and 100 MB

            cluster = stack.enter_context(joined_ray(address))
        stack.enter_context(use_cluster(cluster))
        yield


@contextlib.contextmanager
def use_cluster(cluster: Cluster) -> Iterator[None]:
    """Start processes on this cluster until the block ends, e.g. on a benchmark's own."""
    _opened.append(cluster)
    try:
        yield
    finally:
        _opened.remove(cluster)


def cluster() -> Cluster:
    """Return the open cluster."""
    assert _opened, "a cluster is open"
    return _opened[-1]


def nodes() -> list[Node]:
    """Return the live nodes with their free GPUs, this process's node first."""
    return cluster().nodes()


async def on_node(node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
    """Run a function of this package on a node, and return its answer. Raises `NoAnswerError`, `RemoteCallError`.

    On this node the function runs on a thread, and raises its own errors. On another node it runs in a process of
    low priority, which ends with the call, also when the caller is cancelled.
    """
    if node == cluster().here:
        return await asyncio.to_thread(function, *arguments)
    process = cluster().start(FunctionCalls, title=function.__name__, concurrency=1, place=NodeSlot(node))
    try:
        await process.ready()
        answer = await process.call("call", path_of(function), *arguments)
    finally:
        process.kill()
    if isinstance(answer, Raised):
        raise RemoteCallError(answer.failure.reason, is_bug=answer.failure.kind is FailureKind.BUG)
    assert isinstance(answer.value, bytes), f"{function.__name__} answers bytes"
    return answer.value


def free_port(ip: str) -> bytes:
    """Return an encoded free port of this host at the address `ip`."""
    with socket.create_server((ip, 0)) as listener:
        return encode(listener.getsockname()[1])
