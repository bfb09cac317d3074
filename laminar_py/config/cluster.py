"""Settings of the cluster, of the relay tree, of restarts, and of the sandbox for programs of the model."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Seconds, Section


class Device(StrEnum):
    """Device of SGLang servers and learner ranks."""

    CUDA = "cuda"
    CPU = "cpu"


class ClusterConfig(Section):
    """Where the processes of a run are placed: by default on this machine, without Ray."""

    address: Annotated[str, Field(pattern=r"^(auto|[^:/]+:[0-9]+)$")] | None = None
    """A running Ray cluster to join: `host:port`, or `auto` for the one of this machine. None: fork the processes
    on this machine, without Ray. All nodes must see the working directory and the folders of the config under the
    same paths; `laminar doctor` checks it."""
    learner_device: Device | None = None
    """Device of the learner's ranks and of a reference stage, with `cuda` one GPU each. Default: GPUs if the run
    launches SGLang servers on GPUs, else CPUs."""


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
