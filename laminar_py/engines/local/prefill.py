"""Requests in the embedded engine, and the prefill of their prompts into the KV cache. Called by the scheduler.

Members of a group share the prefill of their prompt: one slot computes it and the other slots copy its blocks. One
batch has at most `PREFILL_TOKENS` tokens, padding included, so a prefill delays decoding for a bounded time
(`tests/engines/local/test_scheduler.py`). A long prompt takes several batches.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laminar_py.engines.base import EngineJob
from laminar_py.engines.local.attention import PrefillAttention
from laminar_py.engines.local.kv import BlockPool, Indices
from laminar_py.engines.local.model import LocalModel
from laminar_py.records.codec import IntArray

PREFILL_TOKENS = 512


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens that a group of slots needs in the cache, e.g. `Prefill(ids, [3, 7])`.

    Slot 3 computes them; slot 7 copies them at the end.
    """

    ids: IntArray  # [n]
    slots: list[int]
    done: int = 0  # tokens that are in the cache
    version: int = -1  # the oldest weights that computed any of them, -1 for none

    def computed_by(self, version: int) -> bool:
        """True if the weights of `version` computed everything so far, or nothing is computed yet."""
        return self.done == 0 or self.version == version


class PrefillQueue:
    """Prefills in the order of their arrival. Computes them in batches."""

    def __init__(self, model: LocalModel, pool: BlockPool, *, max_len: int) -> None:
        self._model, self._pool, self._max_len = model, pool, max_len
        self._queue: deque[Prefill] = deque()

    def add(self, slot: int, ids: IntArray, *, done: int = 0, version: int = -1) -> Prefill:
        """Queue the prefill of `ids [n]` for `slot`, whose cache has the first `done` < n of them by `version`.

        Until it is done, callers may append other slots that need the same tokens to `Prefill.slots`.
        """
        prefill = Prefill(ids, [slot], done, version)
        self._queue.append(prefill)
        return prefill

    def leave(self, slot: int, prefill: Prefill) -> None:
        """Take `slot`, whose blocks are freed, out of a prefill. Drops the prefill if no slot needs it."""
        if prefill.slots[0] == slot:
            prefill.done = 0  # the next slot starts again, in its own blocks
        prefill.slots.remove(slot)
        if not prefill.slots:
            self._queue.remove(prefill)

    def run(self, version: int) -> list[Prefill]:
        """Compute one batch, if any, with the weights of `version`. Returns the prefills that finished.

        After the next `BlockPool.compact` every slot of a finished prefill holds all its tokens.
        """
        batch, lengths = self._next_batch()
        if not batch:
            return []
        for prefill in batch:
            if prefill.done == 0:
                prefill.version = version
        self._compute(batch, np.array(lengths))
        finished = [prefill for prefill in batch if prefill.done == len(prefill.ids)]
        for prefill in finished:
            self._queue.remove(prefill)
            source, *others = prefill.slots
            for slot in others:
                self._pool.share(source, slot, len(prefill.ids))
        return finished

    def _next_batch(self) -> tuple[list[Prefill], list[int]]:
        """The first prefills of the queue that fit into one batch, and the number of tokens from each."""
        batch: list[Prefill] = []
        lengths: list[int] = []
        for prefill in self._queue:
            length = min(len(prefill.ids) - prefill.done, PREFILL_TOKENS)
            if batch and (len(batch) + 1) * max(length, *lengths) > PREFILL_TOKENS:
                break
            batch.append(prefill)
            lengths.append(length)
        return batch, lengths

    def _compute(self, batch: Sequence[Prefill], lengths: Indices) -> None:
        """Prefill the next `lengths` tokens of each request in one padded batch, and write their KV cache."""
        starts = np.array([prefill.done for prefill in batch])
        slots = np.array([prefill.slots[0] for prefill in batch])
        ids = np.zeros((len(batch), int(lengths.max())), np.int64)
        for row, prefill in enumerate(batch):
            chunk = slice(prefill.done, prefill.done + int(lengths[row]))
            ids[row, : lengths[row]] = prefill.ids[chunk]
            prefill.done = chunk.stop
            self._pool.extend(prefill.slots[0], chunk.stop)
        # Padding may run past the last position. Nothing reads its results.
        positions = np.minimum(starts[:, None] + np.arange(ids.shape[1]), self._max_len - 1)
        attention = PrefillAttention(self._pool, slots=slots, starts=starts, lengths=lengths)
        tokens, places = (torch.from_numpy(values.ravel()) for values in (ids, positions))
        self._model.prefill(tokens, places, attention=attention)


@dataclass(slots=True, eq=False, kw_only=True)
class Job(EngineJob):
    """A request in the engine, e.g. a waiting request: `Job(ticket=7, request=request, response=prefix_ids)`."""

    response: IntArray  # [L] its tokens when it last joined the waiting queue
    slot: int = -1  # while it runs
    prefill: Prefill | None = None

    @property
    def cached_ids(self) -> IntArray:
        """Tokens that must be in the cache before the request decodes: all but the last."""
        return np.concatenate([self.request.prompt_ids, self.response])[:-1]

    def can_lend_to(self, other: "Job", version: int) -> bool:
        """True if this job's cache has, or will have, the prompt of `other` by the weights of `version`.

        Both must be in one group. A job with response tokens computes its own cache.
        """
        if len(other.response) or self.request.group_id != other.request.group_id:
            return False
        if self.prefill is None:
            usable = self.version == version
        else:
            usable = self.prefill.computed_by(version) and not len(self.response)
        return usable and np.array_equal(self.request.prompt_ids, other.request.prompt_ids)
