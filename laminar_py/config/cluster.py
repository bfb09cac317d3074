"""Settings of the cluster, of the relay tree, of restarts, and of the sandbox for programs of the model."""

from enum import StrEnum
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.engine import EngineConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section


class Device(StrEnum):
    """Device of SGLang servers and learner ranks."""

    CUDA = "cuda"
    CPU = "cpu"


class LeaseSwitch(StrEnum):
    """When replicas give shared devices to a learner that has a batch."""

    READY = "ready"
    TAIL = "tail"


class LeaseCache(StrEnum):
    """Use of the KV cache of shared replicas while the learner computes."""

    KEEP = "keep"
    RELEASE = "release"


class LeaseConfig(Section):
    """Turns of learner and replicas on shared devices (`cluster.share`)."""

    switch: LeaseSwitch = LeaseSwitch.READY
    """When replicas give the devices to a learner that has a batch. `tail`: once they run at most half of the
    trajectories that they have run in this turn. `ready`: then, or once their turn has lasted so long that
    hand-overs take at most `most_cost` of it."""
    most_cost: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Share of the replicas' turn that hand-overs may take, with the prefill that a released cache costs."""
    cache: LeaseCache | None = None
    """KV cache during the learner's turn. `keep`: responses continue where they were. `release`: the learner gets
    the memory, and the replicas compute the cache again. Default: `release` on GPUs, `keep` on CPUs."""


class ClusterConfig(Section):
    """Where the processes of a run are placed: by default on this machine, without Ray."""

    address: Annotated[str, Field(pattern=r"^(auto|[^:/]+:[0-9]+)$")] | None = None
    """A running Ray cluster to join: `host:port`, or `auto` for the one of this machine. None: fork the processes
    on this machine, without Ray. All nodes must see the working directory and the folders of the config under the
    same paths; `laminar doctor` checks it."""
    learner_device: Device | None = None
    """Device of the learner's ranks and of a reference stage, with `cuda` one GPU each. Default: GPUs if the run
    launches SGLang servers on GPUs, else CPUs."""
    share: bool = False
    """Learner and replicas use the same devices, in turns. Replica 0 has the GPUs of the first learner ranks,
    replica 1 the next ones, and so on; replicas beyond the ranks have GPUs of their own, and never stop. On CPUs
    all replicas take turns with the learner."""
    lease: LeaseConfig = LeaseConfig()
    """Turns on shared devices."""


class Seal(StrEnum):
    """Protection of the chunks between two relays."""

    AEAD = "aead"
    CURVE = "curve"
    NONE = "none"


# RFC 1918, and their like in IPv6
_PRIVATE = tuple(
    map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "::1/128", "fc00::/7"))
)


def check_seal(seal: Seal, host: str) -> None:
    """Raise `ConfigError` if chunks would cross a network that is not private without encryption."""
    if seal is not Seal.NONE or host == "localhost" or host.startswith("ipc://"):
        return
    try:
        address = ip_address(host)
    except ValueError:
        address = None
    if address is None or not any(
        address in network for network in _PRIVATE if network.version == address.version
    ):
        raise ConfigError(
            f"relay.seal=none: relays would send weights unencrypted from {host}, which is no private address;"
            " set relay.seal=aead, or let relays listen on one (10/8, 172.16/12, 192.168/16, 127/8, fc00::/7)"
        )


def check_share(engine: EngineConfig, *, ranks: int, device: Device, kv_capacity: int | None) -> None:
    """Raise `ConfigError` if the replicas cannot use the devices of the learner's ranks.

    `kv_capacity` is `rollout.kv_capacity`: an engine starts before the learner has all its memory.
    """
    if engine.hosts:
        raise ConfigError(
            f"cluster.share=true: {engine.placed_by} names servers that the run does not start, on other devices"
            " than the learner's; set it to false"
        )
    if engine.gpus and engine.emulates is None and device is Device.CPU:
        raise ConfigError("cluster.share=true: the learner is on CPUs, and replicas on GPUs; set it to false")
    if not engine.devices and device is Device.CUDA:
        raise ConfigError("cluster.share=true: the learner is on GPUs, and replicas on CPUs; set it to false")
    if engine.devices > ranks:
        raise ConfigError(
            f"cluster.share=true: a replica has {engine.devices} GPUs, and the learner {ranks}; raise"
            " learner.world_size, or give a replica fewer GPUs"
        )
    if engine.gpus and engine.emulates is None and kv_capacity is None:
        raise ConfigError(
            "rollout.kv_capacity=None: with cluster.share=true an engine would take the memory that the learner"
            " needs on its GPUs; set the tokens that fit beside it (`laminar doctor` says how many)"
        )


class RelayConfig(Section):
    """The relay tree that carries weights from the learner to the replicas."""

    fanout: Count = 1
    """Children of a relay. 1 makes a chain, which is fastest for all but the smallest models: a relay sends each
    chunk on as soon as it has it, so a long chain takes hardly longer than one link."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    """Bandwidth between two relays, for the choice of the chunk size."""
    nodes: Count = 3
    """Relay processes, the root included. Replicas attach to them in turn, leaves first."""
    keep_versions: Count = 2
    """Complete versions that a node keeps; a version that a replica holds is kept longer."""
    shm: Path = Path("/dev/shm")
    """Folder in shared memory for versions."""
    host: str = "127.0.0.1"
    """Interface that the relays listen on; every socket is CURVE-authenticated."""
    seal: Seal = Seal.AEAD
    """Protection of chunks between relays. `aead`: AES-256-GCM on lanes, TCP connections on ports of their own.
    `curve`: CURVE, at a third of the speed, without lanes. `none`: lanes without encryption, for private addresses
    only; control records stay CURVE-encrypted and digests are checked."""
    lanes: Annotated[int, Field(ge=1, le=16)] | None = None
    """Lanes from each relay's parent, with a thread at both ends. Default: half the cores, at most 4."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_seal(self.seal, self.host)
        return self


class SupervisorConfig(Section):
    """Detection and restart of crashed parts."""

    heartbeat_timeout_s: Seconds = 30.0
    """The run kills and restarts a part that has not answered for this many seconds."""
    max_restarts: Count = 20
    """Most restarts of one part; the next failure of that part ends the run."""


class WeakestSandbox(StrEnum):
    """Weakest isolation that a run accepts."""

    LANDLOCK = "landlock"
    NONE = "none"


class SandboxConfig(Section):
    """Isolation of programs that the model writes. `laminar doctor` shows whether a machine offers it."""

    require: WeakestSandbox = WeakestSandbox.LANDLOCK
    """Weakest fences that the run accepts. `landlock`: Landlock, seccomp and limits, for a program of one process
    without network, which reads Python alone and writes into a folder of its own. `none`: limits only where the
    machine has no Landlock, so a program can read and reach everything that the run can; unsafe."""
    slots: Count = 2
    """Programs that run at the same time in each scorer, and in each environment process that runs code."""
    cpu_s: Seconds = 4.0
    """CPU time of one program, seconds."""
    wall_s: Seconds = 10.0
    """Wall time of one program, seconds."""
    memory_mib: Annotated[int, Field(ge=32)] = 256
    """Memory of one program, MiB."""
