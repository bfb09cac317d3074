"""Processes of a benchmark's own: each does one piece of work and is told over a pipe when to begin.

Invariant: times that cross processes are of `time.monotonic`, one clock for a whole host, and no process outlives
its `Worker`, nor the process that made it.
"""

import multiprocessing as mp
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Self, TypeVar

import laminar_py.runtime.cluster  # noqa: F401 (sets the allocator that the processes of a run have, and these get)

PATIENCE_S = 120.0  # for any one answer
END_S = 10.0
READY = "ready"

Answer = TypeVar("Answer")
Work = Callable[[Connection], None]  # with the end of a pipe to the process that started it

_context = mp.get_context("forkserver")
PRELOADED = ["torch.distributed", "safetensors.torch", "laminar_lab.bench.relay.tree"]  # else seconds for each
_context.set_forkserver_preload(PRELOADED)


class Worker:
    """A process that runs `work`, e.g. `Worker(partial(receive, path=path))`; a context that ends it.

    `within` is called there before, e.g. to enter a network namespace.
    """

    def __init__(self, work: Work, *, within: Callable[[], None] | None = None) -> None:
        self._pipe, there = _context.Pipe()
        self._process = _context.Process(target=_run, args=(work, there, within), daemon=True)
        self._process.start()
        there.close()  # or the end of the process would not show

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None, f"{self._process.name} has not started"
        return self._process.pid

    def tell(self, word: object) -> None:
        """Say something to it."""
        self._pipe.send(word)

    def hear(self, kind: type[Answer]) -> Answer:
        """Next answer. Raises `TimeoutError`, or `EOFError` if the process died, whose own error is on stderr."""
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"{self._process.name} said nothing in {PATIENCE_S:g} s")
        answer = self._pipe.recv()
        assert isinstance(answer, kind), f"{self._process.name} said {answer!r}, no {kind.__name__}"
        return answer

    def ask(self, word: object, kind: type[Answer]) -> Answer:
        """Say something and hear the answer."""
        self.tell(word)
        return self.hear(kind)

    def await_ready(self) -> None:
        """Wait until the process says `READY`."""
        word = self.hear(str)
        assert word == READY, f"{self._process.name} said {word}"

    def kill(self) -> None:
        """SIGKILL: no chance to tidy up."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.join(END_S)
        self._pipe.close()


Start = Callable[[int, Work], Worker]  # starts a process on the host of that number


def here(_: int, work: Work) -> Worker:
    """Start a process on this host."""
    return Worker(work)


def _run(work: Work, pipe: Connection, within: Callable[[], None] | None) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    if within is not None:
        within()
    work(pipe)


def _end_with_parent() -> None:
    """End this process with the one that made it, even if that is killed and could end nobody."""
    parent = mp.parent_process()
    assert parent is not None, "a worker is never the first process"
    parent.join()
    os._exit(1)
