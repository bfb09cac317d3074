"""Answers of an emulated engine: the length of a response and its tokens. Called by the emulated engine.

Tokens are slices of one table of random ids, so a thousand cost as much as one.
Invariant: length, end and every token depend on the seeds of run and request, group, prompt, and the token's place
alone, so a response does not depend on where it runs, in which batch, or how often it was interrupted.
"""

import math
import zlib
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from laminar_py.config.emulation import EmulationConfig
from laminar_py.engines.requests import response_limit
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest
from laminar_py.records.trajectory import FinishReason

SHORTEST = 16
LOGPROB = -0.5  # of every token
_OFFSETS = 1 << 16  # places in the table where a response may begin
_WORD = (1 << 64) - 1
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class PlannedResponse:
    """A response as it will be, e.g. `PlannedResponse(1530, FinishReason.STOP, table[17:], stop_id=1)`."""

    num_tokens: int
    reason: FinishReason
    source: IntArray  # [n] n >= num_tokens
    stop_id: int | None  # its last token, if it stops

    def ids(self, start: int, end: int) -> IntArray:
        """Tokens [start, end)."""
        ids = self.source[start:end]
        if self.stop_id is not None and start < end == self.num_tokens:
            ids = ids.copy()
            ids[-1] = self.stop_id
        return ids


class Responses:
    """Log-normal lengths and tokens below `vocab`, e.g. `Responses(1024, max_len=2048, median=300, sigma=0.9)`.

    `prompt_share` of the variance of their logarithm is between prompts of a group, as `seed` draws it, the rest
    within.
    """

    def __init__(
        self, vocab: int, *, max_len: int, median: float, sigma: float, prompt_share: float = 0.0, seed: int = 0
    ) -> None:
        self._vocab = vocab
        self._max_len = max_len
        self._mu = math.log(median)
        self._between, self._within = sigma * math.sqrt(prompt_share), sigma * math.sqrt(1.0 - prompt_share)
        self._seed = seed
        self._tables: dict[tuple[int, ...], IntArray] = {}  # by stop ids, of which a run has one tuple

    @classmethod
    def of(cls, emulation: EmulationConfig, vocab: int, *, max_len: int, seed: int) -> "Responses":
        """Responses with the lengths that a config gives."""
        return cls(
            vocab,
            max_len=max_len,
            median=emulation.median_tokens,
            sigma=emulation.sigma,
            prompt_share=emulation.prompt_share,
            seed=seed,
        )

    def respond(self, request: GenerateRequest) -> PlannedResponse:
        """The response to a request; without stop ids it goes on to its cap."""
        sampling, limit = request.sampling, response_limit(request, max_len=self._max_len)
        bits = _splitmix(sampling.seed)
        source = self._table(sampling.stop_ids)[_splitmix(bits) % _OFFSETS :]
        drawn = self._length(bits, request) if sampling.stop_ids else limit + 1
        if drawn > limit or len(request.prefix_ids) >= limit:
            return PlannedResponse(limit, FinishReason.LENGTH, source, None)
        # a prefix that was made elsewhere may be longer
        return PlannedResponse(
            max(drawn, len(request.prefix_ids) + 1), FinishReason.STOP, source, sampling.stop_ids[0]
        )

    def _length(self, bits: int, request: GenerateRequest) -> int:
        """Tokens of a response, from 64 random bits and what it answers."""
        log_length = self._mu + self._within * _normal(bits)
        if self._between:
            asked = zlib.crc32(
                request.prompt_ids.tobytes(), zlib.crc32(f"{self._seed}/{request.group_id}".encode())
            )
            log_length += self._between * _normal(_splitmix(asked))
        return max(SHORTEST, round(math.exp(log_length)))

    def _table(self, stop_ids: tuple[int, ...]) -> IntArray:
        """Random ids without these."""
        table = self._tables.get(stop_ids)
        if table is None:
            allowed = np.setdiff1d(np.arange(self._vocab, dtype=np.int32), np.array(stop_ids, np.int32))
            table = np.random.default_rng(0).choice(allowed, _OFFSETS + self._max_len)
            table.flags.writeable = False  # deltas are views of it
            self._tables[stop_ids] = table
        return table


def _normal(bits: int) -> float:
    """A standard normal variate from 64 random bits."""
    return _NORMAL.inv_cdf(((bits >> 11) + 0.5) * 2.0**-53)


def _splitmix(value: int) -> int:
    """64 bits from an integer: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
