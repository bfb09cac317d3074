"""What `python -m benchmarks relay` measures: the relay beside others, on one host and over narrow links.

Figures are ratios to a raw limit, or to what one would use instead, that took turns with it in the same run.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.relay import fanout, hosts, sockets
from laminar_py.bench.relay.measure import SHARED_MEMORY
from laminar_py.bench.report import Row
from laminar_py.bench.turns import Tell
from laminar_py.config.section import ConfigError

MOST_ROUNDS = 3  # over hosts, where a round takes a minute


@dataclass(frozen=True, slots=True)
class BroadcastSize:
    """How much goes to how many; only tests use another than `FULL`."""

    num_bytes: int = 256 * 2**20  # of a version
    num_replicas: int = 7  # on one host
    num_hosts: int = 8
    mbit_per_s: int = 400  # of a host's link, each way


FULL = BroadcastSize()


def rows(
    parts: Sequence[str], *, repeats: int, tell: Tell, size: BroadcastSize = FULL, shm: Path = SHARED_MEMORY
) -> list[Row]:
    """Figures of these parts, medians over `repeats` rounds; `tell` hears of each. Takes minutes.

    On one host all versions, and Ray's objects, lie in `shm`. Sets this process to one torch thread. Raises
    `ConfigError` where hosts alone are asked for and there can be none: without root, iproute2 or namespaces.
    """
    torch.set_num_threads(1)
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=shm) as name:
        folder = Path(name)
        if "sockets" in parts:
            found += sockets.rows(folder, num_bytes=size.num_bytes, repeats=repeats, tell=tell)
        if "fanout" in parts:
            found += fanout.rows(
                folder, num_bytes=size.num_bytes, num_replicas=size.num_replicas, repeats=repeats, tell=tell
            )
    if "hosts" in parts:
        try:
            found += hosts.rows(
                repeats=min(repeats, MOST_ROUNDS),
                tell=tell,
                num_hosts=size.num_hosts,
                num_bytes=size.num_bytes,
                mbit_per_s=size.mbit_per_s,
            )
        except ConfigError as error:
            if len(parts) == 1:
                raise
            tell(f"left out: {error}")
    return found
