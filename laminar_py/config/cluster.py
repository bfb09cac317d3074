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
    """The Ray cluster that a run's parts are placed on: by default one of this machine, for this run alone."""

    address: Annotated[str, Field(pattern=r"^(auto|[^:/]+:[0-9]+)$")] | None = None
    """A running cluster to join: `host:port`, or `auto` for that of this machine; none: start one. All its nodes
    must see the working directory and the folders named here under the same paths; `laminar doctor` checks it."""
    learner_device: Device | None = None
    """What the learner's ranks, and a reference stage, run on, with `cuda` one GPU each; default: GPUs where
    launched SGLang servers run on them, CPUs otherwise."""
    shared_nodes: bool = True
    """Learner and replicas may be on one node (never on one GPU); `false`: on nodes of their own."""
