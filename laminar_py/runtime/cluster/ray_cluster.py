"""Ray: starting a local cluster or joining one, seeing its nodes, running a function on one of them."""

import asyncio
import contextlib
import functools
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import encode
from laminar_py.runtime.cluster import WORKERS_READ, use_token_of_cluster
from laminar_py.runtime.cluster.errors import RunFailedError
from laminar_py.runtime.cluster.placement import Node
from laminar_py.runtime.cluster.ray_thread import drain, made, soon, tell

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
GCS_START_S = 60.0  # of the first of Ray's processes, of which nobody hears if it dies
START_S = 180.0  # of Ray on this machine, which other work may hold up
LOW = 10  # priority, as `nice` has it
LOOK_S = 0.1  # between two looks for its node
RAY_LOGS = Path(tempfile.gettempdir()) / "ray/session_latest/logs"


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
    try:
        with _patient_on_loopback():
            context = ray.init(
                address="local",  # whatever RAY_ADDRESS says
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=128 * 2**20,
                _node_ip_address=LOOPBACK,
            )
    except Exception as error:  # noqa: BLE001 - Ray raises that very class, too
        reason = " ".join(str(error).split()).split(". ")[0]
        raise RunFailedError(
            f"Ray does not start on this machine ({reason}); see {RAY_LOGS}, end what takes its memory or its"
            " cores, or start it yourself (`ray start --head`) and set cluster.address=auto"
        ) from None
    session = Path(context.address_info["session_dir"])
    try:
        yield
    finally:
        drain()
        ray.shutdown()
        shutil.rmtree(session, ignore_errors=True)


@contextlib.contextmanager
def _patient_on_loopback() -> Iterator[None]:
    """Have Ray take the loopback address as it is, and wait longer for its own processes than 30 s.

    Otherwise it puts an address in its place that others reach, and listens on all interfaces. It says neither by
    an argument nor, for the second, by a variable.
    """
    constants, services = ray._private.ray_constants, ray._private.services
    clusters, get_node = constants.ENABLE_RAY_CLUSTER, services.get_node
    deadline = time.monotonic() + START_S

    def wait_for_node(gcs_address: str, node_id: str) -> object:
        while True:
            try:
                return get_node(gcs_address, node_id)
            except RuntimeError:  # it has not registered yet
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_S)

    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", f"{GCS_START_S:.0f}")
    constants.ENABLE_RAY_CLUSTER, services.get_node = False, wait_for_node
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER, services.get_node = clusters, get_node


@contextlib.contextmanager
def _joined(address: str) -> Iterator[None]:
    use_token_of_cluster()
    folder = os.getcwd()

    def enter() -> None:
        with contextlib.suppress(OSError):  # a node that lacks it is found by `preflight.survey`
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
        drain()
        ray.shutdown()


def nodes(*, taken: bool = False) -> list[Node]:
    """The live nodes of the cluster, with the GPUs that are free: the controller's first, then by address.

    With `taken` also with those that somebody has.
    """
    here = ray.get_runtime_context().get_node_id()
    free = ray._private.state.available_resources_per_node()  # public calls tell only the sum over all nodes
    found = [
        Node(
            id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            gpus=int((node["Resources"] if taken else free.get(node["NodeID"], {})).get("GPU", 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            here=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (not node.here, node.ip, node.id))


async def all_placed() -> bool:
    """True once every process that this one started, or is about to, has what it asked for, or has died."""
    return await made(_all_placed)


def _all_placed() -> bool:
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    states = {part["State"] for part in ray._private.state.actors(job_id=job).values()}
    return states <= {"ALIVE", "DEAD"}


async def on_node(
    node: str, function: Callable[..., bytes], *arguments: str | bytes, apart: bool = False
) -> bytes:
    """Answer of a function of this package on that node, from a process there. Raises RayError.

    The process ends where nobody waits for the answer any more. On this node it is a thread, which answers sooner,
    unless it is to be `apart`: for work that would burden this process, and leaves the cores to others.
    """
    if not apart and node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *arguments)
    begun = soon(_begin, node, function, arguments, apart)
    try:
        reference = await asyncio.wrap_future(begun)  # its caller has a limit
        answer = await asyncio.wrap_future(reference.future())
    except asyncio.CancelledError:
        if not begun.cancel():
            tell(lambda: ray.cancel(begun.result(), force=True))
        raise
    assert isinstance(answer, bytes)
    return answer


def _begin(
    node: str, function: Callable[..., bytes], arguments: Sequence[str | bytes], low: bool
) -> "ray.ObjectRef":
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    name = getattr(function, "__name__", "on_node")
    task = _ray_task().options(name=name, num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    return task.remote(function, *arguments, low=low)


@functools.cache
def _ray_task() -> "ray.remote_function.RemoteFunction":
    return ray.remote(_run)


def _run(function: Callable[..., bytes], *arguments: str | bytes, low: bool) -> bytes:
    """Answer of a function; with `low` of a thread of low priority, as the process goes on with other work."""
    if not low:
        return function(*arguments)

    def lower() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW)

    with ThreadPoolExecutor(1, initializer=lower) as thread:
        return thread.submit(function, *arguments).result()


def free_port(ip: str) -> bytes:
    """A port that this host can listen on."""
    with socket.create_server((ip, 0)) as listener:
        return encode(listener.getsockname()[1])
