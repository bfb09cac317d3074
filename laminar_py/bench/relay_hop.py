"""One hop of the relay beside a bare socket: the same bytes, chunks and checksums from one process to another.

Rows `*hop_over_socket` of `laminar bench relay`. Both sides read a file in shared memory, send it chunk by
chunk with the BLAKE3 of each, check that at the other end and put the chunk into shared memory. The bare side does
nothing else: one thread at each end, straight from and into mapped pages that are warm. Invariant: no two versions
in a row have the same size, so no chunk travels as a delta.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import median

import torch

from laminar_py.bench.bare_socket import bare_socket
from laminar_py.bench.processes import Measure
from laminar_py.bench.relay_node import CHUNK_BYTES
from laminar_py.bench.relay_tree import WARM_VERSIONS, Tree
from laminar_py.bench.report import Row
from laminar_py.relay.wire.transport import RelayKeys

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to hop, e.g. `Kind("hop_curve", curve=True)`."""

    name: str
    curve: bool = False
    ipc: bool = False

    @property
    def bare(self) -> str:
        """The row of the socket beside it."""
        return "unix_socket_GBps" if self.ipc else "socket_GBps"


KINDS = (Kind("hop"), Kind("hop_curve", curve=True), Kind("ipc_hop", ipc=True))


def rows(folder: Path, *, num_bytes: int, repeats: int, tell: Callable[[str], None]) -> list[Row]:
    """Ratio and both rates for each kind, medians over `repeats` rounds; `folder` is in shared memory."""
    found: dict[str, Row] = {}
    for kind in KINDS:
        for row in _compare(folder / kind.name, kind, num_bytes=num_bytes, repeats=repeats):
            found.setdefault(row.name, row)  # the bare socket comes twice
            tell(f"{row.name} {row.value:.3f} {row.unit}")
    return list(found.values())


def _compare(folder: Path, kind: Kind, *, num_bytes: int, repeats: int) -> list[Row]:
    folder.mkdir()
    ours: list[float] = []
    theirs: list[float] = []  # GB/s of each round
    with _hop(folder / "tree", kind, num_bytes) as hop, bare_socket(folder, num_bytes, unix=kind.ipc) as bare:
        for turn in range(WARM_VERSIONS + repeats):
            sides = ((hop, ours), (bare, theirs))
            for measure, rates in sides if turn % 2 else reversed(sides):
                rates.append(num_bytes / measure() / 1e9)
    ours, theirs = ours[WARM_VERSIONS:], theirs[WARM_VERSIONS:]
    ratios = [our / their for our, their in zip(ours, theirs, strict=True)]
    conditions = (
        f"{num_bytes / 2**20:g} MiB in chunks of {CHUNK_BYTES / 2**20:g} MiB, {'ipc' if kind.ipc else 'TCP'},"
        f" CURVE {'on' if kind.curve else 'off'}, BLAKE3 of each chunk made and checked; ours: until a node in"
        " another process has verified the file's digest, too; bare: from mapped shared memory into mapped, warm"
        f" shared memory, one thread at each end; median of {repeats} rounds in turn,"
        f" {min(ratios):.2f} to {max(ratios):.2f}"
    )
    return [
        Row(f"{kind.name}_over_socket", median(ratios), "x", conditions),
        Row(f"{kind.name}_GBps", median(ours), "GB/s", conditions),
        Row(kind.bare, median(theirs), "GB/s", conditions),
    ]


@contextmanager
def _hop(folder: Path, kind: Kind, num_bytes: int) -> Iterator[Measure]:
    """A root and a child: from where the root has a version until the child has it."""
    keys = RelayKeys.generate() if kind.curve else None
    weights = torch.randint(0, 256, (num_bytes + PAGE_BYTES,), dtype=torch.uint8)
    cuts = cycle((num_bytes, num_bytes + PAGE_BYTES))  # sizes that do not fit: no deltas
    with Tree(folder, keys=keys, leaf=True, ipc=kind.ipc) as tree:

        def measure() -> float:
            tree.publish([("weights", weights[: next(cuts)])])
            elapsed_s, report = tree.await_last()
            assert report.wire_bytes == report.num_bytes, f"it came in part as deltas: {report}"
            return elapsed_s

        yield measure
