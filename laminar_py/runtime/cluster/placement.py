"""Places of a run's parts: which cluster node, and how many of its GPUs. A thread lists the nodes.

Called by the owners of the parts (relays, replicas, learner, frozen models, servers, scorers) when they start one,
and by `laminar doctor`. In a plan no GPU is promised twice, all GPUs of a part are on one node, the root relay is
beside learner rank 0, and every host with replicas has a relay (`tests/cluster/test_placement.py`). The cluster
chooses which GPUs of its node a part gets: it sets CUDA_VISIBLE_DEVICES in the part's process, to nothing if it
has none. A replica that shares devices with the learner (`cluster.share`) has no GPU in the plan: it is on the
node of the learner ranks whose GPUs it uses.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from laminar_py.config.cluster import Device
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import Source
from laminar_py.records.host import counted
from laminar_py.relay.tree import Topology
from laminar_py.runtime.cluster.errors import RunFailedError

log = logging.getLogger(__name__)

STAGE_WORDS = {  # the setting and the remedy of a frozen model without room
    Source.REFERENCE: ("algorithm.reference_pass=stage: it", "set it to learner, lower learner.world_size"),
    Source.TEACHER: ("algorithm.teacher: its model", "name the address of a server, lower learner.world_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live node of the cluster, e.g. `Node(id="5a97e58a", ip="10.0.0.4", gpus=8, cpus=96)`."""

    id: str
    ip: str
    gpus: int = 0  # free GPUs
    cpus: int = 1
    here: bool = False  # the controller runs on it


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """Place of a part: a node, None for any, and the number of its GPUs that only this part uses."""

    node: str | None = None
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Demand of a run on a cluster, e.g. `Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1)`."""

    ranks: int
    rank_gpus: int
    replicas: int  # present and past ones; their numbers are below this
    replica_gpus: int  # tensor-parallel, on one node
    shared: int = 0  # replicas, from 0 on, that use the GPUs of learner ranks
    relays: int = 1  # nodes of the tree if all parts are on one host
    hosts: tuple[str, ...] = ()  # [replicas] host of the server that a replica attaches to; empty: it starts one
    stages: tuple[tuple[Source, int], ...] = ()  # frozen models with a process each: GPUs, as many as a rank has
    servers: tuple[tuple[str, int], ...] = ()  # [servers] of the reward: pool, GPUs on one node
    placed_by: str = "rollout.engine"  # the setting that says how many GPUs replicas have, or which hosts
    gone: frozenset[int] = frozenset()  # replicas that have left

    @classmethod
    def from_config(cls, config: RunConfig) -> "Needs":
        """Return the demand of a config."""
        rollout, engine = config.rollout, config.rollout.engine
        return cls(
            ranks=config.learner.world_size,
            rank_gpus=1 if config.learner_device is Device.CUDA else 0,
            replicas=rollout.replicas,
            replica_gpus=0 if engine.hosts else engine.gpus,
            shared=config.shared_replicas if engine.gpus else 0,
            relays=config.relay.nodes,
            hosts=engine.hosts,
            placed_by=engine.placed_by,
            stages=_stages(config),
            servers=tuple((pool, config.reward.servers[pool].gpus) for pool, _ in config.reward.launched),
        )

    @property
    def server_gpus(self) -> int:
        """GPUs that all reward servers take."""
        return sum(gpus for _, gpus in self.servers)

    @property
    def stage_gpus(self) -> int:
        """GPUs that all frozen models with a process take."""
        return sum(gpus for _, gpus in self.stages)


def _stages(config: RunConfig) -> tuple[tuple[Source, int], ...]:
    """Return the frozen models of a run that have a process, and the GPUs of each."""
    algorithm, gpus = config.algorithm, 1 if config.learner_device is Device.CUDA else 0
    return tuple((stage, gpus if stage in algorithm.computing_stages else 0) for stage in algorithm.stages)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every part's place; relay 0 is the root.

    None stands for a replica or a server without room (after a crash, or in a fleet that grows), a replica that
    has left, and a relay that no replica needs.
    """

    learner: tuple[NodeSlot, ...]  # [ranks]
    replicas: tuple[NodeSlot | None, ...]  # [replicas]
    relays: tuple[str | None, ...]  # [relays] cluster node of each
    stages: tuple[NodeSlot | None, ...] = ()  # as in `Needs.stages`
    servers: tuple[NodeSlot | None, ...] = ()  # as in `Needs.servers`

    @cached_property
    def nodes(self) -> frozenset[str]:
        """Cluster nodes in use."""
        parts = (*self.learner, *self.replicas, *self.servers, *self.stages)
        places = (place.node for place in parts if place is not None)
        return frozenset(node for node in (*places, *self.relays) if node is not None)

    def relay_of(self, replica: int, tree: Topology) -> int:
        """Return the relay that a replica pulls from: its host's relay, or on a single host one of the leaves."""
        if len(set(self.relays)) == 1:
            return tree.node_of_replica(replica)
        place = self.replicas[replica]
        assert place is not None, f"replica {replica} has no place"
        return self.relays.index(place.node)


def make_plan(needs: Needs, nodes: Sequence[Node], *, keep: Plan | None = None) -> Plan:
    """Place all parts on `nodes`, which include the controller's.

    `keep` is an earlier plan, from which parts on live nodes keep their places; of a learner with other ranks, the
    first ones. If a node of the learner is gone, all ranks get new places, and so do the replicas that share their
    GPUs. In a first plan every part needs room.
    In a later plan replicas may have no place, and a server may have none if another of its pool has a place.
    Raises `ConfigError` if there are too few GPUs.
    """
    alive = {node.id for node in nodes}

    def if_alive(place: NodeSlot | None) -> NodeSlot | None:
        return place if place is not None and place.node in alive else None

    first = keep is None
    replicas: list[NodeSlot | None] = [None] * needs.replicas
    servers: list[NodeSlot | None] = [None] * len(needs.servers)
    learner: Sequence[NodeSlot] = ()
    stages: list[NodeSlot | None] = [None] * len(needs.stages)
    if keep is not None:
        for index, place in enumerate(keep.replicas):
            replicas[index] = None if index in needs.gone or index < needs.shared else if_alive(place)
        servers = [if_alive(place) for place in keep.servers] or servers
        learner = keep.learner[: needs.ranks] if all(map(if_alive, keep.learner)) else ()
        stages = [if_alive(place) for place in keep.stages] or stages
    room = _FreeGpus(needs, nodes)
    room.reserve([*replicas, *servers, *stages, *learner])
    added = room.place_ranks(needs.ranks - len(learner), beside={place.node for place in learner})
    room.reserve(added)
    learner = (*learner, *added)
    room.learner = learner
    room.place_stages(stages)
    room.place_servers(servers, first=first)
    room.place_replicas(replicas, first=first)
    return Plan(
        learner=learner,
        replicas=tuple(replicas),
        relays=place_relays(
            needs.relays,
            learner=[place.node for place in learner],
            hosts=[place.node for place in replicas if place is not None],
            alive=alive,
            before=keep.relays if keep else (),
        ),
        stages=tuple(stages),
        servers=tuple(servers),
    )


class _FreeGpus:
    """Counts the free GPUs of each node while `make_plan` places one part after the other."""

    def __init__(self, needs: Needs, nodes: Sequence[Node]) -> None:
        self.learner: Sequence[NodeSlot] = ()  # places of the ranks, once they have some
        self._needs = needs
        self._nodes = nodes
        self._free = Counter({node.id: node.gpus for node in nodes})
        self._residents = Counter[str]()  # parts on each node

    def reserve(self, places: Iterable[NodeSlot | None]) -> None:
        """Take the GPUs of these places."""
        for place in filter(None, places):
            assert place.node is not None, "a plan names a node for every part"
            self._free[place.node] -= place.gpus
            self._residents[place.node] += 1

    def place_ranks(self, count: int, *, beside: Collection[str | None] = ()) -> list[NodeSlot]:
        """Place more ranks on as few nodes as possible, so that few replicas lose room. Raises `ConfigError`."""
        needs, free = self._needs, self._free
        wanted, total = count * needs.rank_gpus, sum(free.values())
        if wanted > total:
            kind = "more GPU" if beside else "GPU"
            raise ConfigError(
                f"learner.world_size={needs.ranks}: needs {counted(wanted, kind)}, {total} are free on"
                f" {counted(len(self._nodes), 'node')};"
                " lower it, set cluster.learner_device=cpu, or join a cluster with more (cluster.address)"
            )
        chosen: list[NodeSlot] = []
        rest = sorted(self._nodes, key=lambda node: (node.id not in beside, -free[node.id]))
        while free[rest[0].id] < wanted - len(chosen):
            chosen += [NodeSlot(rest[0].id, 1)] * free[rest[0].id]
            rest = rest[1:]
        gpus = wanted - len(chosen)
        last = min(
            (node for node in rest if free[node.id] >= gpus),
            key=lambda node: (
                node.id not in beside,
                self._lost_replicas(node, gpus),
                not node.here,
                free[node.id],
            ),
        )
        return [*chosen, *[NodeSlot(last.id, needs.rank_gpus)] * (count - len(chosen))]

    def place_stages(self, places: list[NodeSlot | None]) -> None:
        """Fill the gaps in `places`, the places of frozen models. Raises `ConfigError` without room."""
        for index, (stage, gpus) in enumerate(self._needs.stages):
            if places[index] is None:
                places[index] = self.place_beside_replicas(gpus, *STAGE_WORDS[stage])
                self.reserve([places[index]])

    def place_servers(self, places: list[NodeSlot | None], *, first: bool) -> None:
        """Fill the gaps in `places`, the reward servers' places, as far as there is room.

        Raises `ConfigError` for a server without room if the plan is the `first`, or its whole pool has no place.
        """
        for index, (pool, gpus) in enumerate(self._needs.servers):
            if places[index] is None:
                setting = f"reward.servers.{pool}.gpus={gpus}: each server"
                try:
                    place = self.place_beside_replicas(gpus, setting, "lower gpus, count or learner.world_size")
                except ConfigError:
                    pools = zip(self._needs.servers, places, strict=True)
                    if first or not any(other == pool and placed for (other, _), placed in pools):
                        raise
                    continue
                self.reserve([place])
                places[index] = place

    def place_replicas(self, places: list[NodeSlot | None], *, first: bool) -> None:
        """Fill the gaps in `places`, the replicas' places, as far as there is room; skip replicas that have left.

        Raises `ConfigError` for a replica without room if the plan is the `first`.
        """
        for index, place in enumerate(places):
            if place is None and index not in self._needs.gone:
                try:
                    places[index] = self._place_replica(index)
                except ConfigError:
                    if first:
                        raise
                self.reserve([places[index]])

    def place_beside_replicas(self, gpus: int, setting: str, remedy: str) -> NodeSlot:
        """Return a place for a frozen model or a server, where the fewest replicas lose room.

        Raises `ConfigError`, with `setting` and `remedy` in its message, if no node has so many free GPUs.
        """
        if not gpus:
            return NodeSlot(self._idlest(self._nodes).id)
        fitting = [node for node in self._nodes if self._free[node.id] >= gpus]
        if not fitting:
            raise self._no_room(setting, gpus, remedy)
        homes = {place.node for place in self.learner}
        node = min(
            fitting,
            key=lambda node: (
                self._lost_replicas(node, gpus),
                node.id not in homes,
                self._free[node.id],
            ),
        )
        return NodeSlot(node.id, gpus)

    def _place_replica(self, index: int) -> NodeSlot:
        """Place a replica: with GPUs on as few nodes as possible, else on the idlest. Raises `ConfigError`."""
        needs = self._needs
        if index < needs.shared:
            return self._place_beside_ranks(index)
        nodes = self._nodes_of_server(index) if needs.hosts and len(self._nodes) > 1 else self._nodes
        size = needs.replica_gpus
        if not size:
            return NodeSlot(self._idlest(nodes).id)
        fitting = [node for node in nodes if self._free[node.id] >= size]
        if not fitting:
            setting = (
                f"rollout.replicas={needs.replicas}: there is room for {index}; each of them ({needs.placed_by})"
            )
            raise self._no_room(setting, size, "lower one of these")
        used = max(fitting, key=lambda node: (self._residents[node.id] > 0, self._free[node.id] // size))
        return NodeSlot(used.id, size)

    def _place_beside_ranks(self, index: int) -> NodeSlot:
        """Place a replica on the GPUs of learner ranks. Raises `ConfigError` if these are on several nodes."""
        size = self._needs.replica_gpus
        homes = {place.node for place in self.learner[index * size : (index + 1) * size]}
        if len(homes) > 1:
            raise ConfigError(
                f"cluster.share=true: replica {index} uses the GPUs of learner ranks {index * size} to"
                f" {(index + 1) * size - 1}, which are on {len(homes)} nodes ({self._needs.placed_by}={size});"
                " lower it or learner.world_size, or set cluster.share to false"
            )
        return NodeSlot(homes.pop())

    def _lost_replicas(self, node: Node, gpus: int) -> int:
        """Return how many replicas lose their room on a node if another part takes `gpus` GPUs there."""
        free, size = self._free[node.id], self._needs.replica_gpus
        return free // size - (free - gpus) // size if size else 0

    def _idlest(self, nodes: Sequence[Node]) -> Node:
        """Return the node that would have the fewest parts per CPU with one more part."""
        return min(nodes, key=lambda node: (self._residents[node.id] + 1) / max(1, node.cpus))

    def _nodes_of_server(self, index: int) -> list[Node]:
        """Return the nodes on the host of a replica's server, from whose memory the server reads weights."""
        host = self._needs.hosts[index]
        loopback = host in ("localhost", "::1") or host.startswith("127.")
        nodes = [node for node in self._nodes if node.ip == host or (loopback and node.here)]
        if not nodes:
            known = ", ".join(sorted({node.ip for node in self._nodes}))
            raise ConfigError(
                f"{self._needs.placed_by}[{index}]: no Ray node has the address {host}, and a server reads weights"
                f" from its own host's memory; name one of {known}, or run `ray start` there"
            )
        return nodes

    def _no_room(self, setting: str, gpus: int, remedy: str) -> ConfigError:
        """Return the error of a part that finds no node with enough free GPUs."""
        needs, most = self._needs, max(self._free.values())
        others = f"the learner's {needs.ranks * needs.rank_gpus}"
        others += f", the frozen models' {needs.stage_gpus}" if needs.stage_gpus else ""
        others += f", reward.servers' {needs.server_gpus}" if needs.server_gpus else ""
        return ConfigError(
            f"{setting} needs {gpus} GPUs of one node, and no node has more than {most} left beside {others}"
            f" and placed replicas; {remedy}, or join a cluster with more (cluster.address)"
        )


def place_relays(
    num_relays: int,
    *,
    learner: Sequence[str | None],
    hosts: Sequence[str | None],
    alive: Collection[str],
    before: Sequence[str | None],
) -> tuple[str | None, ...]:
    """Return the host of each relay by number; None for a number whose relay no replica needs now.

    The root, relay 0, is on the host of rank 0, and each other host of a replica has a relay. If all parts are on
    one host, all `num_relays` relays are there. `learner` and `hosts` are hosts of ranks and replicas. `before`
    has the relays of the previous plan: a live and needed relay keeps its number and host.
    """
    root, hosts = learner[0], list(dict.fromkeys(hosts))
    # relays of a run on one node stay there, since its replicas pull from them
    relays = [host if host in alive and (host in hosts or host == root) else None for host in before[1:]]
    if not relays and {root, *learner, *hosts} == {root}:
        relays = [root] * (num_relays - 1)
    for host in hosts:
        if host != root and host not in relays:
            if None in relays:
                relays[relays.index(None)] = host
            else:
                relays.append(host)
    gaps = max(0, len(before) - 1 - len(relays))  # relay numbers in use stay within the result
    return (root, *relays, *[None] * gaps)


class Placement:
    """Holds the present plan, e.g. `Placement(needs, ray_cluster.nodes).plan`; call `refresh` after a crash.

    GPUs that were free when a node was first used belong to this run from then on. The constructor raises
    `ConfigError` as `make_plan` does.
    """

    def __init__(self, needs: Needs, list_nodes: Callable[[], list[Node]]) -> None:
        self.needs = needs  # present demand of the run
        self._list_nodes = list_nodes
        self._known = {node.id: node for node in list_nodes()}
        self._ips = {node.id: node.ip for node in self._known.values()}  # also of nodes that are gone
        self._here = next((node.id for node in self._known.values() if node.here), None)
        self.plan = make_plan(needs, list(self._known.values()))
        self.used = set(self.plan.nodes)  # of all plans so far
        self._looking = asyncio.Lock()
        self._looked = -math.inf  # when nodes were last listed, on the loop's clock

    async def refresh(self, *, age_s: float = 0.0) -> None:
        """List the nodes, and make a new plan if a node in use is gone or a part has no place.

        Does nothing if the nodes were listed in the `age_s` seconds before the call, or while it waited. Raises
        `RunFailedError` if the live nodes have no room for the run.
        """
        loop = asyncio.get_running_loop()
        oldest = loop.time() - age_s
        async with self._looking:
            if self._looked <= oldest:
                began = loop.time()
                self._plan_again(await asyncio.to_thread(self._list_nodes))
                self._looked = began

    async def scale(self, *, replicas: int, gone: frozenset[int] = frozenset()) -> None:
        """Make a new plan for a fleet of another size; live parts keep their places. Raises `RunFailedError`."""
        async with self._looking:
            self.needs = replace(self.needs, replicas=replicas, gone=gone)
            self._plan_again(await asyncio.to_thread(self._list_nodes), scaled=True)

    async def scale_learner(self, ranks: int) -> bool:
        """Make a new plan for so many ranks, of which present ones keep their places; return False without room.

        Raises `RunFailedError` as `refresh` does.
        """
        async with self._looking:
            nodes = await asyncio.to_thread(self._list_nodes)
            self._plan_again(nodes)
            if not self.has_room(ranks):
                return False
            self.needs = replace(self.needs, ranks=ranks)
            self._plan_again(nodes, scaled=True)
            return True

    def has_room(self, ranks: int) -> bool:
        """Whether the learner could have so many ranks beside the parts with a place, on the nodes listed last."""
        try:
            make_plan(replace(self.needs, ranks=ranks), list(self._known.values()), keep=self.plan)
        except ConfigError:
            return False
        return True

    def _plan_again(self, nodes: Sequence[Node], *, scaled: bool = False) -> None:
        """Plan again if a node of the plan is gone, the needs were `scaled`, or a part has no place.

        Parts on live nodes keep their places. Raises `RunFailedError` if the nodes have no room for the run.
        """
        alive = {node.id: node for node in nodes}
        self._ips |= {node.id: node.ip for node in alive.values()}
        used = self.plan.nodes & set(alive)  # on unused nodes other programs may have taken or freed GPUs
        self._known = alive | {id: node for id, node in self._known.items() if id in used}
        gone = self.plan.nodes - set(alive)
        replicas = [place for index, place in enumerate(self.plan.replicas) if index not in self.needs.gone]
        if not gone and not scaled and None not in (*replicas, *self.plan.servers):
            return
        before = self.plan
        try:
            self.plan = make_plan(self.needs, list(self._known.values()), keep=before)
        except ConfigError as error:
            raise RunFailedError(f"the live nodes have no room (gone nodes: {sorted(gone)}): {error}") from None
        self.used |= self.plan.nodes
        if not any(self.plan.replicas):
            raise RunFailedError(
                f"no live node has room for a replica (gone nodes: {sorted(gone)}); add nodes and --resume"
            )
        if self.plan != before:
            level = logging.WARNING if gone else logging.INFO
            log.log(level, "new plan (gone nodes: %s): %s", sorted(gone), self.plan)

    @property
    def spread(self) -> bool:
        """True if the parts and the controller are on more than one node."""
        nodes = self.plan.nodes
        return len(nodes) + (self._here is not None and self._here not in nodes) > 1

    @property
    def here(self) -> NodeSlot:
        """The controller's own node, on its CPUs."""
        return NodeSlot(next(node.id for node in self._known.values() if node.here))

    def scorer_place(self, index: int) -> NodeSlot:
        """Return the place of a scorer or an environment process: by `index` over the nodes, rank 0's first."""
        first = self.plan.learner[0].node
        nodes = sorted(self.plan.nodes, key=lambda node: (node != first, node))
        return NodeSlot(nodes[index % len(nodes)])

    def ip(self, node: str) -> str:
        """Return the address of a node that is or was alive."""
        return self._ips[node]
