"""A look at the nodes of a plan for what a run needs. Called around a run, and by `laminar doctor`.

A small task on each node looks for the run folder, the model and shared memory; nothing is left there.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from laminar_py.config.engine import BACKENDS
from laminar_py.config.loading import parse_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.pools import check_pool
from laminar_py.records.codec import decode, encode
from laminar_py.runtime.cluster.backend import nodes, on_node
from laminar_py.runtime.cluster.errors import PartBugError, ProcessLostError, RemoteCallError
from laminar_py.runtime.cluster.placement import Needs, Placement, Plan
from laminar_py.runtime.preflight.inputs import MemoryShare, memory_fault
from laminar_py.runtime.preflight.memory import GPU_BYTES, gpu_memory, memory_faults, smallest_gpu
from laminar_py.runtime.preflight.room import room_fault, store_field

log = logging.getLogger(__name__)

LOOK_S = 60.0  # a process starts on the node for it


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """Findings on a node, e.g. `Sight(shared=True, model=True, shm_free=540 << 30)`."""

    shared: bool  # the file that the controller has just written
    model: bool
    shm_free: int | None  # bytes; None without that folder
    fault: str = ""  # why it cannot open what the config names, or start its engines and servers
    room: str | None = None  # why it cannot store responses


def look(witness: str, settings: str, store: str, serving: str, pools: str = "") -> bytes:
    """The `Sight` of this node; `settings` is the config as JSON.

    `store` is the field with the folder of its segments, `serving` is empty for a node without replicas, `pools`
    are those of `reward.servers` that have servers here, with commas between them.

    Reading the config opens the backend, the algorithm and the planner that it names, so their packages are here.
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
    room = room_fault(store, Path(tree[store]))
    seen, has_model = Path(witness).is_file(), (model / "config.json").is_file()
    return encode(Sight(shared=seen, model=has_model, shm_free=free, fault=fault, room=room))


async def place(config: RunConfig, *, resume: bool = False) -> Placement:
    """Place the parts of a run.

    Raises ConfigError if they do not fit on the cluster, if a joined node lacks something, or if they do not fit
    into GPUs that tell their size; a run to resume did fit once, whatever the formula says.
    """
    placement = Placement(Needs.of(config), nodes)
    if config.cluster.address is not None:
        for line in await faults(config, placement):
            raise ConfigError(line)
    if gpu_memory(config):
        for kind, told in (await gpu_bytes(gpu_nodes(placement.plan))).items():
            for line in memory_faults(config, gpu_bytes=told or GPU_BYTES, kinds=[kind]):
                if told and not resume:
                    raise ConfigError(line)
                log.warning("by an estimate this does not fit: %s", line)
    return placement


def gpu_nodes(plan: Plan) -> dict[str, set[str]]:
    """Nodes on which each kind of GPU of a plan is."""
    places = {"learner": plan.learner, "engine": plan.replicas}
    return {
        kind: {place.node for place in parts if place is not None and place.gpus and place.node is not None}
        for kind, parts in places.items()
    }


async def gpu_bytes(holders: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Bytes of the smallest GPU of the nodes of each kind, 0 where none of them tells."""
    asked = sorted({node for held in holders.values() for node in held})
    told = dict(zip(asked, await asyncio.gather(*map(_smallest_gpu, asked)), strict=True))
    return {kind: min((told[node] for node in held if told[node]), default=0) for kind, held in holders.items()}


async def _smallest_gpu(node: str) -> int:
    try:
        async with asyncio.timeout(LOOK_S):
            return decode(int, await on_node(node, smallest_gpu))
    except (ProcessLostError, TimeoutError):  # `faults` says what that node lacks
        return 0


async def clear(placement: Placement, folder: Path) -> None:
    """Delete a folder on every node that ever was in use; one that is gone, or does not answer, keeps it."""

    async def clear_on(node: str) -> None:
        with contextlib.suppress(ProcessLostError, TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await on_node(node, delete, str(folder))

    await asyncio.gather(*map(clear_on, placement.used))


def delete(folder: str) -> bytes:
    """Delete a folder of this host."""
    shutil.rmtree(folder, ignore_errors=True)
    return b""


async def faults(config: RunConfig, placement: Placement) -> list[str]:
    """Complaints, with field, value and remedy, of all that is missing somewhere; none if the run can start."""
    plan = placement.plan
    folder = next(path for path in (config.runs, *config.runs.parents) if path.is_dir())
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".laminar-") as witness:
        seen = str(folder / Path(witness.name).name)
        calls = [_faults_of(config, plan, node, placement.ip(node), seen) for node in sorted(plan.nodes)]
        return [line for lines in await asyncio.gather(*calls) for line in lines]


async def _faults_of(config: RunConfig, plan: Plan, node: str, ip: str, witness: str) -> list[str]:
    serving = "replica" if any(place is not None and place.node == node for place in plan.replicas) else ""
    launched = zip(config.reward.launched, plan.servers, strict=False)
    pools = ",".join({pool for (pool, _), place in launched if place is not None and place.node == node})
    try:
        async with asyncio.timeout(LOOK_S):
            settings = config.model_dump_json()
            answer = await on_node(node, look, witness, settings, store_field(config), serving, pools)
            sight = decode(Sight, answer)
    except (ProcessLostError, TimeoutError) as error:
        if isinstance(error, RemoteCallError) and error.is_bug:
            raise PartBugError(str(error)) from error  # the node is well, and our function is not
        reason = (str(error).strip().splitlines() or [f"no answer in {LOOK_S:g} s"])[-1]
        return [
            f"cluster.address={config.cluster.address}: node {ip} cannot run laminar_py ({reason}); install the"
            " environment of this machine there"
        ]
    lines = []
    if not sight.shared:
        lines.append(
            f"runs={config.runs}: node {ip} does not see what is written there; put the working directory and the"
            " run folder on a file system that all nodes share"
        )
    if not sight.model and config.data.prepare is None:
        lines.append(f"model.path={config.model.path}: no config.json in it on node {ip}; put the model there")
    if sight.fault:
        lines.append(f"{sight.fault} (on node {ip})")
    if sight.room is not None:
        lines.append(f"{sight.room} (on node {ip})")
    if sight.shm_free is None:
        lines.append(f"relay.shm={config.relay.shm}: no such folder on node {ip}; name one in shared memory")
    elif sight.model:
        fault = memory_fault(config, _share_of(plan, node), free=sight.shm_free, where=f" on node {ip}")
        lines += [fault] if fault is not None else []
    return lines


def _share_of(plan: Plan, node: str) -> MemoryShare:
    num_replicas = sum(place is not None and place.node == node for place in plan.replicas)
    return MemoryShare(plan.relays.count(node), num_replicas, has_root=plan.relays[0] == node)
