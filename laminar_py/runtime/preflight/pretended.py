"""A cluster that is not there, for `laminar doctor --pretend`: its nodes, and the kinds of their GPUs. Pure.

Nodes are those that Ray would show: the same placement takes them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.runtime.cluster.placement import Needs, Node
from laminar_py.runtime.preflight.gpus import Gpu, read_group

CORES_A_GPU = 12  # of a node with GPUs; placement asks only how nodes compare


@dataclass(frozen=True, slots=True)
class PretendedCluster:
    """Nodes with the kind of their GPUs, e.g. those of `pretended_cluster(["3x8xH100", "1x64xcpu"])`."""

    nodes: tuple[Node, ...]  # the controller's first
    gpus: Mapping[str, Gpu]  # of each node that has some, by id

    def gpu_bytes(self, holders: Mapping[str, Collection[str]]) -> dict[str, float]:
        """Bytes of the smallest GPU of the nodes of each kind, 0 where it has no nodes."""
        return {
            kind: min((self.gpus[node].memory_bytes for node in held), default=0.0)
            for kind, held in holders.items()
        }

    def joined(self, config: RunConfig) -> RunConfig:
        """The config of a run that has joined it. Raises `ConfigError` where its servers run elsewhere."""
        needs = Needs.of(config)
        if needs.hosts:
            raise ConfigError(
                f"{needs.placed_by}: names servers that run, and no host of a pretended cluster has them; leave it"
                " out"
            )
        cluster = config.cluster.model_copy(update={"address": config.cluster.address or "auto"})
        return config.model_copy(update={"cluster": cluster})

    def warnings(self, config: RunConfig) -> list[str]:
        """Lines on what keeps a run of this config from having all nodes."""
        if config.cluster.address is not None or len(self.nodes) == 1:
            return []
        return [
            f"cluster.address is not set, so that a run has one node and not {len(self.nodes)}; set it to auto on"
            " a node of the cluster"
        ]


def pretended_cluster(texts: Sequence[str]) -> PretendedCluster:
    """The cluster of groups of nodes such as `3x8xH100` or `2x64xcpu`, several with commas between them.

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
    """Complaint, in one line, about a model whose shape cannot be read, so that nothing is known of memory."""
    path = config.model.path
    if (path / "config.json").is_file() or config.data.prepare is not None or config.emulation is not None:
        return None
    return f"model.path={path}: no config.json in it, which tells what its GPUs hold; put the model's there"
