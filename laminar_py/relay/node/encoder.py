"""Makes a version's deltas against the version before, chunk by chunk, at the root. Owned by the node.

Invariant: whoever waits for the delta of a chunk gets that, or the chunk itself: also when weights turn out to
change everywhere, and when the version is overtaken.
"""

import asyncio
from collections.abc import Callable, Iterable

from laminar_py.relay.cores import num_cores
from laminar_py.relay.store.version import StoredVersion

ENCODERS = max(1, min(8, num_cores() // 2))  # threads
PATIENCE = 8  # chunks without a delta, before any has one, after which the rest is not tried


class Encoder:
    """`forward` keeps the promises of a chunk that is ready now; `done` is told that a base is needed no more."""

    def __init__(self, forward: Callable[[StoredVersion, int, int], None], done: Callable[[], None]) -> None:
        self._forward = forward
        self._done = done

    def start(self, stored: StoredVersion, older: Iterable[StoredVersion], group: asyncio.TaskGroup) -> None:
        """Begin, if there is a version before that it can build on."""
        base = max(older, key=lambda one: one.manifest.version, default=None)
        if base is None or not stored.manifest.fits(base.manifest):
            return
        stored.base = base.manifest.version
        files = range(len(stored.manifest.files))
        stored.unencoded = {(file, i) for file in files for i in range(stored.manifest.num_chunks(file))}
        group.create_task(self._encode(stored, base), name=f"encode-{stored.manifest.version}")

    async def _encode(self, stored: StoredVersion, base: StoredVersion) -> None:
        left = iter(sorted(stored.unencoded))
        vain = 0

        async def work() -> None:
            nonlocal vain
            for file, index in left:
                try:
                    delta = await asyncio.to_thread(stored.encode, base, file, index)
                except FileNotFoundError:  # retired, which an overtaken version may be
                    assert stored.base is None, f"{base.folder} went while {stored.folder} was built on it"
                if stored.base is None:
                    return  # given up meanwhile
                stored.encoded(file, index, delta)
                self._forward(stored, file, index)
                vain += delta is None
                if vain >= PATIENCE and not stored.deltas:
                    self.forget(stored)

        async with asyncio.TaskGroup() as workers:
            for _ in range(ENCODERS):
                workers.create_task(work())
        self._done()

    def forget(self, stored: StoredVersion) -> None:
        """No deltas of this version any more."""
        waiting = sorted(stored.unencoded)
        stored.forget_deltas()
        for file, index in waiting:
            self._forward(stored, file, index)
