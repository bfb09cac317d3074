"""How long a version takes to the last of many hosts, way by way, by formula from measured rates. Pure.

`laminar relay plan` shows it; docs/scale.md has its figures (`tests/test_scale_page.py`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table

from laminar_lab.broadcast import Broadcast, Links, arrivals_s
from laminar_lab.step_time import (
    CURVE_BYTES_PER_S,
    DELTA_SHARE,
    ENCODE_BYTES_PER_S,
    PROVE_BYTES_PER_S,
    SEALED_BYTES_PER_S,
)
from laminar_py.relay import choose_chunk_bytes, grow_tree

HOP_S = 50e-6  # of a chunk on a hop, an assumption
PAPER_S = 1.6  # Laminar's broadcast of a 72B to 1,024 GPUs
LANES = 4
THREADS = 8  # of a node with 16 cores or more, which apply deltas


class Way(NamedTuple):
    """A way of a version, e.g. `Way("whole, wire alone", 3.4, "F: the port")`."""

    name: str
    seconds: float  # until the last host has it
    rests_on: str


def ways(num_bytes: int, *, hosts: int, fanout: int, network_bytes_per_s: float) -> list[Way]:
    """Return the seconds until the last of `hosts` has a version, by whole versions and by deltas."""

    def whole(rate: float) -> float:
        return _seconds(Broadcast(num_bytes), hosts, fanout, min(rate, network_bytes_per_s))

    def delta(threads: int) -> float:
        broadcast = Broadcast(num_bytes, DELTA_SHARE, ENCODE_BYTES_PER_S, threads * PROVE_BYTES_PER_S)
        return _seconds(broadcast, hosts, fanout, min(SEALED_BYTES_PER_S, network_bytes_per_s))

    sealed, several = SEALED_BYTES_PER_S / 1e9, LANES * SEALED_BYTES_PER_S
    return [
        Way("whole, the wire alone", whole(math.inf), "F: the port"),
        Way(
            f"whole, {LANES} sealed lanes",
            whole(several),
            f"F: {LANES} times the next row, with free cores",
        ),
        Way("whole, one sealed lane", whole(SEALED_BYTES_PER_S), f"M: {sealed:g} GB/s, one core at each end"),
        Way("whole, CURVE without lanes", whole(CURVE_BYTES_PER_S), f"M: {CURVE_BYTES_PER_S / 1e9:g} GB/s"),
        Way(
            "delta of a step at 1e-6, proven by one thread a node",
            delta(1),
            f"M: {DELTA_SHARE:.2%} of the bytes; {PROVE_BYTES_PER_S / 1e9:g} GB/s",
        ),
        Way(
            f"the same, by {THREADS} threads",
            delta(THREADS),
            f"F: {THREADS} times; the root's {ENCODE_BYTES_PER_S / 1e9:g} GB/s then bound it",
        ),
    ]


def _seconds(broadcast: Broadcast, hosts: int, fanout: int, bytes_per_s: float) -> float:
    tree = grow_tree(hosts, fanout=fanout)
    chunk_bytes = choose_chunk_bytes(tree, broadcast.num_bytes, bytes_per_s=bytes_per_s, overhead_s=HOP_S)
    return max(arrivals_s(tree, broadcast, Links(bytes_per_s, HOP_S), chunk_bytes=chunk_bytes))


def describe(found: Sequence[Way], *, name: str, num_bytes: int, hosts: int) -> Table:
    """Return the ways as a table."""
    table = Table(
        title=f"{name}, {num_bytes / 1e9:.1f} GB, to {hosts - 1} hosts of replicas",
        caption=f"F: formula, M: measured; the paper's 72B on 1,024 GPUs: {PAPER_S:g} s",
    )
    for column in ("way", "seconds to the last host", "rests on"):
        table.add_column(column)
    for way in found:
        table.add_row(way.name, f"{way.seconds:.1f}", way.rests_on)
    return table
