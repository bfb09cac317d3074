"""Checks of `laminar doctor`: this machine, and places for a config on a real or a pretended cluster."""

import asyncio
import importlib.metadata
import importlib.util
import logging
import os
import resource
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from itertools import count, groupby
from pathlib import Path

from laminar_lab.doctor.cpu_memory import CpuMemory, cpu_faults, cpu_memory
from laminar_lab.doctor.memory import (
    ALL_KINDS,
    GPU_BYTES,
    GpuMemory,
    gpu_memory,
    host_memory,
    memory_faults,
    memory_warnings,
    shard_advice,
    smallest_gpu,
)
from laminar_lab.doctor.problem_figures import leaks_of
from laminar_lab.gpus import Gpu, read_group
from laminar_lab.plan.known_models import shape_at
from laminar_py.config import ConfigError, RunConfig
from laminar_py.records.codec import decode
from laminar_py.records.host import Finding, counted
from laminar_py.runtime.cluster import (
    Needs,
    NoAnswerError,
    Node,
    NodeSlot,
    Placement,
    Plan,
    nodes,
    on_node,
    open_cluster,
)
from laminar_py.runtime.preflight import NODE_TIMEOUT_S, check_engine, check_functions, check_model, node_faults

log = logging.getLogger(__name__)

GROUP = "laminar_py.findings"  # entry points of installed packages, each a function that returns a `Finding`
FILES_WANTED = 4096
SHM_WANTED = 1 << 30

Holders = Mapping[str, Collection[str]]
"""Nodes with GPUs of a plan, by kind of part."""
CORES_A_GPU = 12  # of a node with GPUs; placement asks only how nodes compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a config fits a cluster."""

    nodes: list[Node]  # of the cluster, or pretended
    memory: list[GpuMemory]  # by kind of part
    rows: list[tuple[str, str, str]]  # parts, address of their node, GPUs
    warnings: list[str]  # advice for a config that runs
    faults: list[str]  # errors that keep the config from running
    unplaced: ConfigError | None = None  # why its parts have no place
    cpu_memory: Sequence[CpuMemory] = ()  # of a run on the cores of this machine


def fit(config: RunConfig, *, gpu_bytes: float | None = None) -> Fit:
    """Place a config's parts on its cluster, and compute the memory of their GPUs.

    `gpu_bytes` is by default the size of the smallest GPU that each kind of part is placed on, or 80 GB if no node
    reports one.
    """
    with open_cluster(config.cluster.address):
        found = _fit(
            config,
            nodes,
            gpu_bytes=gpu_bytes,
            find_smallest=lambda held: asyncio.run(smallest_gpus(held)),
            find_faults=lambda placement: asyncio.run(node_faults(config, placement)),
        )
    warnings, faults = cpu_faults(config, memory=host_memory())
    return replace(
        found, cpu_memory=cpu_memory(config), warnings=found.warnings + warnings, faults=found.faults + faults
    )


def fit_pretended(config: RunConfig, cluster: "PretendedCluster", *, gpu_bytes: float | None = None) -> Fit:
    """Place a config's parts on a pretended cluster, whose nodes are not checked.

    `gpu_bytes` is by default the size in the catalog.
    """
    fault = model_fault(config)
    found = _fit(
        cluster.joined(config),
        lambda: list(cluster.nodes),
        gpu_bytes=gpu_bytes,
        find_smallest=cluster.gpu_bytes,
        find_faults=lambda placement: [] if fault is None else [fault],
    )
    return replace(found, warnings=cluster.warnings(config) + found.warnings)


def _fit(
    config: RunConfig,
    list_nodes: Callable[[], list[Node]],
    *,
    gpu_bytes: float | None,
    find_smallest: Callable[[Holders], Mapping[str, float]],
    find_faults: Callable[[Placement], list[str]],
) -> Fit:
    """Fit a config to the nodes of `list_nodes`, with their smallest GPUs and the faults found on them."""
    needs, seen = Needs.from_config(config), list_nodes()
    try:
        placement, unplaced = Placement(needs, list_nodes), None
        held = gpu_nodes(placement)
    except ConfigError as error:
        placement, unplaced = None, error
        held = {kind: {node.id for node in seen if node.gpus} for kind in ALL_KINDS}
    memory, found, warnings = [], [], []
    for kind, smallest in find_smallest(held).items():
        size = gpu_bytes or smallest or GPU_BYTES
        memory += gpu_memory(config, gpu_bytes=size, kinds=[kind])
        found += memory_faults(config, gpu_bytes=size, kinds=[kind])
        warnings += memory_warnings(config, gpu_bytes=size, kinds=[kind])
        if placement is not None and kind == "learner":
            warnings += shard_advice(config, [place.node for place in placement.plan.learner], gpu_bytes=size)
    if placement is None:
        return Fit(nodes=seen, memory=memory, rows=[], warnings=warnings, faults=found, unplaced=unplaced)
    found += find_faults(placement)
    try:
        check_functions(config)
        if (config.model.path / "config.json").is_file():  # else `data.prepare` makes it later
            check_model(config, needs_weights=False)
            check_engine(config)
    except ConfigError as error:
        if not any(line.startswith(str(error)) for line in found):
            found.append(str(error))
    rows = [(parts, placement.ip(node), gpus) for parts, node, gpus in _rows(needs, placement.plan)]
    warnings += _warnings(needs, seen) + leaks_of(config)
    return Fit(nodes=seen, memory=memory, rows=rows, warnings=warnings, faults=found)


def gpu_nodes(placement: Placement) -> dict[str, set[str]]:
    """Return the nodes with GPUs for learner, engines and stages."""
    plan = placement.plan
    places: dict[str, Sequence[NodeSlot | None]] = {"learner": plan.learner, "engine": plan.replicas}
    places |= {str(stage): [place] for (stage, _), place in zip(placement.needs.stages, plan.stages, strict=True)}
    return {
        kind: {place.node for place in parts if place is not None and place.gpus and place.node is not None}
        for kind, parts in places.items()
    }


async def smallest_gpus(holders: Mapping[str, Collection[str]]) -> dict[str, int]:
    """Return the bytes of the smallest GPU among the nodes of each kind; 0 if no node reports one."""
    asked = sorted({node for held in holders.values() for node in held})
    sizes = dict(zip(asked, await asyncio.gather(*map(_smallest_gpu, asked)), strict=True))
    return {kind: min((sizes[node] for node in held if sizes[node]), default=0) for kind, held in holders.items()}


async def gpu_faults(config: RunConfig, placement: Placement) -> list[str]:
    """Return the memory formula's error lines for a placed run, by the sizes that its nodes report.

    `laminar train` refuses a run for them. If no node of a kind reports a size, the formula assumes 80 GB, and its
    lines are only logged.
    """
    if not gpu_memory(config):
        return []
    faults: list[str] = []
    for kind, size in (await smallest_gpus(gpu_nodes(placement))).items():
        lines = memory_faults(config, gpu_bytes=size or GPU_BYTES, kinds=[kind])
        if size:
            faults += lines
            continue
        for line in lines:
            log.warning("by an estimate this does not fit: %s", line)
    return faults


async def _smallest_gpu(node: str) -> int:
    try:
        async with asyncio.timeout(NODE_TIMEOUT_S):
            return decode(int, await on_node(node, smallest_gpu))
    except (NoAnswerError, TimeoutError):  # `node_faults` reports that node
        return 0


def _rows(needs: Needs, plan: Plan) -> list[tuple[str, str, str]]:
    """Return (parts, node, GPUs); neighbours of a kind on one node share a row."""
    places = {
        "learner": [(place.node, place.gpus) for place in plan.learner],
        "replica": [(place.node, place.gpus) for place in plan.replicas if place is not None],
        "relay": [(node, 0) for node in plan.relays],
    }
    for (stage, gpus), place in zip(needs.stages, plan.stages, strict=True):
        assert place is not None, "a first plan has no gaps"
        places[str(stage)] = [(place.node, gpus)]
    for (pool, gpus), place in zip(needs.servers, plan.servers, strict=True):
        assert place is not None, "a first plan has no gaps"
        places.setdefault(f"server-{pool}", []).append((place.node, gpus))
    rows = []
    for kind, parts in places.items():
        for (node, gpus), group in groupby(enumerate(parts), key=lambda part: part[1]):
            indices = [index for index, _ in group]
            names = f"{kind}-{indices[0]}" + (f" to {indices[-1]}" if len(indices) > 1 else "")
            assert node is not None, "a first plan has no gaps"
            rows.append((names, node, f"{gpus} each" if gpus and len(indices) > 1 else str(gpus or "-")))
    return rows


def _warnings(needs: Needs, seen: Sequence[Node]) -> list[str]:
    """Return lines on GPUs that the plan leaves idle, or that Ray may give away twice."""
    learner, rollout = needs.ranks * needs.rank_gpus, (needs.replicas - needs.shared) * needs.replica_gpus
    idle = sum(node.gpus for node in seen) - learner - rollout - needs.stage_gpus - needs.server_gpus
    lines = []
    if needs.hosts and needs.rank_gpus:
        lines.append(
            f"Ray does not know which GPUs the servers in {needs.placed_by} hold; leave them out of `ray start"
            " --num-gpus`, or the learner may be given one"
        )
    if needs.hosts and not needs.rank_gpus and idle > 0:
        lines.append("the learner runs on CPUs; cluster.learner_device=cuda gives it GPUs")
    elif learner + rollout and idle > 0:
        lines.append(f"{counted(idle, 'GPU')} idle; raise rollout.replicas to use them")
    return lines


def examine() -> list[Finding]:
    """Return all findings on this machine."""
    found = [point.load()() for point in entry_points(group=GROUP)]
    return [_machine(), _shared_memory(), _files(), *found, _torch(), _gpu(), *_optional()]


def _machine() -> Finding:
    cores, memory = os.cpu_count() or 1, host_memory()
    good = cores >= 2 and memory >= 6 << 30
    remedy = "" if good else "the quickstart wants two cores and 6 GiB"
    return Finding("machine", f"{counted(cores, 'core')}, {memory / 2**30:.0f} GiB", good, remedy)


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Finding("shared memory", "no /dev/shm", False, "mount a tmpfs and name it in relay.shm")
    free = shutil.disk_usage(path).free
    remedy = "" if free >= SHM_WANTED else "enlarge it (docker run --shm-size=8g), or name another in relay.shm"
    return Finding("shared memory", f"{free / 2**30:.1f} GiB free in {path}", free >= SHM_WANTED, remedy)


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "" if soft >= FILES_WANTED else f"ulimit -n {min(hard, 65536)}"
    return Finding("open files", f"{soft} allowed", soft >= FILES_WANTED, remedy)


def _torch() -> Finding:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS", "not set")
    return Finding("torch", f"{torch.__version__} (OMP_NUM_THREADS {threads}; parts compute on one thread)", True)


def _gpu() -> Finding:
    import torch

    if not torch.cuda.is_available():
        return Finding("GPU", "none", True, "not needed for the quickstart; the embedded engine runs on CPU")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Finding("GPU", f"{names}; CUDA {torch.version.cuda}", True)


def _optional() -> list[Finding]:
    """Return findings on optional packages, each with its version or with the command that installs it."""
    wanted = {
        "flash_attn": "pip install --no-build-isolation laminar-py[flash-attn] (CUDA only)",
        "sglang": "pip install laminar-py[sglang], or sglang in an environment of its own (rollout on GPUs)",
    }
    findings = []
    for module, remedy in wanted.items():
        present = importlib.util.find_spec(module) is not None
        state = importlib.metadata.version(module.replace("_", "-")) if present else "not installed"
        findings.append(Finding(module, state, present, "" if present else remedy))
    return findings


# ---- a pretended cluster


@dataclass(frozen=True, slots=True)
class PretendedCluster:
    """Nodes with the kind of their GPUs, for `laminar doctor --pretend`.

    E.g. `pretended_cluster(["3x8xH100", "1x64xcpu"])`.
    """

    nodes: tuple[Node, ...]  # the controller's first
    gpus: Mapping[str, Gpu]  # by node, where it has GPUs

    def gpu_bytes(self, holders: Mapping[str, Collection[str]]) -> dict[str, float]:
        """Return the bytes of the smallest GPU among the nodes of each kind; 0 if it has no nodes."""
        return {
            kind: min((self.gpus[node].memory_bytes for node in held), default=0.0)
            for kind, held in holders.items()
        }

    def joined(self, config: RunConfig) -> RunConfig:
        """Return the config of a run on this cluster. Raises `ConfigError` if it names running servers."""
        needs = Needs.from_config(config)
        if needs.hosts:
            raise ConfigError(
                f"{needs.placed_by}: names servers that run, and no host of a pretended cluster has them; leave it"
                " out"
            )
        cluster = config.cluster.model_copy(update={"address": config.cluster.address or "auto"})
        return config.model_copy(update={"cluster": cluster})

    def warnings(self, config: RunConfig) -> list[str]:
        """Return warnings about settings that keep a run from using all nodes."""
        if config.cluster.address is not None or len(self.nodes) == 1:
            return []
        return [
            f"cluster.address is not set, so that a run has one node and not {len(self.nodes)}; set it to auto on"
            " a node of the cluster"
        ]


def pretended_cluster(texts: Sequence[str]) -> PretendedCluster:
    """Read groups of nodes such as `3x8xH100` or `2x64xcpu`, separated by commas.

    A group is nodes x GPUs of each x their kind, or nodes x cores of each x cpu. Raises `ConfigError`.
    """
    nodes: list[Node] = []
    gpus: dict[str, Gpu] = {}
    indices = count()
    for text in (group for joined in texts for group in joined.split(",")):
        group = read_group(text, option="--pretend")
        for _ in range(group.nodes):
            name = f"node-{next(indices)}"
            num_gpus, cores = (0, group.each) if group.gpu is None else (group.each, group.each * CORES_A_GPU)
            nodes.append(Node(id=name, ip=name, gpus=num_gpus, cpus=cores, here=not nodes))
            if group.gpu is not None:
                gpus[name] = group.gpu
    return PretendedCluster(tuple(nodes), gpus)


def model_fault(config: RunConfig) -> str | None:
    """Return an error line if a model's config.json is missing, so that its memory is unknown, else None."""
    path = config.model.path
    if shape_at(path) is not None or (path / "config.json").is_file():
        return None
    if config.data.prepare is not None or config.rollout.engine.emulates:
        return None
    return (
        f"model.path={path}: no config.json in it, which tells what its GPUs hold; put the model's there, or name"
        " its size, e.g. --model 7B"
    )
