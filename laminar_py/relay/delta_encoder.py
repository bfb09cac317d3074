"""Comparisons of versions with the version before: deltas for children, and change files for subscribers.

`NodeVersions` owns a `DeltaEncoder`. At the root it makes the deltas that all nodes pass on. On any node it makes
the change file of a complete version that did not arrive as deltas.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from laminar_py.relay.changes import ChangesFile
from laminar_py.relay.delta import pack_or_none
from laminar_py.relay.digests import delta_proof
from laminar_py.relay.stored_version import ChunkDelta, StoredVersion
from laminar_py.relay.version_store import VersionStore

log = logging.getLogger(__name__)

THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # that make deltas of chunks, or chunks of deltas
MOST_USELESS_DELTAS = 8  # the encoder stops if its first deltas, as many as this, make no chunk smaller


class DeltaEncoder:
    """Compares versions at the root with the version before, chunk by chunk, in threads: deltas and changes.

    A node without the version before gets every chunk in full. A node skips a version if two are published during
    its download, or if the root finds two at once. So where versions come faster than a full version travels, all
    may travel in full. Chunks also travel in full to a node that still waits for deltas when a newer version is
    published, or that asks for an old version by number. A child that waits for a delta always gets the delta or
    the full chunk (`tests/relay/test_tree_delta.py`). `forward_chunk` is called for each chunk that children may
    have now, and `done` when the base is no longer needed.
    """

    def __init__(
        self,
        store: VersionStore,
        forward_chunk: Callable[[StoredVersion, int, int], None],
        done: Callable[[], None],
    ) -> None:
        self._store = store
        self._forward_chunk = forward_chunk
        self._done = done
        self._comparisons: list[_Comparison] = []

    @property
    def bases(self) -> list[StoredVersion]:
        """Versions that others are compared with."""
        return [comparison.base for comparison in self._comparisons]

    def start(
        self,
        stored: StoredVersion,
        base: StoredVersion,
        group: asyncio.TaskGroup,
        *,
        payloads: bool,
        changes: ChangesFile | None,
    ) -> None:
        """Start to compare `stored` with `base`, for `payloads` to children, a change file, or both."""
        version = stored.manifest.version
        if not (payloads or changes is not None):
            return
        chunks = [
            (file, i)
            for file in range(len(stored.manifest.files))
            for i in range(stored.manifest.num_chunks(file))
        ]
        if payloads:
            stored.base, stored.unencoded = base.manifest.version, set(chunks)
        self._comparisons.append(
            comparison := _Comparison(stored=stored, base=base, payloads=payloads, changes=changes)
        )
        if changes is not None:
            self._store.comparing.add(version)
        group.create_task(self._compare(comparison, iter(chunks)), name=f"encode-{version}")

    async def _compare(self, comparison: "_Comparison", chunks: Iterator[tuple[int, int]]) -> None:
        """Compare all chunks in `THREADS` tasks, and forward each chunk as soon as its delta is there."""
        stored, makes_changes = comparison.stored, comparison.changes is not None

        async def compare_chunks() -> None:
            """Compare chunks from the iterator that all coroutines share, until none is left."""
            for file, index in chunks:
                has_changes = comparison.changes is not None
                try:
                    delta = await asyncio.to_thread(comparison.compare, file, index)
                except FileNotFoundError:  # an overtaken version was retired before this call
                    assert comparison not in self._comparisons, (
                        f"{comparison.base.folder} went during a comparison"
                    )
                if comparison not in self._comparisons:
                    return  # `stop` was called meanwhile
                if comparison.payloads:
                    comparison.num_useless += delta is None
                    stored.add_delta(file, index, delta)
                    self._forward_chunk(stored, file, index)
                if has_changes and comparison.changes is None:
                    self._store.comparing.discard(stored.manifest.version)
                    self._done()  # pulls may wait for the changes
                if comparison.is_useless:
                    self.stop(stored)
                    return

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(THREADS):
                    workers.create_task(compare_chunks())
            if comparison in self._comparisons:
                self._comparisons.remove(comparison)
                num_bytes = sum(len(delta.payload) for delta in stored.deltas.values())
                log.debug("compared version %d: %d bytes of deltas", stored.manifest.version, num_bytes)
                if comparison.changes is not None and comparison.changes.finish() is not None:
                    self._store.add_changes(stored, comparison.base.manifest.version)
        finally:
            if makes_changes:  # else the mark is of another comparison, which makes the changes
                self._store.comparing.discard(stored.manifest.version)
        self._done()

    def close(self) -> None:
        """Let the threads end with the chunks that they compare now."""
        for comparison in self._comparisons:
            comparison.drop_changes()
        self._comparisons.clear()

    def stop(self, stored: StoredVersion) -> None:
        """Stop comparing a version, drop its deltas, and send chunks that wait for a delta in full."""
        stopped = [comparison for comparison in self._comparisons if comparison.stored is stored]
        self._comparisons = [comparison for comparison in self._comparisons if comparison.stored is not stored]
        for comparison in stopped:
            comparison.drop_changes()
            self._store.comparing.discard(stored.manifest.version)
        waiting = sorted(stored.unencoded)
        if any(comparison.payloads for comparison in stopped):
            stored.forget_deltas()
        for file, index in waiting:
            self._forward_chunk(stored, file, index)


@dataclass(slots=True, eq=False, kw_only=True)
class _Comparison:
    """A version that is being compared with its base, for `payloads` to children, for `changes`, or for both."""

    stored: StoredVersion
    base: StoredVersion
    payloads: bool
    changes: ChangesFile | None
    num_useless: int = 0  # chunks without a delta

    @property
    def is_useless(self) -> bool:
        """True if there will be no changes, and the first `MOST_USELESS_DELTAS` deltas save nothing."""
        if self.changes is not None:
            return False
        return not self.payloads or (self.num_useless >= MOST_USELESS_DELTAS and not self.stored.deltas)

    def compare(self, file: int, index: int) -> ChunkDelta | None:
        """Add the difference of a chunk to the changes, and return its delta for children, if it has one.

        Runs in a thread.
        """
        difference, changes = self.stored.compare(self.base, file, index), self.changes
        if difference is None:
            self.drop_changes()
            return None
        if changes is not None and not changes.add(file, index, difference):
            self.changes = None
        payload = pack_or_none(difference, self.base.chunk_data(file, index)) if self.payloads else None
        return None if payload is None else ChunkDelta(payload, delta_proof(self.base.manifest.digest, payload))

    def drop_changes(self) -> None:
        """Delete the unfinished change file, if there is one."""
        changes, self.changes = self.changes, None  # another thread may do the same
        if changes is not None:
            changes.drop()
