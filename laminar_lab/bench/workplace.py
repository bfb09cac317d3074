"""Workplace of a benchmark: a folder of its own, in a process whose torch has one thread."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def workplace(within: Path | None = None) -> Iterator[Path]:
    """A new folder, e.g. in shared memory, deleted at the end. Sets this process to one torch thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=within) as name:
        yield Path(name)
