"""The same bytes by a broadcast of gloo, on one host or over several. Used by `fanout` and `hosts`.

Processes, connections and memory exist before a round begins.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from laminar_lab.bench.processes import PATIENCE_S, READY, Start
from laminar_lab.bench.relay.tree import Bytes, raw
from laminar_lab.bench.report import Side
from laminar_py.relay import PAGE_BYTES

TENSOR_BYTES = 8 * 2**20
DIGEST, GO = "digest", "go"
GLOO = (
    "broadcast from and into memory that is not shared, neither encrypted nor digested; a round begins when every"
    " rank is there"
)


def make_tensors(num_bytes: int, *, tensor_bytes: int = TENSOR_BYTES, seed: int = 0) -> dict[str, Tensor]:
    """Make random bf16 tensors of that size together."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(tensor_bytes, num_bytes - start) for start in range(0, num_bytes, tensor_bytes)]
    return {
        f"weight.{i}": torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).view(torch.bfloat16)
        for i, size in enumerate(sizes)
    }


def touch(data: Bytes) -> None:
    """Read one byte of each page of `data [n]`."""
    data[::PAGE_BYTES].sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gloo:
    """A process group whose rank 0 broadcasts its tensors into the tensors of the other ranks."""

    count: int  # ranks
    num_bytes: int
    rendezvous: str  # URL at which they meet
    interface: str  # network interface of the group
    tensor_bytes: int = TENSOR_BYTES

    @contextmanager
    def side(self, start: Start) -> Iterator[Side]:
        """Start each rank on the host of its number, and yield the seconds of a round.

        Fails at the end unless every rank has the same bytes.
        """
        with ExitStack() as stack:
            workers = [stack.enter_context(start(rank, partial(self._run, rank))) for rank in range(self.count)]
            for worker in workers:
                worker.await_ready()

            def measure(_: int) -> float:
                for worker in workers:
                    worker.send(GO)
                spans = [worker.receive(tuple) for worker in workers]
                return float(max(ended for _, ended in spans) - min(began for began, _ in spans))

            yield measure
            digests = {worker.request(DIGEST, str) for worker in workers}
            assert len(digests) == 1, f"{len(digests)} different contents after a round"

    def _run(self, rank: int, pipe: Connection) -> None:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        patience = timedelta(seconds=PATIENCE_S)
        dist.init_process_group(
            "gloo", init_method=self.rendezvous, rank=rank, world_size=self.count, timeout=patience
        )
        tensors = list(make_tensors(self.num_bytes, tensor_bytes=self.tensor_bytes, seed=rank).values())
        dist.broadcast(torch.zeros(PAGE_BYTES), 0)  # connects
        pipe.send(READY)
        while True:
            if pipe.recv() == DIGEST:
                digest = hashlib.blake2b()
                for tensor in tensors:
                    digest.update(raw(tensor).data)
                pipe.send(digest.hexdigest())
                continue
            dist.barrier()
            began = time.monotonic()
            for tensor in tensors:
                dist.broadcast(tensor, src=0)
            if rank:
                for tensor in tensors:
                    touch(raw(tensor))
            pipe.send((began, time.monotonic()))
