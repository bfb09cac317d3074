"""What `laminar bench relay` measures on one host; `relay_hosts` has the figures of several.

Each figure is a ratio to a raw limit, or to what one would use instead, that took turns with it in the same run.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config

from laminar_py.bench import relay_fanout, relay_hop, relay_learner
from laminar_py.bench.report import Row

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Scale:
    """How large all is; only tests use another than `FULL`."""

    num_bytes: int  # of a version that hops or goes to replicas
    num_replicas: int
    model: Qwen3Config  # whose weights are published from step to step


FULL = Scale(256 * 2**20, 7, relay_learner.MODEL)


def rows(
    *, repeats: int, tell: Callable[[str], None], scale: Scale = FULL, shm: Path = SHARED_MEMORY
) -> list[Row]:
    """All figures of one host, medians over `repeats` rounds; `tell` hears of each. Takes minutes.

    All versions, and Ray's objects, lie in `shm`. Sets this process to one torch thread.
    """
    torch.set_num_threads(1)
    size = scale.num_bytes
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=shm) as folder:
        parts = [
            relay_hop.rows(Path(folder), num_bytes=size, repeats=repeats, tell=tell),
            relay_fanout.rows(
                Path(folder), num_bytes=size, num_replicas=scale.num_replicas, repeats=repeats, tell=tell
            ),
            relay_learner.rows(Path(folder), model=scale.model, repeats=repeats, tell=tell),
        ]
    return [row for part in parts for row in part]
