"""Prompt tokens on their way into the KV cache: which are computed next, and which slots copy them.

Called by the scheduler. Invariant: one batch has at most `PREFILL_TOKENS` tokens, padding included, so decoding
is never held up for longer than that takes; a long prompt goes in over several batches.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from laminar_py.engines.local.attention import PrefillAttention
from laminar_py.engines.local.kv import BlockPool, Indices
from laminar_py.engines.local.model import LocalModel
from laminar_py.records.codec import IntArray

PREFILL_TOKENS = 512


@dataclass(slots=True, eq=False)
class Prefill:
    """Tokens for a group of slots, e.g. `Prefill(ids, [3, 7])`: slot 3 computes them, 7 copies them at the end."""

    ids: IntArray  # [n]
    slots: list[int]
    done: int = 0  # tokens that are in the cache
    version: int = -1  # weights that computed the first of those, the oldest

    def made_by(self, version: int) -> bool:
        """True where all of it is, or will be if `version` stays, computed by the weights of `version`."""
        return self.done == 0 or self.version == version


class PrefillQueue:
    """Prefills in the order they came."""

    def __init__(self, model: LocalModel, pool: BlockPool, *, max_len: int, device: torch.device) -> None:
        self._model, self._pool, self._max_len, self._device = model, pool, max_len, device
        self._queue: deque[Prefill] = deque()

    def add(self, slot: int, ids: IntArray, *, done: int = 0, version: int = -1) -> Prefill:
        """Put `ids [n]` into the cache of `slot`, which has `done` < n of them, computed by `version`.

        Other slots may join until it is done.
        """
        prefill = Prefill(ids, [slot], done, version)
        self._queue.append(prefill)
        return prefill

    def leave(self, slot: int, prefill: Prefill) -> None:
        """`slot` wants it no more, and its blocks are gone."""
        if prefill.slots[0] == slot:
            prefill.done = 0  # the next one begins anew, in blocks of its own
        prefill.slots.remove(slot)
        if not prefill.slots:
            self._queue.remove(prefill)

    def run(self, version: int) -> list[Prefill]:
        """Compute one batch, if any, with the weights of `version`.

        Those that are done have their tokens in the cache of all their slots.
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
        """The first prefills that fit together, and how many tokens of each."""
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
        starts = np.array([prefill.done for prefill in batch])
        slots = np.array([prefill.slots[0] for prefill in batch])
        ids = np.zeros((len(batch), int(lengths.max())), np.int64)
        for row, prefill in enumerate(batch):
            chunk = slice(prefill.done, prefill.done + int(lengths[row]))
            ids[row, : lengths[row]] = prefill.ids[chunk]
            prefill.done = chunk.stop
            self._pool.extend(prefill.slots[0], chunk.stop)
        # Padding may run past the last position; what it computes is thrown away.
        positions = np.minimum(starts[:, None] + np.arange(ids.shape[1]), self._max_len - 1)
        attention = PrefillAttention(self._pool, slots=slots, starts=starts, lengths=lengths)
        tokens, places = (torch.from_numpy(values.ravel()).to(self._device) for values in (ids, positions))
        self._model.prefill(tokens, places, attention=attention)
