"""A Ray cluster that the run joins; its processes host the same objects as forked ones.

One thread makes all calls that may wait for Ray's processes, since an event loop would stand still with them. Ray
receives the calls in the order in which they were asked for: the start of a process, calls on it, its end. The
thread ends with this process, also where Ray has not answered it.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.config.section import ConfigError
from laminar_py.runtime.cluster.calls import (
    ActorClass,
    Answer,
    Scalar,
    answer_of,
    class_path,
    encode_answer,
    open_shell,
    read_answer,
    set_title,
    value_of,
)
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.placement import Node, Place
from laminar_py.runtime.cluster.variables import WORKERS_READ

log = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_S = 5.0
LOW = 10  # priority, as `nice` has it


class RayCluster:
    """The Ray cluster that this process is connected to."""

    def __init__(self) -> None:
        self.here = ray.get_runtime_context().get_node_id()

    def start(self, actor_class: ActorClass, *, title: str, concurrency: int, place: Place) -> "RayProcess":
        """Start an actor that hosts an object of `actor_class`. Ray never restarts it, and reserves no CPU for it.

        If its place names a node, it runs there or nowhere, and sees its own GPUs only.
        """

        def start() -> "ray.actor.ActorHandle":
            """Start the actor, in the thread that calls Ray."""
            strategy = NodeAffinitySchedulingStrategy(place.node, soft=False) if place.node else "DEFAULT"
            path = class_path(actor_class)
            options = _ray_class(path.rpartition(":")[2]).options(
                num_cpus=0,
                num_gpus=place.gpus,
                max_restarts=0,
                max_concurrency=concurrency,
                scheduling_strategy=strategy,
            )
            return options.remote(path, title, concurrency)

        return RayProcess(call_soon(start))

    def nodes(self) -> list[Node]:
        """Return the live nodes with their free GPUs, the controller's node first."""
        free = ray._private.state.available_resources_per_node()  # public calls give only the sum over all nodes
        found = [
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
        return sorted(found, key=lambda node: (not node.here, node.ip, node.id))

    async def on_node(self, node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
        """Run a function in a process on a node, and return its answer; the process ends if the call is cancelled.

        On this node the process has a low priority.
        """
        low = node == self.here
        begun = call_soon(_begin, node, function, arguments, low)
        try:
            reference = await asyncio.wrap_future(begun)  # its caller has a limit
            answer = await asyncio.wrap_future(reference.future())
        except RayError as error:
            raise NoAnswerError(_reason(error)) from error
        except asyncio.CancelledError:
            if not begun.cancel():
                call_and_forget(lambda: ray.cancel(begun.result(), force=True))
            raise
        found = value_of(read_answer(answer))
        assert isinstance(found, bytes), f"{function} answers bytes"
        return found

    def close(self) -> None:
        """Leave the cluster."""
        drain_calls()
        ray.shutdown()


class RayProcess:
    """An actor, seen from the process that started it."""

    def __init__(self, actor: "Future[ray.actor.ActorHandle]") -> None:
        self._actor = actor

    def call_method(self, method: str, *arguments: Scalar) -> "Future[Future[Answer]]":
        """Call a method once Ray accepts the call; the inner future is its answer, or raises `NoAnswerError`."""
        return call_soon(self._begin_call, method, *arguments)

    def _begin_call(self, method: str, *arguments: Scalar) -> "Future[Answer]":
        answer = Future[Answer]()
        try:
            asked = self._actor.result().answer.remote(method, *arguments).future()
        except RayError as error:  # its creation failed
            answer.set_exception(NoAnswerError(_reason(error)))
        else:
            asked.add_done_callback(functools.partial(_pass_on, answer))
        return answer

    def kill(self) -> None:
        """End the process, after all calls to Ray that were made before."""
        call_and_forget(self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor.result())


class _Actor:
    """Ray's actor around an object of a class."""

    def __init__(self, path: str, title: str, concurrency: int) -> None:
        set_title(title)
        self._shell = open_shell(path, concurrency=concurrency)

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
            " RAY_AUTH_TOKEN or ~/.ray/auth_token must hold its token"
        ) from None
    try:
        yield (cluster := RayCluster())
    finally:
        cluster.close()


def _begin(
    node: str, function: Callable[..., bytes], arguments: Sequence[str | bytes], low: bool
) -> "ray.ObjectRef":
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    name = getattr(function, "__name__", "on_node")
    task = _ray_task().options(name=name, num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return task.remote(function, *arguments, low=low)


@functools.cache
def _ray_class(name: str) -> "ray.actor.ActorClass":
    """Return Ray's class around a class of this name; Ray shows the name as the title of its processes.

    The class is made once, since Ray sends every class that it is given to its nodes.
    """
    return ray.remote(type(name, (_Actor,), {}))


@functools.cache
def _ray_task() -> "ray.remote_function.RemoteFunction":
    return ray.remote(_run)


def _run(function: Callable[..., bytes], *arguments: str | bytes, low: bool) -> bytes:
    """Run a function, and return its encoded answer.

    With `low` it runs on a thread of low priority, since Ray uses the process again.
    """
    if not low:
        return encode_answer(answer_of(function, *arguments))

    def lower() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW)

    with ThreadPoolExecutor(1, initializer=lower) as thread:
        return encode_answer(thread.submit(answer_of, function, *arguments).result())


def _pass_on(answer: "Future[Answer]", asked: "Future[bytes]") -> None:
    """Copy Ray's answer to the future of a call."""
    if not answer.set_running_or_notify_cancel():
        return  # its caller was cancelled
    error = asked.exception()
    if isinstance(error, RayError):
        answer.set_exception(NoAnswerError(_reason(error)))
    elif error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(read_answer(asked.result()))


def _reason(error: RayError) -> str:
    """Return the first sentence of the last line of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError) or any("running low on memory" in line for line in lines):
        return "out of memory: Ray ended it as its node ran low"
    return lines[-1].split(". ")[0] if lines else type(error).__name__


# ---- the thread that calls Ray

PATIENCE_S = 300.0  # for Ray to accept a call, which takes 0.3 ms

# bounded: a run makes some calls for each of its processes
_asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
_beginning = threading.Lock()


def call_soon(call: Callable[..., T], *arguments: object) -> Future[T]:
    """Queue a call for the thread that calls Ray; the future is its result."""
    _ensure_thread()
    made: Future[T] = Future()
    _asked.put((made, functools.partial(call, *arguments)))
    return made


def call_and_forget(call: Callable[..., object], *arguments: object) -> None:
    """Queue a call whose result is ignored; its error goes into the log."""
    call_soon(call, *arguments).add_done_callback(_log_failure)


def drain_calls() -> None:
    """Wait until all queued calls are made, or cancel them: a call after Ray's end would start Ray again."""
    try:
        call_soon(lambda: None).result(PATIENCE_S)
    except TimeoutError:
        log.error("Ray has taken no call in %g s; it is ended all the same", PATIENCE_S)
        while not _asked.empty():
            _asked.get()[0].cancel()


def _ensure_thread() -> None:
    with _beginning:
        _start_thread()


@functools.cache
def _start_thread() -> None:
    threading.Thread(target=_make_calls, name="ray", daemon=True).start()


def _make_calls() -> None:
    """Make the calls of Ray in the order of their requests, for ever; runs in a thread of its own."""
    while True:
        future, call = _asked.get()
        if not future.set_running_or_notify_cancel():
            continue  # its caller was cancelled
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        else:
            future.set_result(result)


def _log_failure(done: "Future[object]") -> None:
    if (error := done.exception()) is not None:
        log.error("a call of Ray failed: %s", error, exc_info=error)
