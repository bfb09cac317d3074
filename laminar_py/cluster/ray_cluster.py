"""Ray: starting a local cluster or joining one, seeing its nodes, running a function on one of them."""

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.cluster import WORKERS_READ, use_token_of_cluster
from laminar_py.cluster.placement import Node
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import encode

CONNECT_S = 5.0


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
    context = ray.init(
        address="local",  # whatever RAY_ADDRESS says
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=128 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    session = Path(context.address_info["session_dir"])
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
        ray.shutdown()


def nodes() -> list[Node]:
    """The live nodes of the cluster, with the GPUs that are free: the controller's first, then by address."""
    here = ray.get_runtime_context().get_node_id()
    free = ray._private.state.available_resources_per_node()  # public calls tell only the sum over all nodes
    found = [
        Node(
            id=node["NodeID"],
            ip=node["NodeManagerAddress"],
            gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            here=node["NodeID"] == here,
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (not node.here, node.ip, node.id))


async def on_node(node: str, function: Callable[..., bytes], *arguments: str) -> bytes:
    """Answer of a function of this package on that node, from a process there. Raises RayError."""
    if node == ray.get_runtime_context().get_node_id():
        return await asyncio.to_thread(function, *arguments)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function)
    answer = await asyncio.wrap_future(task.remote(*arguments).future())
    assert isinstance(answer, bytes)
    return answer


def free_port(ip: str) -> bytes:
    """A port that this host can listen on."""
    with socket.create_server((ip, 0)) as listener:
        return encode(listener.getsockname()[1])
