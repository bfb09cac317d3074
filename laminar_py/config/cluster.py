"""Settings of the cluster, of the relay tree, and of the revival of dead parts."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from laminar_py.config.section import ConfigError, Count, Seconds, Section


class Device(StrEnum):
    """Kinds of device for SGLang servers and learner ranks."""

    CUDA = "cuda"
    CPU = "cpu"


class ClusterConfig(Section):
    """Where the processes of a run are placed: by default on this machine, without Ray."""

    address: Annotated[str, Field(pattern=r"^(auto|local|[^:/]+:[0-9]+)$")] | None = None
    """A running Ray cluster to join: `host:port`, or `auto` for the one of this machine; `local`: start Ray on
    this machine; none: fork the processes on this machine, without Ray. All nodes must see the working directory
    and the folders named here under the same paths; `laminar doctor` checks it."""
    learner_device: Device | None = None
    """What the learner's ranks, and a reference stage, run on, with `cuda` one GPU each; default: GPUs where
    launched SGLang servers run on them, CPUs otherwise."""
    shared_nodes: bool = True
    """Learner and replicas may be on one node (never on one GPU); `false`: on nodes of their own."""


class TopologyKind(StrEnum):
    """Shape of the relay tree."""

    STAR = "star"
    CHAIN = "chain"
    KARY = "kary"
    AUTO = "auto"


class RelayConfig(Section):
    """The relay tree that carries weights from the learner to the replicas."""

    topology: TopologyKind = TopologyKind.AUTO
    """Shape of the tree below the root; `auto`: the one that takes least time by the cost model, from the model's
    size and the network, see `link_gbit_per_s`."""
    fanout: Count = 2
    """Children of a node in a `kary` tree."""
    zones: dict[str, str] = Field(default={})
    """Zone (rack, site) of each host by its address, e.g. `{10.0.1.4: rack-1}`; a zone is entered by one relay
    alone, which passes versions on inside. Hosts that are not named are one zone together."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a relay passes on to one other; nothing is measured then. Default: measured, between two hosts of a
    zone and of two zones, at the start of a run whose tree has three nodes or more on several hosts; else 10."""
    nodes: Count = 3
    """Relay processes, the root included; replicas attach to them in turn, leaves first."""
    max_bytes_per_s: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    """Bytes of weights that one relay sends on to all its children per second, at most, so that weights leave room
    on a network that is shared; a chunk may exceed it for a moment. `null`: no cap."""
    keep_versions: Count = 2
    """Complete versions a node keeps; one that a replica holds is kept longer."""
    shm: Path = Path("/dev/shm")
    """Shared memory that holds version folders."""
    host: str = "127.0.0.1"
    """Interface the relays listen on; every socket is CURVE-authenticated."""
    base_port: Annotated[int, Field(ge=1024, le=65000)] | None = None
    """First port of the tree, one per node; default: free ports chosen at start."""


class SupervisorConfig(Section):
    """Detection and revival of dead parts."""

    heartbeat_timeout_s: Seconds = 30.0
    """A part that has not answered for so long is killed and started anew."""
    max_restarts: Count = 20
    """Restarts of one part after which the run gives up."""


class WeakestSandbox(StrEnum):
    """Weakest fences that will do."""

    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    NONE = "none"


def _whole(path: str) -> str:
    if not path.startswith("/") or path.strip("/") == "":
        raise ConfigError(f"sandbox.programs={path}: write a folder by its whole path, such as /usr")
    return path


class SandboxConfig(Section):
    """Fences around programs that the model writes. `laminar doctor` says which a machine offers."""

    require: WeakestSandbox = WeakestSandbox.LANDLOCK
    """Weakest tier that will do; the strongest that can be had is taken. `namespaces`: processes, users, mounts
    and network of its own, a root with Python and `programs` alone, and all of `landlock`. `landlock`: Landlock,
    seccomp, limits, a user of its own. `none`: limits alone, so that a program may read and reach what the run
    may; unsafe."""
    slots: Count = 2
    """Programs that run at the same time, in each scorer, and in each process of environments that runs code."""
    cpu_s: Seconds = 4.0
    """CPU time of a run, seconds."""
    wall_s: Seconds = 10.0
    """Wall time of a run, seconds."""
    memory_mib: Annotated[int, Field(ge=32)] = 256
    """Memory of a run, MiB."""
    programs: tuple[Annotated[str, AfterValidator(_whole)], ...] = ()
    """Folders of the host whose files code may read and run beside Python's own, such as `/usr`: for a shell, and
    for code that starts programs; needs the tier `namespaces`. What lies there the model may read."""
