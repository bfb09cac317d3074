"""Pieces fetched from another host beside a bare socket. A host is a network namespace.

Invariant: store and bare sender are on one host, the client is on the other, and both sides have the same link.
"""

import os
from statistics import median

from laminar_lab.bench.relay.namespaces import Network, require
from laminar_lab.bench.report import Ratio, Row, Tell, in_turn
from laminar_lab.bench.segments.local import BARE, FETCHED, OURS, PieceBatch, fetch_sides, tell_fetch
from laminar_lab.bench.workplace import workplace

ROWS = (
    "segment_hosts_1Gbit_over_socket segment_hosts_1Gbit_MBps segment_hosts_10Gbit_over_socket "
    "segment_hosts_10Gbit_MBps"
)
LINKS = (1_000, 10_000)  # Mbit/s each way


def rows(*, repeats: int = 9, tell: Tell, batch: PieceBatch = FETCHED) -> list[Row]:
    """Ratio and rate over each link. Raises `ConfigError` where there can be no such hosts."""
    require(0)
    found = []
    for mbit_per_s in LINKS:
        with (
            Network(2, mbit_per_s=mbit_per_s) as network,
            workplace() as folder,
            fetch_sides(folder, batch, start=network.start, host=network.address(0)) as sides,
        ):
            rates = in_turn(sides, rounds=repeats, warm=1)
        ratio = Ratio.of(rates[OURS], rates[BARE])
        told = (
            f"{tell_fetch(batch)}; two network namespaces of a machine of {os.cpu_count()} cores, tbf"
            f" {mbit_per_s:,} Mbit/s each way; ours {median(rates[OURS]):,.0f} MB/s, bare"
            f" {median(rates[BARE]):,.0f} MB/s; {ratio}, load {os.getloadavg()[0]:.1f}"
        )
        name = f"segment_hosts_{mbit_per_s // 1000}Gbit"
        found += [
            Row(f"{name}_over_socket", ratio.median, "x", told),
            Row(f"{name}_MBps", median(rates[OURS]), "MB/s", told),
        ]
        tell(f"{mbit_per_s:,} Mbit/s: {ratio.median:.2f}")
    return found
