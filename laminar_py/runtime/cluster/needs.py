"""Nodes of a cluster, places on them, and what a run needs of both. Used by `cluster.placement`."""

from dataclasses import dataclass

from laminar_py.config.cluster import Device
from laminar_py.config.run import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A live Ray node, e.g. `Node(id="5a97e58a", ip="10.0.0.4", gpus=8, cpus=96)`."""

    id: str
    ip: str
    gpus: int = 0  # that are free
    cpus: int = 1
    here: bool = False  # the controller runs on it


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a part: a Ray node, None for any, and how many of its GPUs are this part's alone."""

    node: str | None = None
    gpus: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Demand of a run on a cluster, e.g. six replicas on a GPU each beside two learner ranks:

    `Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1)`.
    """

    ranks: int
    rank_gpus: int
    replicas: int  # that there are, or were; their numbers are below it
    replica_gpus: int  # tensor-parallel, on one node
    relays: int = 1  # processes of the tree, where everything is on one node
    shared_nodes: bool = True  # learner and replicas
    hosts: tuple[
        str, ...
    ] = ()  # [replicas] host of the server that a replica attaches to; empty: they launch theirs
    reference: bool = False  # a process with as many GPUs as a rank
    servers: tuple[tuple[str, int], ...] = ()  # that terms of the reward ask: pool, GPUs on one node
    placed_by: str = "rollout.engine"  # the setting that says how many GPUs replicas have, or which hosts
    gone: frozenset[int] = frozenset()  # replicas that have left, and need no place any more

    @classmethod
    def of(cls, config: RunConfig) -> "Needs":
        """Demand of this config."""
        rollout, engine, cluster = config.rollout, config.rollout.engine, config.cluster
        return cls(
            ranks=config.learner.world_size,
            rank_gpus=1 if config.learner_device is Device.CUDA else 0,
            replicas=rollout.replicas,
            replica_gpus=0 if engine.hosts else engine.gpus,
            relays=config.relay.nodes,
            shared_nodes=cluster.shared_nodes,
            hosts=engine.hosts,
            placed_by=engine.placed_by,
            reference=config.algorithm.refers_in_stage,
            servers=tuple((pool, config.reward.servers[pool].gpus) for pool, _ in config.reward.launched),
        )

    @property
    def server_gpus(self) -> int:
        """GPUs of all servers of the reward."""
        return sum(gpus for _, gpus in self.servers)

    @property
    def before_replicas(self) -> str:
        """Words on GPUs of what has a place first, e.g. "the learner's 4 and the reference's 1"."""
        reference = f" and the reference's {self.rank_gpus}" if self.reference else ""
        servers = f" and reward.servers' {self.server_gpus}" if self.server_gpus else ""
        return f"the learner's {self.ranks * self.rank_gpus}{reference}{servers}"
