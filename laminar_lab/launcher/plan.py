"""Everything before the first start: checks of the runs, slots with their GPUs, and the output of `--dry-run`.

No GPU belongs to two slots. On one host a run sees the GPUs of its slot alone. On a cluster that runs join, Ray
counts the GPUs.
"""

import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from laminar_lab.launcher.experiment import Experiment
from laminar_lab.launcher.standing import (
    RunState,
    Standing,
    assign_slots,
    experiment_left,
    format_duration,
    in_turn,
    known_paces,
    read_standings,
    seconds_left,
)
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.loading import to_overrides
from laminar_py.runtime.cluster import Needs, Node, Plan, make_plan
from laminar_py.runtime.preflight import TELL_S, check_inputs, check_shared_memory

SEEN = "CUDA_VISIBLE_DEVICES"
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


def check_runs(experiment: Experiment, *, at_once: int) -> list[Path]:
    """Check what `laminar train` checks, once for each variant with runs ahead; the scripts that made their files.

    Seeds share all of it, and the `at_once` runs side by side then find their files made. Raises `ConfigError`.
    """
    ahead = [one.run for one in read_standings(experiment) if one.state is not RunState.FINISHED]
    first = {run.variant: run for run in reversed(ahead)}
    for variant, run in first.items():
        try:
            check_inputs(run.config)
            if run.config.cluster.address is None:
                check_shared_memory(run.config, runs=min(at_once, len(ahead)))
        except ConfigError as error:
            raise ConfigError(f"variant {variant}: {error}") from None
    scripts = (run.config.data.prepare for run in first.values())
    return list(dict.fromkeys(script for script in scripts if script is not None))


def plan_rows(
    experiment: Experiment, standings: Sequence[Standing], slots: Sequence[Slot]
) -> Iterator[RenderableType]:
    """A line on the whole, a row for each run, and the time by what is known of speed."""
    address = experiment.runs[0].config.cluster.address
    where = "on this machine" if address is None else f"on the Ray cluster {address}"
    gpus = max(run.config.gpus for run in experiment.runs)
    each = f", {gpus} GPUs each" if gpus else ", without GPUs"
    yield Text(
        f"{experiment.settings.name}: {len(experiment.runs)} runs of {len(experiment.variants)} variants,"
        f" {len(slots)} at a time {where}{each}; in {experiment.runs[0].config.runs}"
    )
    if common := experiment.settings.set:
        yield Text(f"every run: {experiment.settings.base} with {' '.join(to_overrides(common))}")
    yield _variants(experiment)
    paces = known_paces(experiment, standings)
    yield _runs(standings, paces, slots)
    left_s = experiment_left(standings, paces, slots=len(slots))
    source = "by runs that have done steps" if paces else "no run of it, or of its base, has done a step yet"
    yield Text(f"RL left in all: {format_duration(left_s)} ({source}); starts and warm starts come on top")


def _runs(standings: Sequence[Standing], paces: dict[str, float], slots: Sequence[Slot]) -> Table:
    """How far each run is, and where it would go on, if all take as long as is known."""
    dealt = assign_slots(standings, paces, slots=len(slots))
    places = {one.run.name: slot for one, slot in zip(in_turn(standings), dealt, strict=True)}
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", no_wrap=True)
    for name in ("state", "steps", "RL left", "where"):
        table.add_column(name)
    for one in standings:
        left = format_duration(seconds_left(one, step_s=paces.get(one.run.variant)))
        index = places.get(one.run.name)
        told = "next free" if index is None else ", ".join(slots[index].words)
        where = told if one.run.name in places else "-"
        table.add_row(*map(Text, (one.run.name, one.state, f"{one.step}/{one.run.config.steps}", left, where)))
    return table


def _variants(experiment: Experiment) -> Table:
    """Settings of each variant beside those that all have in common."""
    common = to_overrides(experiment.settings.set)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("variant", no_wrap=True)
    table.add_column("settings")
    for run in {run.variant: run for run in experiment.runs}.values():
        own = " ".join(override for override in run.overrides if override not in common)
        table.add_row(Text(run.variant), Text(own or "-"))
    return table
