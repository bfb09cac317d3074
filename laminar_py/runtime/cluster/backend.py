"""The cluster that a run's processes are on: this host alone, with forked processes, or one of Ray.

`open_cluster` opens one; from then on parts start there (`part.Part`), and functions run on its nodes.
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
AWAY_S = 0.1  # before a process is asked again that died over a call: the dead one may still have its name


class Process(Protocol):
    """A process of the run, seen from the process that started it."""

    def call_method(self, method: str, *arguments: Scalar) -> "Future[Future[Answer]]":
        """Make a call once the process, or Ray, takes it; the inner future is its answer."""
        ...

    def kill(self) -> None:
        """End the process."""
        ...


class Cluster(Protocol):
    """Starts processes on nodes; see `ForkedCluster` and `RayCluster`."""

    here: str  # this process's node

    def start(self, kind: Kind, *, title: str, concurrency: int, place: Place, known_as: str = "") -> Process:
        """A process that hosts an object of `kind`; other processes of the run call it by the name `known_as`.

        `ps` and `top` show its `title`.
        """
        ...

    def nodes(self, *, taken: bool) -> list[Node]:
        """Its nodes with the GPUs that are free, or with `taken` with all; this process's first."""
        ...

    async def all_placed(self) -> bool:
        """True once every process has what it asked for, or has died."""
        ...

    async def on_node(self, node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
        """Answer of a function in a process on that node."""
        ...


_opened: list[Cluster] = []


@contextlib.contextmanager
def open_cluster(address: str | None) -> Iterator[None]:
    """Open the cluster at `cluster.address`; all that the run starts there ends with it.

    None: this host, with forked processes; `local`: Ray, started on this machine; else Ray, joined, which goes on.
    Raises `ConfigError` if there is none to join.
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
    """Have processes of this run find each other by Ray, also where the run was started by a forked process."""
    outer = os.environ.pop(SESSION, None)
    try:
        yield
    finally:
        if outer is not None:
            os.environ[SESSION] = outer


def cluster() -> Cluster:
    """The open cluster."""
    assert _opened, "a cluster is open"
    return _opened[-1]


def nodes(*, taken: bool = False) -> list[Node]:
    """Live nodes with their free GPUs, or with `taken` with all: this process's first, then by address."""
    return cluster().nodes(taken=taken)


async def all_placed() -> bool:
    """True once every process that this one started, or is about to, has what it asked for, or has died."""
    return await cluster().all_placed()


async def on_node(
    node: str, function: Callable[..., bytes], *arguments: str | bytes, apart: bool = False
) -> bytes:
    """Answer of a function of this package on that node. Raises `NoAnswerError`, or `RemoteCallError`.

    On this node the function runs on a thread, and raises its own errors. Set `apart` for heavy work: the function
    then runs in a process of low priority here, too.
    """
    if not apart and node == cluster().here:
        return await asyncio.to_thread(function, *arguments)
    return await cluster().on_node(node, function, *arguments)


class NamedPart:
    """A part that any process of the run calls by name, whichever process has the name now.

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

        Raises `RemoteCallError` where the method raises.
        """
        sent = [as_scalar(argument) for argument in arguments]
        while True:
            try:
                return value_of(await self._process.call_method(method, *sent))
            except NoAnswerError as error:
                if type(error) is not NoAnswerError:
                    raise  # what the method raised
                log.info("%s is away: %s", self._name, error)
                await asyncio.sleep(AWAY_S)


class _Named(Protocol):
    async def call_method(self, method: str, *arguments: Scalar) -> Answer: ...


def free_port(ip: str) -> bytes:
    """A port that this host can listen on."""
    with socket.create_server((ip, 0)) as listener:
        return encode(listener.getsockname()[1])
