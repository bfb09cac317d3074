"""Pieces fetched from another host beside a bare socket. A host is a network namespace.

Store and bare sender are on one host, the client is on the other, and both sides have the same link.
"""

from laminar_lab.bench.relay.namespaces import Network, require
from laminar_lab.bench.report import Ratio, Row, in_turn
from laminar_lab.bench.segments.local import BARE, OURS, PieceBatch, describe_fetch, describe_rates, fetch_sides
from laminar_lab.bench.workplace import workplace

ROWS = "segment_hosts_1Gbit_over_socket segment_hosts_10Gbit_over_socket"
LINKS = (1_000, 10_000)  # Mbit/s each way


def rows(*, repeats: int = 9, tokens: int = 3000, fetched: int = 256) -> list[Row]:
    """Compare both sides over each link. Raises `ConfigError` without root, iproute2 or network namespaces."""
    require(0)
    batch, found = PieceBatch(tokens, fetched), []
    for mbit_per_s in LINKS:
        with (
            Network(2, mbit_per_s=mbit_per_s) as network,
            workplace() as folder,
            fetch_sides(folder, batch, start=network.start, host=network.address(0)) as sides,
        ):
            rates = in_turn(sides, rounds=repeats, warm=1)
        link = f"two network namespaces, tbf {mbit_per_s:,} Mbit/s each way"
        name = f"segment_hosts_{mbit_per_s // 1000}Gbit_over_socket"
        conditions = f"{describe_fetch(batch)}; {link}: {describe_rates(rates)}"
        found.append(Ratio.between(rates[OURS], rates[BARE]).row(name, conditions))
    return found
