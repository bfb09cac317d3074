"""What `laminar bench relay` measures: hops, stalls and deltas of the relay on one host.

`python -m benchmarks relay` compares it with sockets and others, and measures it over hosts with narrow links.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config

from laminar_py.bench.models import SMALL
from laminar_py.bench.relay import hop, steps
from laminar_py.bench.report import Row
from laminar_py.bench.turns import Tell

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class RelaySize:
    """How much travels; only tests use another than `FULL`."""

    num_bytes: int  # of a version that hops
    model: Qwen3Config  # whose weights are published from step to step


FULL = RelaySize(256 * 2**20, SMALL)


def rows(
    parts: Sequence[str], *, repeats: int, tell: Tell, size: RelaySize = FULL, shm: Path = SHARED_MEMORY
) -> list[Row]:
    """Figures of these parts, medians over `repeats` rounds; `tell` hears of each. Takes minutes.

    All versions lie in `shm`. Sets this process to one torch thread.
    """
    torch.set_num_threads(1)
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=shm) as name:
        folder = Path(name)
        if "hop" in parts:
            found += hop.rows(folder, num_bytes=size.num_bytes, repeats=repeats, tell=tell)
        if "publish" in parts:
            found += steps.stall_rows(folder, size.model, repeats=repeats, tell=tell)
        if "delta" in parts:
            found += steps.delta_rows(folder, size.model, repeats=repeats, tell=tell)
    return found
