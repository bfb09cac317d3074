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
        """Have the process end, without a wait; its waiting calls raise `NoAnswerError`."""
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
    """Make `cluster()` return the cluster at `address` until the block ends; then end all processes of the run.

    Without an address the cluster is this host, with forked processes. Otherwise the run joins a running Ray
    cluster, and leaves it at the end. Raises `ConfigError` if there is no cluster to join.
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
    """Make `cluster()` return this cluster until the block ends, e.g. a benchmark's own."""
    _opened.append(cluster)
    try:
        yield
    finally:
        _opened.remove(cluster)


def cluster() -> Cluster:
    """Return the cluster that was opened last."""
    assert _opened, "no cluster is open; enter `open_cluster` first"
    return _opened[-1]


def nodes() -> list[Node]:
    """Return the live nodes with their free GPUs, this process's node first."""
    return cluster().nodes()


async def on_node(node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
    """Run a function of this package on a node, and return its answer.

    On this process's node the function runs on a thread, and raises its own errors. On another node it runs in a
    process of low priority, which ends with the call, also when the caller is cancelled. Raises `NoAnswerError` if
    that process ends first, `RemoteCallError` if the function raises there.
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
    assert isinstance(answer.value, bytes), f"{function.__name__} must return bytes"
    return answer.value


def free_port(ip: str) -> bytes:
    """Return the number of a TCP port that is free at this host's address `ip`, encoded for `on_node`."""
    with socket.create_server((ip, 0)) as listener:
        return encode(listener.getsockname()[1])
