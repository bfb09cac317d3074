"""Places the parts of a run, inspects each node of a joined cluster, and runs the checks of installed packages."""

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from laminar_py.config.engine import BACKENDS
from laminar_py.config.loading import parse_config
from laminar_py.config.registry import installed_points
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.launch import check_pool
from laminar_py.records.codec import decode, encode
from laminar_py.runtime.cluster.backend import nodes, on_node
from laminar_py.runtime.cluster.errors import NoAnswerError, PartBugError, RemoteCallError
from laminar_py.runtime.cluster.placement import Needs, Placement, Plan
from laminar_py.runtime.preflight.inputs import MemoryShare, memory_fault, room_fault

log = logging.getLogger(__name__)

CHECKS = "laminar_py.run_checks"  # entry points, each a `RunCheck`
NODE_TIMEOUT_S = 60.0  # includes the start of a process on the node


RunCheck = Callable[[RunConfig, Placement], Awaitable[list[str]]]
"""Check of an installed package before a run's processes start. Returns an error line for each fault."""


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of `inspect_node`, e.g. `NodeReport(shared=True, model=True, shm_free=540 << 30)`."""

    shared: bool  # whether the node sees a file that the controller has just written
    model: bool  # whether the node sees the model's config.json
    shm_free: int | None  # bytes; None if the folder is missing
    fault: str = ""  # why the node cannot read the config, or start its engines and servers; "" if it can
    room: str | None = None  # why the node cannot store responses; None if it can


def inspect_node(witness: str, settings: str, serving: str, pools: str = "") -> bytes:
    """Inspect this node, and return an encoded `NodeReport`; `settings` is the config as JSON.

    `serving` is empty for a node without replicas. `pools` are the pools of `reward.servers` with servers here,
    separated by commas. Reading the config imports the backend, the algorithm and the planner that it names, so it
    also checks that their packages are installed.
    """
    tree = json.loads(settings)
    model, shm, fault = Path(tree["model"]["path"]), Path(tree["relay"]["shm"]), ""
    try:
        config = parse_config(tree)
        kind = config.rollout.engine.kind
        if serving:
            with BACKENDS.naming_package(kind):
                BACKENDS.get(kind).check_node(config)
        for pool in filter(None, pools.split(",")):
            check_pool(config.reward, pool)
    except ConfigError as error:
        fault = str(error)
    free = shutil.disk_usage(shm).free if shm.is_dir() else None
    room = room_fault(Path(tree["runs"]))
    seen, has_model = Path(witness).is_file(), (model / "config.json").is_file()
    return encode(NodeReport(shared=seen, model=has_model, shm_free=free, fault=fault, room=room))


async def place_parts(config: RunConfig, *, resume: bool = False) -> Placement:
    """Place the parts of a run, check the nodes of a joined cluster, and call the checks of installed packages.

    Raises ConfigError if the parts do not fit on the cluster, if a joined node lacks something, or if a check
    finds a fault. Faults of checks are warnings for a run to `resume`, which has run with these settings before.
    """
    placement = Placement(Needs.from_config(config), nodes)
    if config.cluster.address is not None:
        for line in await node_faults(config, placement):
            raise ConfigError(line)
    for point in installed_points(CHECKS):
        check: RunCheck = point.load()
        for line in await check(config, placement):
            if not resume:
                raise ConfigError(line)
            log.warning("the run resumes although a check of an installed package failed: %s", line)
    return placement


async def delete_everywhere(placement: Placement, folder: Path) -> None:
    """Delete a folder on every node that the run ever used; skip a node that does not answer."""

    async def clear_on(node: str) -> None:
        with contextlib.suppress(NoAnswerError, TimeoutError):
            async with asyncio.timeout(NODE_TIMEOUT_S):
                await on_node(node, delete_folder, str(folder))

    await asyncio.gather(*map(clear_on, placement.used))


def delete_folder(folder: str) -> bytes:
    """Delete a folder of this host, also a missing one. Return no bytes, as `on_node` expects an answer."""
    shutil.rmtree(folder, ignore_errors=True)
    return b""


async def node_faults(config: RunConfig, placement: Placement) -> list[str]:
    """Inspect all nodes of the plan at once; return an error line for each requirement that a node lacks."""
    plan = placement.plan
    folder = next(path for path in (config.runs, *config.runs.parents) if path.is_dir())
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".laminar-") as witness:
        seen = str(folder / Path(witness.name).name)
        calls = [_faults_of_node(config, plan, node, placement.ip(node), seen) for node in sorted(plan.nodes)]
        return [line for lines in await asyncio.gather(*calls) for line in lines]


async def _faults_of_node(config: RunConfig, plan: Plan, node: str, ip: str, witness: str) -> list[str]:
    """Inspect a node, and return an error line for each thing that it lacks; one line if it does not answer.

    Raises `PartBugError` if `inspect_node` itself fails there.
    """
    serving = "replica" if any(place is not None and place.node == node for place in plan.replicas) else ""
    launched = zip(config.reward.launched, plan.servers, strict=False)
    pools = ",".join({pool for (pool, _), place in launched if place is not None and place.node == node})
    try:
        async with asyncio.timeout(NODE_TIMEOUT_S):
            settings = config.model_dump_json()
            answer = await on_node(node, inspect_node, witness, settings, serving, pools)
            report = decode(NodeReport, answer)
    except (NoAnswerError, TimeoutError) as error:
        if isinstance(error, RemoteCallError) and error.is_bug:
            raise PartBugError(str(error)) from error  # the node works, and `inspect_node` has a bug
        reason = (str(error).strip().splitlines() or [f"no answer in {NODE_TIMEOUT_S:g} s"])[-1]
        return [
            f"cluster.address={config.cluster.address}: node {ip} cannot run laminar_py ({reason}); install the"
            " environment of this machine there"
        ]
    lines = []
    if not report.shared:
        lines.append(
            f"runs={config.runs}: node {ip} does not see files written there; put the working directory and the"
            " run folder on a file system that all nodes share"
        )
    if not report.model and config.data.prepare is None:
        lines.append(f"model.path={config.model.path}: no config.json in it on node {ip}; put the model there")
    if report.fault:
        lines.append(f"{report.fault} (on node {ip})")
    if report.room is not None:
        lines.append(f"{report.room} (on node {ip})")
    if report.shm_free is None:
        lines.append(f"relay.shm={config.relay.shm}: no such folder on node {ip}; name one in shared memory")
    elif report.model:
        fault = memory_fault(config, _share_of(plan, node), free=report.shm_free, where=f" on node {ip}")
        lines += [fault] if fault is not None else []
    return lines


def _share_of(plan: Plan, node: str) -> MemoryShare:
    num_replicas = sum(place is not None and place.node == node for place in plan.replicas)
    return MemoryShare(plan.relays.count(node), num_replicas, has_root=plan.relays[0] == node)
