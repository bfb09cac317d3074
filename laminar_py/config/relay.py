"""Settings of the relay tree."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Section


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
    size, `link_gbit_per_s`, `overhead_us` and `zone_gbit_per_s`."""
    fanout: Count = 2
    """Children of a node in a `kary` tree."""
    zones: dict[str, str] = Field(default={})
    """Zone (rack, site) of each host by its address, e.g. `{10.0.1.4: rack-1}`; a zone is entered by one relay
    alone, which passes versions on inside. Hosts that are not named are one zone together."""
    link_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What a relay passes on to one other of its zone; default: measured at the start of a run whose tree has
    three nodes or more on several hosts, or 10."""
    overhead_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Fixed time of one chunk on one hop, microseconds; default: measured like `link_gbit_per_s`, or 200."""
    zone_gbit_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """What all hosts of a zone together send to other zones; default: measured, from one host to one of another
    zone, like `link_gbit_per_s`, or as much as that."""
    nodes: Count = 3
    """Relay processes, the root included; replicas attach to them in turn, leaves first."""
    chunk_bytes: Annotated[int, Field(ge=4096, le=64 * 2**20)] | None = None
    """Size of a chunk on the wire; default: the best by the cost model, or a smaller one that is as good."""
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
