"""Settings of the Ray cluster, and the devices that parts run on."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Section


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
