"""A root and its child, each in a process of its own; this process publishes to the root.

`laminar bench relay`, `laminar calibrate` and `experiments/gpu/publish.py` measure with it. The time of a report
is taken in the process that sends it, by `time.monotonic`, which is one clock for a whole host. A version is
published only after both nodes have the version before, so no version overtakes another.
"""

import asyncio
import multiprocessing as mp
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from torch import Tensor

import laminar_py.runtime.cluster  # noqa: F401 (sets the allocator as in a run)
from laminar_py.children import kernel
from laminar_py.config.cluster import Seal
from laminar_py.records.weights import TensorSource
from laminar_py.relay import SPARE, Publisher, RelayEvent, RelayKeys, RelayNode, VersionComplete, folder_name

CHUNK_BYTES = 4 * 2**20
WARM_VERSIONS = 4  # the fourth is the first to be written over the pages of another
LOCAL = "127.0.0.1"
PATIENCE_S = 600.0  # for any one message of a process

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["safetensors.torch", __name__])  # or each process spends seconds on imports


@contextmanager
def worker(work: Callable[[Connection], None]) -> Iterator[Connection]:
    """Run `work` in a process and yield the pipe to it; the end of the context ends the process."""
    pipe, there = _context.Pipe()
    process = _context.Process(target=_run, args=(work, there), daemon=True)
    process.start()
    there.close()  # or the end of the process would not show
    try:
        yield pipe
    finally:
        process.terminate()
        process.join()
        pipe.close()


def _run(work: Callable[[Connection], None], pipe: Connection) -> None:
    # the parent is the fork server, which ends with this benchmark even after a SIGKILL
    kernel.end_with_parent()
    work(pipe)


def receive(pipe: Connection) -> Any:
    """Return the next message. Raises `TimeoutError`, or `EOFError` if the process crashed."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError(f"a process sent nothing in {PATIENCE_S:g} s")
    return pipe.recv()


def _relay(
    pipe: Connection, *, store: Path, keys: RelayKeys | None, seal: Seal, lanes: int, parents: Sequence[str]
) -> None:
    """Run a node. Sends its endpoint, then the time and the report of each version that the node has verified."""

    def report(event: RelayEvent) -> None:
        if isinstance(event, VersionComplete):
            pipe.send((time.monotonic(), event))

    async def run() -> None:
        node = RelayNode(
            store.name,
            store=store,
            keys=keys,
            parents=parents,
            host=LOCAL,
            chunk_bytes=CHUNK_BYTES,
            seal=seal,
            lanes=lanes,
            emit=report,
        )
        await node.start()
        pipe.send(node.endpoint)
        await node.run()

    asyncio.run(run())


class RelayPair:
    """A publisher, its root and the root's child, e.g. `RelayPair(folder, keys=None)`, with stores in `folder`.

    With `adapter_config` versions are adapters, see `Publisher`. `RelayNode` explains `seal` and `lanes`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keys: RelayKeys | None,
        adapter_config: bytes | None = None,
        seal: Seal = Seal.AEAD,
        lanes: int = 1,
    ) -> None:
        folder.mkdir()
        self._version, self._store = 0, folder / "root"
        with ExitStack() as stack:
            relay = partial(_relay, keys=keys, seal=seal, lanes=lanes)
            self._root = stack.enter_context(worker(partial(relay, store=self._store, parents=())))
            endpoint: str = receive(self._root)
            child = partial(relay, store=folder / "child", parents=[endpoint])
            self._child = stack.enter_context(worker(child))
            receive(self._child)
            self._publisher = Publisher(self._store, chunk_bytes=CHUNK_BYTES, adapter_config=adapter_config)
            stack.callback(self._publisher.close)
            self._stack = stack.pop_all()

    @property
    def newest(self) -> Path:
        """Folder of the newest version at the root."""
        return self._store / folder_name(self._version)

    def publish(self, tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Publish the next version. Returns the stall in seconds; threads and processes do the rest."""
        return self.publish_sources([TensorSource.whole(name, tensor) for name, tensor in tensors])

    def publish_sources(self, sources: Sequence[TensorSource]) -> float:
        """Publish the next version of tensors that are read one by one. Returns the stall in seconds."""
        self._version += 1
        return self._publisher.publish_sources(self._version, sources)

    def await_last(self) -> tuple[float, VersionComplete]:
        """Wait until both nodes have the newest version.

        Returns the seconds from complete at the root until complete at the child, and the child's report.
        """
        published = self._publisher.completed(self._version)
        (began, _), (ended, report) = (self._completed(pipe) for pipe in (self._root, self._child))
        assert report.digest == published.digest, f"{report.node} has another version {self._version}"
        return ended - began, report

    def _completed(self, pipe: Connection) -> tuple[float, VersionComplete]:
        """Wait until a node has verified the newest version; return the moment and its report."""
        while True:
            moment, event = receive(pipe)
            if event.version == self._version:
                return moment, event

    def await_spare(self) -> None:
        """Wait until the root has put aside warm pages for the next version, after the first few."""
        deadline = time.monotonic() + PATIENCE_S
        while self._version >= WARM_VERSIONS - 1 and not (self._store / SPARE).exists():
            assert time.monotonic() < deadline, f"{self._store} has no spare"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
