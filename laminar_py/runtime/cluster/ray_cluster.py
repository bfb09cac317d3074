"""A Ray cluster that the run joins; its processes host the same objects as forked ones.

One thread makes all calls that may wait for Ray's processes, since an event loop would wait with them. Ray
receives the calls in the order of their requests: the start of a process, calls on it, its end.
"""

import asyncio
import contextlib
import functools
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.config.section import ConfigError
from laminar_py.runtime.cluster.calls import (
    ActorClass,
    Answer,
    FunctionCalls,
    Scalar,
    Shell,
    encode_answer,
    path_of,
    read_answer,
    set_title,
)
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.placement import Node, NodeSlot
from laminar_py.runtime.cluster.variables import WORKERS_READ

CONNECT_S = 5.0
END_S = 30.0  # for the last calls to Ray, e.g. to end processes


class RayCluster:
    """The Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        self.here = ray.get_runtime_context().get_node_id()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="ray")

    def start(self, actor_class: ActorClass, *, title: str, concurrency: int, place: NodeSlot) -> "RayProcess":
        """Start an actor that hosts an object of `actor_class`; return at once. Ray never restarts the actor.

        If `place` names a node, the actor runs there or nowhere. It sees only its own GPUs, and reserves no CPU.
        """
        path = path_of(actor_class)
        # Ray shows the class as the title: a process for one function call has the function's name instead
        name = title if path == path_of(FunctionCalls) else path.rpartition(":")[2]
        options = _ray_class(name).options(
            num_cpus=0,
            num_gpus=place.gpus,
            max_restarts=0,
            enable_task_events=False,  # the head node would keep half a kilobyte of each of the last 100,000 calls
            max_concurrency=concurrency,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False)
            if place.node
            else "DEFAULT",
        )
        return RayProcess(self._calls, self._calls.submit(options.remote, path, title, concurrency))

    def nodes(self) -> list[Node]:
        """Return the live nodes with their free GPUs, the controller's node first."""
        free = ray._private.state.available_resources_per_node()  # public calls give only the sum over all nodes
        nodes = [
            Node(
                id=node["NodeID"],
                ip=node["NodeManagerAddress"],
                gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
                cpus=int(node["Resources"].get("CPU", 0)),
                here=node["NodeID"] == self.here,
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (not node.here, node.ip, node.id))

    def close(self) -> None:
        """Wait for pending calls, at most `END_S`, drop later calls, which would start Ray again, and leave."""
        wait([self._calls.submit(bool)], timeout=END_S)
        self._calls.shutdown(wait=False, cancel_futures=True)
        ray.shutdown()


class RayProcess:
    """An actor, seen from the process that started it."""

    def __init__(self, calls: ThreadPoolExecutor, actor: "Future[ray.actor.ActorHandle]") -> None:
        self._calls = calls
        self._actor = actor

    async def ready(self) -> None:
        """Wait until Ray has accepted the actor. Raises `NoAnswerError` if Ray refuses it."""
        with _ray_errors():
            await asyncio.shield(asyncio.wrap_future(self._actor))

    async def call(self, method: str, *arguments: Scalar) -> Answer:
        """Call a method of the actor's object, and return its answer. Raises `NoAnswerError` if the actor ends."""

        def begin() -> "Future[bytes]":
            answer: Future[bytes] = self._actor.result().answer.remote(method, *arguments).future()
            return answer

        with _ray_errors():
            answer = await asyncio.wrap_future(self._calls.submit(begin))
            return read_answer(await asyncio.wrap_future(answer))

    def kill(self) -> None:
        """Have Ray end the process after all earlier calls to Ray; return at once."""

        def kill() -> None:
            with contextlib.suppress(RayError):  # Ray could not create the actor
                ray.kill(self._actor.result())

        self._calls.submit(kill)


@contextlib.contextmanager
def _ray_errors() -> Iterator[None]:
    """Raise an error of Ray as `NoAnswerError`."""
    try:
        yield
    except RayError as error:
        raise NoAnswerError(_reason(error)) from error


class _Actor:
    """Ray's actor around an object of a class."""

    def __init__(self, path: str, title: str, concurrency: int) -> None:
        set_title(title)
        self._shell = Shell(path, concurrency=concurrency)

    async def answer(self, method: str, *arguments: Scalar) -> bytes:
        return encode_answer(await self._shell.answer(0, method, *arguments))


@contextlib.contextmanager
def joined_ray(address: str) -> Iterator[RayCluster]:
    """Join a running cluster, and leave it on exit. Raises `ConfigError` if there is none at `address`."""
    folder = os.getcwd()

    def enter() -> None:
        with contextlib.suppress(OSError):  # `preflight.node_checks` reports a node without it
            os.chdir(folder)

    try:
        if address != "auto":  # without a listener, Ray itself takes a minute to fail
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            runtime_env={"env_vars": dict(WORKERS_READ), "worker_process_setup_hook": enter},
        )
    except (OSError, RuntimeError, RayError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster to join there ({reason}); `ray start --head` starts one,"
            " with --temp-dir=/tmp/ray if TMPDIR is long; RAY_AUTH_TOKEN or ~/.ray/auth_token must hold its token"
        ) from None
    try:
        yield (cluster := RayCluster())
    finally:
        cluster.close()


@functools.cache
def _ray_class(name: str) -> "ray.actor.ActorClass":
    """Return Ray's class around a class of this name; Ray shows the name as the title of its processes.

    The cache makes each class once, since Ray sends every new class to its nodes.
    """
    return ray.remote(type(name, (_Actor,), {}))


def _reason(error: RayError) -> str:
    """Return a short reason: that memory ran out, or the first sentence of the last line of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError) or any("running low on memory" in line for line in lines):
        return "out of memory: Ray ended it as its node ran low"
    return lines[-1].split(". ")[0] if lines else type(error).__name__
