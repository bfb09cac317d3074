"""Processes of a benchmark's own: each does one piece of work and is told over a pipe when.

Used by the benchmarks of the relay. Invariant: times that cross processes are of `time.monotonic`, one clock for a
whole host, and no process outlives its `Worker`.
"""

import asyncio
import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self, TypeVar

from laminar_py.relay.messages import RelayEvent, VersionComplete
from laminar_py.relay.node import RelayNode
from laminar_py.relay.transport import RelayKeys

PATIENCE_S = 120.0  # for any one answer
END_S = 10.0

Answer = TypeVar("Answer")


class Worker:
    """A process that runs `work(pipe, *arguments)`, e.g. `Worker(receive, path)`; a context that ends it."""

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        context = mp.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=work, args=(there, *arguments), daemon=True)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.join(END_S)
        self._pipe.close()


class NodeWorker(Worker):
    """A relay node in a process of its own, which listens from here on."""

    def __init__(
        self,
        name: str,
        *,
        store: Path,
        keys: RelayKeys | None,
        parents: Sequence[str] = (),
        host: str = "127.0.0.1",
        chunk_bytes: int,
    ) -> None:
        super().__init__(_relay, name, store, keys, parents, host, chunk_bytes)
        self.endpoint = self.hear(str)

    def completed(self, version: int) -> tuple[float, VersionComplete]:
        """When the version was complete and verified there; versions must be asked for in order."""
        while True:
            moment, event = self.hear(tuple)
            assert isinstance(event, VersionComplete), f"waited for version {version}: {event}"
            if event.version == version:
                return moment, event


def _relay(
    pipe: Connection,
    name: str,
    store: Path,
    keys: RelayKeys | None,
    parents: Sequence[str],
    host: str,
    chunk_bytes: int,
) -> None:
    def report(event: RelayEvent) -> None:
        pipe.send((time.monotonic(), event))

    async def relay() -> None:
        node = RelayNode(
            name, store=store, keys=keys, parents=parents, host=host, chunk_bytes=chunk_bytes, emit=report
        )
        await node.start()
        pipe.send(node.endpoint)
        await node.run()

    asyncio.run(relay())
