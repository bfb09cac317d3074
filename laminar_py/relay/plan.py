"""`laminar relay plan`: the tree for the hosts and links in a file, its times and its memory. Pure.

The command line calls it before there is any cluster. A plan whose versions do not fit into memory is refused with
the field, its value and the remedy (`tests/relay/test_plan.py`).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from laminar_py.config.cluster import TopologyKind
from laminar_py.config.loading import load_settings
from laminar_py.config.section import ConfigError, Count, Section, Share
from laminar_py.relay.tree import (
    PAGE_BYTES,
    Broadcast,
    Links,
    Shape,
    broadcast_s,
    choose_tree,
    grow_tree,
    versions_at_peak,
)

_GIB = 2**30
_POWERS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def _parameters(value: object) -> object:
    """Turn text such as `7B` into 7,000,000,000; other values stay."""
    if isinstance(value, str) and value[-1:].upper() in _POWERS:
        try:
            return round(float(value[:-1]) * _POWERS[value[-1].upper()])
        except (ValueError, OverflowError):
            raise ConfigError("write a number and K, M, B or T, such as 7B") from None
    return value


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TreeSpec(Section):
    """A fleet to plan for, e.g. `hosts: 8`, `parameters: 7B`, `link_gbit_per_s: 100`, `shm_gib: 256`."""

    hosts: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Hosts, the root's included, all in one zone; or name `zones`."""
    zones: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = Field(default={})
    """Hosts of each zone (rack, site), the root's first, e.g. `{rack-1: 16, rack-2: 16}`."""
    topology: TopologyKind = TopologyKind.AUTO
    """Shape of the tree; `auto`: the fastest for a full version."""
    fanout: Count = 2
    """Children of a node in a `kary` tree."""
    link_gbit_per_s: Positive
    """Speed from one relay to another of its zone, as measured; the wire or a node's CPU limits it."""
    zone_gbit_per_s: Positive | None = None
    """Speed at which all hosts of a zone together send to other zones; default: that of one host."""
    overhead_us: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 200.0
    """Fixed time of one chunk on one hop, as measured."""
    chunk_bytes: Annotated[int, Field(ge=PAGE_BYTES, le=64 * 2**20, multiple_of=PAGE_BYTES)] | None = None
    """Size of a chunk; default: the best by the model of time."""
    parameters: Annotated[int, Field(ge=1), BeforeValidator(_parameters)]
    """Size of the model, e.g. `7B`."""
    bytes_per_parameter: Count = 2
    """Bytes of one parameter in the engine's dtype, 2 in bf16."""
    keep_versions: Count = 2
    """Complete versions that a node keeps."""
    replicas_per_host: Annotated[int, Field(ge=0)] = 1
    """Replicas of a host, each of which may hold one older version while it drains."""
    shm_gib: Positive
    """Shared memory of each host that versions may take, GiB."""
    delta_share: Share | None = 0.011
    """Bytes of a delta, as a share of the full version's; None: no delta."""
    encode_gbyte_per_s: Positive = 1.5
    """Bytes of the full version that the root turns into a delta in a second, with all its cores for that."""
    apply_gbyte_per_s: Positive = 5.0
    """Bytes of the full version that a node makes from a delta in a second, with all its cores for that."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hosts is not None and self.zones:
            raise ConfigError(
                f"hosts={self.hosts}: the zones have {sum(self.zones.values())}; leave one of them out"
            )
        if self.hosts is None and not self.zones:
            raise ConfigError("hosts: missing; say how many, or name the hosts of each zone in zones")
        if self.zone_gbit_per_s is not None and len(self.zones) < 2:
            raise ConfigError(
                f"zone_gbit_per_s={self.zone_gbit_per_s:g}: there is only one zone; name others in zones, or leave"
                " it out"
            )
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """[N] zone of each host, the empty label where there are none."""
        zones = self.zones or {"": self.hosts or 1}
        return tuple(zone for zone, count in zones.items() for _ in range(count))

    @property
    def links(self) -> Links:
        """The network in bytes and seconds."""
        bytes_per_s = self.link_gbit_per_s * 1e9 / 8
        zone_bytes_per_s = math.inf if self.zone_gbit_per_s is None else self.zone_gbit_per_s * 1e9 / 8
        return Links(bytes_per_s, self.overhead_us * 1e-6, zone_bytes_per_s)

    @property
    def full(self) -> Broadcast:
        """The broadcast of a full version."""
        return Broadcast(self.parameters * self.bytes_per_parameter)

    @property
    def delta(self) -> Broadcast | None:
        """The broadcast of a version as a delta against the one before; None without deltas."""
        if self.delta_share is None:
            return None
        rates = (self.encode_gbyte_per_s * 1e9, self.apply_gbyte_per_s * 1e9)
        return Broadcast(self.full.num_bytes, self.delta_share, *rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayPlan:
    """The tree of a `TreeSpec`, e.g. `make_relay_plan(read_spec(Path("configs/relay/rack.yaml"), []))`."""

    spec: TreeSpec
    shape: Shape
    depth: int  # hops from the root to the last host
    chunk_bytes: int
    full_s: float  # until the last host has a full version
    delta_s: float | None  # until the last host has encoded, received and applied a delta
    peak_bytes: int  # of shared memory on a host


def read_spec(path: Path, overrides: list[str]) -> TreeSpec:
    """Read the spec in a YAML file and apply `key=value` overrides. Raises `ConfigError` with one line."""
    return load_settings(TreeSpec, path, overrides, help_at="configs/relay")


def make_relay_plan(spec: TreeSpec) -> RelayPlan:
    """Choose shape and chunk size, and predict times. Raises `ConfigError` if versions do not fit into memory."""
    zones, links, delta = spec.labels, spec.links, spec.delta
    peak_bytes = _peak_bytes(spec)
    choice = choose_tree(spec.topology, fanout=spec.fanout, zones=zones, broadcast=spec.full, links=links)
    tree = grow_tree(choice.shape, zones)
    chunk_bytes = spec.chunk_bytes or choice.chunk_bytes
    return RelayPlan(
        spec=spec,
        shape=choice.shape,
        depth=tree.depth,
        chunk_bytes=chunk_bytes,
        full_s=broadcast_s(tree, zones, spec.full, links, chunk_bytes=chunk_bytes),
        delta_s=broadcast_s(tree, zones, delta, links, chunk_bytes=chunk_bytes) if delta else None,
        peak_bytes=peak_bytes,
    )


def _peak_bytes(spec: TreeSpec) -> int:
    versions = versions_at_peak(keep_versions=spec.keep_versions, num_replicas=spec.replicas_per_host)
    peak_bytes = versions * spec.full.num_bytes
    if peak_bytes <= spec.shm_gib * _GIB:
        return peak_bytes
    kept = spec.keep_versions + int(spec.shm_gib * _GIB // spec.full.num_bytes) - versions
    lower = f", or keep_versions to {kept}" if kept >= 1 else ""
    raise ConfigError(
        f"shm_gib={spec.shm_gib:g}: a version has {spec.full.num_bytes / 1e9:.3g} GB and {versions} are there at"
        f" the peak ({spec.keep_versions} kept, 1 arriving, 1 that deltas build on or a slow child fetches,"
        f" {spec.replicas_per_host} held by replicas); set it to {math.ceil(peak_bytes / _GIB)}{lower}"
    )


def plan_lines(plan: RelayPlan) -> list[str]:
    """The plan as lines for the terminal."""
    spec = plan.spec
    num_zones = len(set(spec.labels))
    versions = plan.peak_bytes // spec.full.num_bytes
    lines = [
        f"hosts          {len(spec.labels)}" + (f" in {num_zones} zones" if num_zones > 1 else ""),
        f"topology       {spec.topology}: {plan.shape.describe(num_zones=num_zones)}; depth {plan.depth}",
        f"version        {spec.parameters:,} parameters, {spec.full.num_bytes / 1e9:.3g} GB",
        f"chunks         {plan.chunk_bytes / 2**20:.2f} MiB",
        f"full           {plan.full_s:.3g} s until the last host has it",
    ]
    if plan.delta_s is not None:
        lines.append(
            f"delta          {plan.delta_s:.3g} s until the last host has it; {spec.delta_share:.1%} of the bytes"
        )
    memory = f"{plan.peak_bytes / _GIB:.4g} of {spec.shm_gib:g} GiB a host"
    return [*lines, f"shared memory  {memory}, {versions} versions at the peak"]
