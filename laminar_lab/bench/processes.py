"""Processes of a benchmark: each does one piece of work, and receives over a pipe when to begin.

Times that cross processes come from `time.monotonic`, which is one clock for a whole host. A process ends with its
`Worker`, and with the process that made it.
"""

import multiprocessing as mp
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Thread
from typing import Self, TypeVar

import laminar_py.runtime.cluster  # noqa: F401 (sets the allocator as in a run)

PATIENCE_S = 120.0  # for any one answer
END_S = 10.0

Answer = TypeVar("Answer")
Work = Callable[[Connection], None]  # takes the end of a pipe to the process that started it

_context = mp.get_context("forkserver")
PRELOADED = [
    "torch.distributed",
    "safetensors.torch",
    "laminar_lab.bench.relay.tree",
]  # without it each process spends seconds on imports
_context.set_forkserver_preload(PRELOADED)


class Worker:
    """A process that runs `work`, e.g. `Worker(partial(receive, path=path))`; the end of the context ends it."""

    def __init__(self, work: Work) -> None:
        self._pipe, there = _context.Pipe()
        self._process = _context.Process(target=_run, args=(work, there), daemon=True)
        self._process.start()
        there.close()  # or the end of the process would not show

    def send(self, message: object) -> None:
        """Send a message to the process."""
        self._pipe.send(message)

    def receive(self, kind: type[Answer]) -> Answer:
        """Return the next answer. Raises `TimeoutError`, or `EOFError` if the process crashed.

        Its error is on stderr.
        """
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError(f"{self._process.name} sent nothing in {PATIENCE_S:g} s")
        answer = self._pipe.recv()
        assert isinstance(answer, kind), f"{self._process.name} sent {answer!r}, no {kind.__name__}"
        return answer

    def request(self, message: object, kind: type[Answer]) -> Answer:
        """Send a message and return the answer."""
        self.send(message)
        return self.receive(kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.join(END_S)
        self._pipe.close()


def _run(work: Work, pipe: Connection) -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    work(pipe)


def _end_with_parent() -> None:
    """End this process with its parent, also where a SIGKILL ends the parent."""
    parent = mp.parent_process()
    assert parent is not None, "a worker is never the first process"
    parent.join()
    os._exit(1)
