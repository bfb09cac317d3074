"""Ray: starting a local cluster or joining one, seeing its nodes, spawning parts, calling them with a limit.

The only callers of Ray are this module and `runtime.actors`. Calls go to actors as bytes; whatever goes wrong
with a part (its process died, it hangs, it raised) becomes one `PartDiedError`, which the supervisor handles.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.codec import encode
from laminar_py.relay.stored import NoRoomError
from laminar_py.runtime import WORKERS_READ, use_token_of_cluster
from laminar_py.runtime.actors import remote
from laminar_py.runtime.errors import PartDiedError
from laminar_py.runtime.placement import Node, Place
from laminar_py.section import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
CONNECT_S = 5.0
ANYWHERE = Place()


class Part:
    """A running actor, e.g. `Part("replica-1", ReplicaActor, concurrency=64, timeout_s=30)` on any node."""

    def __init__(
        self, name: str, kind: type, *, concurrency: int, timeout_s: float, place: Place = ANYWHERE
    ) -> None:
        self.name = name
        self.place = place
        self._timeout_s = timeout_s
        self._handle = remote(kind, concurrency=concurrency, place=place).remote()

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """The result of an actor method.

        Raises PartDiedError if there is none in `timeout_s` or it raised; ConfigError where that was bad input.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        reference = getattr(self._handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            self.kill()
            raise PartDiedError(self.name, f"no answer to {method} in {limit:g} s") from None
        except RayTaskError as error:
            self.kill()
            cause = _first(error.cause)
            log.error("%s.%s raised", self.name, method, exc_info=cause)
            # bad input that only the part could see: a model it cannot run, a port or memory it does not get
            if isinstance(cause, NoRoomError) or (isinstance(cause, ValueError) and method == "start"):
                raise ConfigError(str(cause)) from None
            raise PartDiedError(self.name, f"{type(cause).__name__}: {cause}") from error
        except RayError as error:
            self.kill()
            raise PartDiedError(self.name, _reason(error)) from error

    def send(self, method: str, *arguments: object) -> None:
        """Call without waiting; a death shows at the next `call`, what the method raised in the log."""
        future = getattr(self._handle, method).remote(*arguments).future()
        future.add_done_callback(lambda done: self._log_failure(method, done.exception()))

    def _log_failure(self, method: str, error: BaseException | None) -> None:
        if isinstance(error, RayTaskError):
            log.error("%s.%s raised", self.name, method, exc_info=error)

    def kill(self) -> None:
        """End its process."""
        with contextlib.suppress(RayError):
            ray.kill(self._handle)


async def watched(work: Coroutine[object, object, T], watch: Coroutine[object, object, None]) -> T:
    """The result of `work`, which has no limit of its own; `watch` beside it never ends but by an error."""
    working, watching = asyncio.create_task(work, name="work"), asyncio.create_task(watch, name="watch")
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


@contextlib.contextmanager
def open_cluster(address: str | None) -> Iterator[None]:
    """The Ray cluster at `cluster.address`, or one of this machine alone if that is None.

    What the run started there ends with it; a cluster that it joined goes on. Raises ConfigError if there is none.
    """
    with _local() if address is None else _joined(address):
        yield


@contextlib.contextmanager
def _local() -> Iterator[None]:
    """A Ray cluster of one node on loopback with token authentication, ended with everything in it."""
    ray.init(
        address="local",  # whatever RAY_ADDRESS says
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=128 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    session = Path(ray._private.worker._global_node.get_session_dir_path())
    try:
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    use_token_of_cluster()
    folder = os.getcwd()

    def enter() -> None:
        with contextlib.suppress(OSError):  # a node that lacks it is found by `runtime.survey`
            os.chdir(folder)

    try:
        if address != "auto":  # where nobody listens, Ray itself takes a minute to find out
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
        yield
    finally:
        ray.shutdown()


def nodes() -> list[Node]:
    """The live nodes of the cluster, with the GPUs that are free: the controller's first, then by address."""
    here = ray.get_runtime_context().get_node_id()
    free = ray._private.state.available_resources_per_node()
    found = [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            here=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (not node.here, node.ip, node.id))


async def on_node(node: str, function: Callable[..., bytes], *arguments: str) -> bytes:
    """What a function of this package answers on that node, in a process there. Raises RayError."""
    if node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *arguments)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function)
    answer = await asyncio.wrap_future(task.remote(*arguments).future())
    assert isinstance(answer, bytes)
    return answer


def free_port(ip: str) -> bytes:
    """A port that this host can listen on."""
    with socket.create_server((ip, 0)) as probe:
        return encode(probe.getsockname()[1])


def _first(error: BaseException) -> BaseException:
    """The first error inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: RayError) -> str:
    """The first sentence of what Ray says last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(". ")[0] if lines else type(error).__name__
