"""State of every running sequence, as arrays over slots, so that a step touches no Python object per token.

The scheduler owns it. A slot is FREE, PREFILLING (the KV cache lacks part of its tokens) or DECODING. A decoding
slot has all its tokens but the last in the cache; the next step feeds the last token.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from laminar_py.engines.checks import response_limit
from laminar_py.engines.local.attention import Drafts
from laminar_py.engines.local.kv import Indices
from laminar_py.engines.local.sampling import PLAIN, Sampler, Seeds, hash_seeds
from laminar_py.records.codec import BoolArray, FloatArray, IntArray
from laminar_py.records.engine import GenerateRequest
from laminar_py.records.pieces import SamplingMask


class State(IntEnum):
    """State of a slot: FREE -> PREFILLING -> DECODING -> FREE, and PREFILLING -> FREE."""

    FREE = 0
    PREFILLING = 1
    DECODING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The B decoding slots, and their values that stay the same from step to step."""

    slots: Indices  # [B]
    seeds: Seeds  # [B]
    limits: Indices  # [B]
    stop_ids: Indices  # [B, most stop ids of a slot], padded with -1
    sampler: Sampler


class Slots:
    """Arrays over S slots; `ids` and `logprobs` are indexed by position in the response."""

    def __init__(self, num_slots: int, *, max_len: int) -> None:
        self._max_len = max_len
        # Tokens that the slots hold in the KV cache, or will hold after their prefill; other threads read it.
        self.kv_used = 0
        self.state: npt.NDArray[np.int8] = np.zeros(num_slots, np.int8)
        self.num_prompt: Indices = np.zeros(num_slots, np.int64)
        self.num_response: Indices = np.zeros(num_slots, np.int64)  # a resumed prefix included
        self.num_sent: Indices = np.zeros(num_slots, np.int64)  # response tokens that left in deltas
        self.limit: Indices = np.zeros(num_slots, np.int64)  # response tokens at which the request ends
        self.last_ids: Indices = np.zeros(num_slots, np.int64)  # token that the next step feeds
        self.ids: IntArray = np.zeros((num_slots, max_len), np.int32)
        self.logprobs: FloatArray = np.zeros((num_slots, max_len), np.float32)
        self.seeds: npt.NDArray[np.uint64] = np.zeros(num_slots, np.uint64)  # hashed
        self.temperatures: FloatArray = np.ones(num_slots, np.float32)
        self.top_k: Indices = np.zeros(num_slots, np.int64)
        self.top_p: FloatArray = np.ones(num_slots, np.float32)
        self.min_p: FloatArray = np.zeros(num_slots, np.float32)
        self.masks: list[list[IntArray]] = [[] for _ in range(num_slots)]  # [S] of unsent tokens, if recorded
        self.plain: BoolArray = np.ones(num_slots, np.bool_)  # temperature 1 and the whole vocabulary
        self.stop_ids: Indices = np.full((num_slots, 1), -1, np.int64)  # [S, most stop ids], padded with -1

    def occupy(self, slot: int, request: GenerateRequest, *, response: IntArray) -> None:
        """Put a request into a free slot, with the response tokens it has so far."""
        sampling, length = request.sampling, len(response)
        self.state[slot] = State.PREFILLING
        self.num_prompt[slot] = len(request.prompt_ids)
        self.num_response[slot] = self.num_sent[slot] = length
        self.kv_used += len(request.prompt_ids) + length - 1
        self.limit[slot] = response_limit(request, max_len=self._max_len)
        self.last_ids[slot] = response[-1] if length else request.prompt_ids[-1]
        self.ids[slot, :length] = response
        self.masks[slot] = []
        self.seeds[slot] = hash_seeds(np.array([sampling.seed % 2**64], np.uint64))[0]
        self.temperatures[slot] = sampling.temperature
        cut = (sampling.top_k, sampling.top_p, sampling.min_p)
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = cut
        self.plain[slot] = sampling.temperature == 1 and cut == (0, 1, 0)
        missing = len(sampling.stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(sampling.stop_ids)] = sampling.stop_ids

    def vacate(self, slot: int) -> None:
        """Mark `slot` as free, and subtract its tokens from `kv_used`."""
        self.kv_used -= int(self.num_prompt[slot] + self.num_response[slot]) - 1
        self.num_prompt[slot] = self.num_response[slot] = 0
        self.state[slot] = State.FREE

    def decoding(self) -> Rows:
        """Collect the decoding slots and their constants. Valid until a slot starts or stops to decode."""
        rows = np.flatnonzero(self.state == State.DECODING)
        return Rows(
            slots=rows,
            seeds=self.seeds[rows],
            limits=self.limit[rows],
            stop_ids=self.stop_ids[rows],
            sampler=self.sampler(rows),
        )

    def sampler(self, rows: Indices) -> Sampler:
        """Return the sampler of a batch with one token of each of the slots `rows [T]`, which may repeat."""
        if self.plain[rows].all():
            return PLAIN
        return Sampler.build(
            self.temperatures[rows], top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows]
        )

    def append(self, rows: Indices, ids: IntArray, logprobs: FloatArray, mask: SamplingMask | None) -> None:
        """Add one token with its log-probability, and its mask if recorded, to each of the slots `rows [B]`."""
        places = self.num_response[rows]
        self.ids[rows, places] = ids
        self.logprobs[rows, places] = logprobs
        self.last_ids[rows] = ids
        self.num_response[rows] = places + 1
        self.kv_used += len(rows)
        if mask is not None:
            for slot, support in zip(rows.tolist(), np.split(mask.ids, mask.counts.cumsum()[:-1]), strict=True):
                self.masks[slot].append(support)

    def append_runs(
        self,
        rows: Indices,
        drafts: Drafts,
        lengths: Indices,
        ids: IntArray,
        logprobs: FloatArray,
        mask: SamplingMask | None,
    ) -> None:
        """Add to each of the slots `rows [B]` its first `lengths [B]` tokens among the `[T]` that a step drew."""
        kept = np.flatnonzero(drafts.behind < lengths[drafts.of_token])
        slots = rows[drafts.of_token[kept]]
        places = drafts.behind_each(self.num_response[rows])[kept]
        self.ids[slots, places], self.logprobs[slots, places] = ids[kept], logprobs[kept]
        self.last_ids[rows] = ids[drafts.starts + lengths - 1]
        self.num_response[rows] += lengths
        self.kv_used += len(kept)
        if mask is not None:
            support = np.split(mask.ids, mask.counts.cumsum()[:-1])
            for slot, token in zip(slots.tolist(), kept.tolist(), strict=True):
                self.masks[slot].append(support[token])

    def last_positions(self, rows: Indices) -> Indices:
        """Position `[B]` of the last token of each of the slots `rows [B]`, which the next step feeds."""
        positions: Indices = self.num_prompt[rows] + self.num_response[rows] - 1
        return positions

    def response(self, slot: int) -> IntArray:
        """A copy of all response tokens of the slot, `[L]`."""
        return self.ids[slot, : self.num_response[slot]].copy()

    def take_unsent(self, slot: int) -> tuple[IntArray, FloatArray]:
        """Return copies of the unsent tokens `[n]` and log-probabilities `[n]`, and count them as sent."""
        unsent = slice(self.num_sent[slot], self.num_response[slot])
        self.num_sent[slot] = self.num_response[slot]
        return self.ids[slot, unsent].copy(), self.logprobs[slot, unsent].copy()

    def take_unsent_mask(self, slot: int) -> SamplingMask:
        """Remove and return the sampling mask of the unsent tokens."""
        support, self.masks[slot] = self.masks[slot], []
        counts = np.array([len(ids) for ids in support], np.int32)
        return SamplingMask(counts, np.concatenate([np.empty(0, np.int32), *support]))
