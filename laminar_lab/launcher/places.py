"""How many runs of an experiment go side by side, and which GPUs each gets. Called before anything starts.

Invariant: no GPU is given to two runs of this launcher. On one host a run sees no other GPUs than its own; on a
cluster that runs join, Ray's accounting keeps them apart.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_lab.launcher.begun import SEEN
from laminar_lab.launcher.experiment import Experiment
from laminar_py.config import ConfigError, RunConfig
from laminar_py.runtime.cluster import Needs, Node, Plan, make_plan
from laminar_py.runtime.preflight import TELL_S

MOST_SLOTS = 1024
IDLE_MIB = 2048  # of a GPU's memory, which a display or a driver may take


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a run at a time, e.g. `Slot(0, ("0", "1"))`."""

    index: int
    gpus: tuple[str, ...] | None  # as in CUDA_VISIBLE_DEVICES; None where Ray or nobody hands out any

    @property
    def place(self) -> int:
        """Number of the place where its runs may fail; all slots without GPUs of their own are one."""
        return self.index if self.gpus else 0

    @property
    def words(self) -> list[str]:
        """Words on it, e.g. `["slot 0", "GPU 0,1"]`."""
        return [f"slot {self.index}", *filter(None, [self.told])]

    @property
    def told(self) -> str:
        """Words on its GPUs, "" without any."""
        return f"GPU {','.join(self.gpus)}" if self.gpus else ""


def make_slots(experiment: Experiment) -> list[Slot]:
    """Places of the runs that go side by side; on a cluster also those on GPUs that others have at the moment.

    Raises `ConfigError` if there is too little room.
    """
    configs = list({run.variant: run.config for run in experiment.runs}.values())
    addresses = {config.cluster.address for config in configs}
    if len(addresses) > 1:
        raise ConfigError(
            f"cluster.address={', '.join(map(str, addresses))}: runs of an experiment share one; set the same"
        )
    wanted, joined = experiment.settings.parallel, addresses != {None}
    gpus = [] if joined else [name for name in host_gpus() if name not in busy_gpus(experiment)]
    here = [Node(id="here", ip="", gpus=len(gpus))]
    room = _room(configs, _cluster_nodes(addresses.pop()) if joined else here)
    if wanted is not None and wanted > room:
        raise ConfigError(f"parallel={wanted}: {_limit(configs, room)}; lower it to {room}, or leave it out")
    needs_any = any(config.gpus for config in configs)
    count = min(wanted or (room if needs_any else 1), len(experiment.runs))
    if joined:
        return [Slot(index, None) for index in range(count)]
    each = max(config.gpus for config in configs)
    return [Slot(index, tuple(gpus[index * each : (index + 1) * each])) for index in range(count)]


def _room(configs: Sequence[RunConfig], nodes: Sequence[Node]) -> int:
    """Runs that find room at the same time, whichever variants they are of."""
    if any(config.rollout.engine.hosts or config.relay.base_port for config in configs):
        for config in configs:
            make_plan(Needs.from_config(config), nodes)
        return 1  # servers, or ports, that every run would take
    return min(_room_for(Needs.from_config(config), nodes) for config in configs)


def _room_for(needs: Needs, nodes: Sequence[Node]) -> int:
    """Runs of these needs that find room, placed one after another as they place themselves."""
    left, count = list(nodes), 0
    plan: Plan | None = make_plan(needs, left)  # raises if there is no room for one
    while plan is not None and count < MOST_SLOTS:
        taken = _gpus_by_node(plan)
        count = count + 1 if taken.total() else MOST_SLOTS
        left = [
            Node(id=node.id, ip=node.ip, gpus=node.gpus - taken[node.id], cpus=node.cpus, here=node.here)
            for node in left
        ]
        try:
            plan = make_plan(needs, left)
        except ConfigError:
            plan = None
    return count


def _gpus_by_node(plan: Plan) -> Counter[str]:
    places = filter(None, (*plan.learner, *plan.replicas, plan.reference, *plan.servers))
    taken = Counter[str]()
    for place in places:
        assert place.node is not None, "a plan names a node for every part"
        taken[place.node] += place.gpus
    return taken


def _limit(configs: Sequence[RunConfig], room: int) -> str:
    if any(config.rollout.engine.hosts or config.relay.base_port for config in configs):
        return "runs would share one server or port (rollout.engine.urls, relay.base_port)"
    return f"there is room for {room} at a time, each with {max(config.gpus for config in configs)} GPUs"


def host_gpus() -> list[str]:
    """GPUs of this host that its processes may see, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get(SEEN)
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    return [index for index, _ in _memory_in_use()]


def busy_gpus(experiment: Experiment) -> list[str]:
    """GPUs of this host that others use; none where the user chose them, or runs of this file may be those."""
    chosen = SEEN in os.environ or experiment.runs[0].config.cluster.address is not None
    if chosen or any(run.folder is not None and run.folder.is_led for run in experiment.runs):
        return []
    return [index for index, used in _memory_in_use() if used > IDLE_MIB]


def _memory_in_use() -> list[tuple[str, int]]:
    """Index of each GPU, and the MiB of its memory that somebody uses."""
    asked = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=TELL_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.replace(" ", "").split(",") for line in told.splitlines()]
    return [(index, int(used) if used.isdigit() else 0) for index, used in rows]


def _cluster_nodes(address: str | None) -> list[Node]:
    """Nodes with all of their GPUs, whoever has them."""
    from laminar_py.runtime.cluster import nodes, open_cluster

    with open_cluster(address):
        return nodes(taken=True)
