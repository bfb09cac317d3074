"""A hop of the relay, from a node to its child in another process: rows `*hop*_GBps` of `laminar bench relay`.

`benchmarks.relay.sockets` lays a bare socket beside each. Invariant: no two versions in a row have the same size,
so no chunk travels as a delta.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import torch

from laminar_lab.bench.relay.tree import CHUNK_BYTES, WARM_VERSIONS, Tree
from laminar_lab.bench.report import Row
from laminar_lab.bench.turns import Side, Tell, in_turn
from laminar_lab.bench.workplace import workplace
from laminar_py.relay.planning.cost import PAGE_BYTES
from laminar_py.relay.wire.transport import RelayKeys

VERSION_BYTES = 256 * 2**20  # of a version that hops


@dataclass(frozen=True, slots=True)
class HopKind:
    """A transport of a hop, e.g. `HopKind("hop_curve", curve=True)`."""

    name: str
    curve: bool = False
    ipc: bool = False

    def tell(self, num_bytes: int) -> str:
        """Conditions, for a table."""
        return (
            f"{num_bytes / 2**20:g} MiB in chunks of {CHUNK_BYTES / 2**20:g} MiB, {'ipc' if self.ipc else 'TCP'},"
            f" CURVE {'on' if self.curve else 'off'}, BLAKE3 of each chunk made before and checked on arrival;"
            " ours: until a node in another process has verified the file's digest, too"
        )


KINDS = (HopKind("hop"), HopKind("hop_curve", curve=True), HopKind("ipc_hop", ipc=True))


def rows(*, shm: Path, repeats: int, tell: Tell, num_bytes: int = VERSION_BYTES) -> list[Row]:
    """Rate of each kind of hop, median over `repeats` versions, which lie in `shm`."""
    found = []
    for kind in KINDS:
        with workplace(shm) as folder, hop(folder / kind.name, kind, num_bytes) as side:
            rates = in_turn({kind.name: side}, rounds=repeats, warm=WARM_VERSIONS)[kind.name]
        conditions = f"{kind.tell(num_bytes)}; median of {repeats}, {min(rates):.2f} to {max(rates):.2f}"
        found.append(Row(f"{kind.name}_GBps", median(rates), "GB/s", conditions))
        tell(f"{kind.name} {median(rates):.3f} GB/s")
    return found


@contextmanager
def hop(folder: Path, kind: HopKind, num_bytes: int) -> Iterator[Side]:
    """GB/s between a root and a child: from complete at the root until complete at the child."""
    keys = RelayKeys.generate() if kind.curve else None
    weights = torch.randint(0, 256, (num_bytes + PAGE_BYTES,), dtype=torch.uint8)
    cuts = cycle((num_bytes, num_bytes + PAGE_BYTES))  # sizes that do not fit: no deltas
    with Tree(folder, keys=keys, leaf=True, ipc=kind.ipc) as tree:

        def measure(_: int) -> float:
            tree.publish([("weights", weights[: next(cuts)])])
            elapsed_s, report = tree.await_last()
            assert report.wire_bytes == report.num_bytes, f"it came in part as deltas: {report}"
            return num_bytes / elapsed_s / 1e9

        yield measure
