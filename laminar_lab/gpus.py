"""Catalog of GPUs, with their makers' figures, and the groups of nodes that users write. Pure data.

Used by `laminar doctor --pretend` and by predictions of step times. Figures are published peaks: dense, and higher
than a model or a network reaches.
"""

import re
from dataclasses import dataclass

from laminar_py.config import ConfigError

_DATASHEET = "NVIDIA datasheet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A kind of GPU, e.g. `gpu_named("H100").memory_bytes == 80e9`."""

    name: str
    memory_bytes: float
    bf16_flops: float  # a second, dense
    hbm_bytes_per_s: float
    link_bytes_per_s: float  # NVLink, or else PCIe, to the other GPUs of its node, each direction
    source: str


GPUS = (
    Gpu(
        name="A100",
        memory_bytes=80e9,
        bf16_flops=312e12,
        hbm_bytes_per_s=2.04e12,
        link_bytes_per_s=300e9,
        source=f"{_DATASHEET} A100 80GB SXM",
    ),
    Gpu(
        name="H100",
        memory_bytes=80e9,
        bf16_flops=989e12,
        hbm_bytes_per_s=3.35e12,
        link_bytes_per_s=450e9,
        source=f"{_DATASHEET} H100 SXM; FLOP/s are half of those with sparsity",
    ),
    Gpu(
        name="H800",
        memory_bytes=80e9,
        bf16_flops=989e12,
        hbm_bytes_per_s=3.35e12,
        link_bytes_per_s=200e9,
        source="as H100 SXM, with NVLink of 400 GB/s in both directions together",
    ),
    Gpu(
        name="H200",
        memory_bytes=141e9,
        bf16_flops=989e12,
        hbm_bytes_per_s=4.8e12,
        link_bytes_per_s=450e9,
        source=f"{_DATASHEET} H200 SXM; FLOP/s are half of those with sparsity",
    ),
    Gpu(
        name="B200",
        memory_bytes=180e9,
        bf16_flops=2250e12,
        hbm_bytes_per_s=8.0e12,
        link_bytes_per_s=900e9,
        source=f"{_DATASHEET} DGX B200, an eighth of it; FLOP/s are half of those with sparsity",
    ),
    Gpu(
        name="RTX4090",
        memory_bytes=24e9,
        bf16_flops=165e12,
        hbm_bytes_per_s=1.01e12,
        link_bytes_per_s=32e9,
        source="NVIDIA Ada whitepaper: FLOP/s with sums in fp32; without NVLink, so PCIe 4.0 of 16 lanes",
    ),
)


def gpu_named(name: str) -> Gpu:
    """Return the GPU with a name, in upper or lower case. Raises `ConfigError` with the known names."""
    for gpu in GPUS:
        if gpu.name == name.upper():
            return gpu
    known = ", ".join(gpu.name for gpu in GPUS)
    raise ConfigError(f"gpu={name}: unknown; choose {known}")


def gpu_of_device(device: str) -> Gpu | None:
    """Return the GPU of a device's name, e.g. of "NVIDIA H100 80GB HBM3"; None if the catalog lacks it."""
    return next((gpu for gpu in GPUS if gpu.name in device.upper().replace(" ", "")), None)


CPU = "cpu"  # the kind of nodes that have none
_GROUP = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([A-Za-z]\w*)")  # at most 9,999 of each


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes that are alike, e.g. `3x8xH100`: `NodeGroup(3, 8, gpu_named("H100"))`."""

    nodes: int
    each: int  # GPUs of a node; without GPUs its cores
    gpu: Gpu | None


def read_group(text: str, *, option: str) -> NodeGroup:
    """Nodes x GPUs of each x their kind, or nodes x cores of each x cpu. A `ConfigError` names `option`."""
    found = _GROUP.fullmatch(text.strip())
    if found is None:
        raise ConfigError(
            f"{option}={text}: not nodes x GPUs x kind, at most 9999 of each; write e.g. 3x8xH100, or 2x64xcpu"
            " for nodes of 64 cores without GPUs"
        )
    nodes, each, kind = found.groups()
    try:
        return NodeGroup(int(nodes), int(each), None if kind.lower() == CPU else gpu_named(kind))
    except ConfigError:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError(f"{option}={text}: no such GPU is known; choose {known}, or {CPU}") from None
