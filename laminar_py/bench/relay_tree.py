"""A small relay tree for measurements: a publisher here, its root and perhaps a child in processes of their own.

Used by the benchmarks of the relay. Invariant: a version is published only when the one before is complete at the
last node, so nothing is overtaken.
"""

import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from torch import Tensor

from laminar_py.bench.processes import PATIENCE_S
from laminar_py.bench.relay_node import CHUNK_BYTES, NodeWorker
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.store.version import folder_name
from laminar_py.relay.store.versions import SPARE
from laminar_py.relay.wire.messages import VersionComplete
from laminar_py.relay.wire.transport import RelayKeys

WARM_VERSIONS = 4  # the fourth is the first to be written over the pages of another


class Tree:
    """E.g. `Tree(folder, keys=None, leaf=True, ipc=True)`; its sockets and stores are in `folder`."""

    def __init__(
        self,
        folder: Path,
        *,
        keys: RelayKeys | None,
        leaf: bool,
        ipc: bool = False,
        adapter_config: bytes | None = None,
    ) -> None:
        folder.mkdir()
        self._store = folder / "root"
        self._last_store = folder / "leaf" if leaf else self._store
        with ExitStack() as stack:
            self.root = stack.enter_context(NodeWorker(folder, "root", keys=keys, parents=[], ipc=ipc))
            parents = [self.root.endpoint]
            self.last = self.root
            if leaf:
                self.last = stack.enter_context(NodeWorker(folder, "leaf", keys=keys, parents=parents, ipc=ipc))
            self._publisher = Publisher(
                self._store, self.root.endpoint, keys, chunk_bytes=CHUNK_BYTES, adapter_config=adapter_config
            )
            stack.callback(self._publisher.close)
            self._stack = stack.pop_all()
        self._version = 0

    @property
    def last_folder(self) -> Path:
        """Of the newest version at the last node, once that is complete."""
        return self._last_store / folder_name(self._version)

    def publish(self, tensors: Iterable[tuple[str, Tensor]]) -> float:
        """The next version. Returns the stall in seconds; the rest goes on in threads and other processes."""
        self._version += 1
        return self._publisher.publish(self._version, tensors)

    def await_last(self) -> tuple[float, VersionComplete]:
        """What the last node reported of the version, and for how many seconds the root had had it by then."""
        self._publisher.sealed(self._version)
        began, report = self.root.completed(self._version)
        ended = began
        if self.last is not self.root:
            ended, report = self.last.completed(self._version)
        return ended - began, report

    def await_spare(self) -> None:
        """Until the root has put aside warm pages for the next version, if there have been versions enough."""
        deadline = time.monotonic() + PATIENCE_S
        while self._version >= WARM_VERSIONS - 1 and not (self._store / SPARE).exists():
            assert time.monotonic() < deadline, f"{self._store} has no spare"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
