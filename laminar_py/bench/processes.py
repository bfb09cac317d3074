"""Processes of a benchmark's own: each does one piece of work and is told over a pipe when.

Used by the benchmarks of the relay. Invariant: times that cross processes are of `time.monotonic`, one clock for a
whole host, and no process outlives its `Worker`, nor the process that made it.
"""

import multiprocessing as mp
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from threading import Thread
from typing import Self, TypeVar

import laminar_py.cluster  # noqa: F401 (sets the allocator that the processes of a run have, and these get)

PATIENCE_S = 120.0  # for any one answer
END_S = 10.0
READY = "ready"

Answer = TypeVar("Answer")
Measure = Callable[[], float]  # one round of one side, in seconds

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "safetensors.torch"]
)  # else seconds for each process


class Worker:
    """A process that runs `work(pipe, *arguments)`, e.g. `Worker(receive, path)`; a context that ends it."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._pipe, there = _context.Pipe()
        self._process = _context.Process(target=_run, args=(work, there, *arguments), daemon=True)
        self._process.start()
        there.close()  # or the end of the process would not show

    def tell(self, word: object) -> None:
        """Say something to it."""
        self._pipe.send(word)

    def hear(self, kind: type[Answer]) -> Answer:
        """What it says next. Raises `TimeoutError`, or `EOFError` if it died; then its own error is on stderr."""
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"{self._process.name} said nothing in {PATIENCE_S:g} s")
        answer = self._pipe.recv()
        assert isinstance(answer, kind), f"{self._process.name} said {answer!r}, no {kind.__name__}"
        return answer

    def await_ready(self) -> None:
        """Until it says `READY`."""
        word = self.hear(str)
        assert word == READY, f"{self._process.name} said {word}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.join(END_S)
        self._pipe.close()


def _run(work: Callable[..., None], pipe: Connection, *arguments: object) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    work(pipe, *arguments)


def _end_with_parent() -> None:
    """Even if that is killed, and could end nobody."""
    parent = mp.parent_process()
    assert parent is not None, "a worker is never the first process"
    parent.join()
    os._exit(1)


@contextmanager
def crew(count: int, work: Callable[..., None], *arguments: object) -> Iterator[list[Worker]]:
    """That many processes, each with its number for the first argument; here once all have said `READY`."""
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(work, number, *arguments)) for number in range(count)]
        for worker in workers:
            worker.await_ready()
        yield workers
