"""Planned responses of an emulated engine: their length, turns and tokens. Called by the engine and the simulator.

Tokens are slices of one table of random ids, so long responses cost no more than short ones. With
`emulation.turns` a response has several turns of the model, with observations of environments between them. The
length of a prefix then gives the next turn. Length, turns, end and every token depend only on the seeds of run and
request, the group, the prompt and the token's position. A response therefore does not depend on its engine, its
batch or interruptions (`tests/engines/emulated/test_engine.py`).
"""

import math
import zlib
from typing import NamedTuple

import numpy as np

from laminar_py.config.emulation import SHORTEST, EmulationConfig, TurnsConfig
from laminar_py.engines.checks import response_limit
from laminar_py.engines.emulated.turns import OBSERVED, lay_out, normal, splitmix
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason

LOGPROB = -0.5  # of every token
_OFFSETS = 1 << 16  # number of offsets in the table at which a response may start


class PlannedResponse(NamedTuple):
    """A planned response, e.g. `PlannedResponse(1530, FinishReason.STOP, table[17:], stop_id=1)`.

    With turns it ends with the turn that the engine generates next.
    """

    num_tokens: int
    reason: FinishReason
    source: IntArray  # [n] n >= num_tokens
    stop_id: int | None  # its last token, if it stops

    def ids(self, start: int, end: int) -> IntArray:
        """The tokens [start, end) of the response."""
        ids = self.source[start:end]
        if self.stop_id is not None and start < end == self.num_tokens:
            ids = ids.copy()
            ids[-1] = self.stop_id
        return ids


class Responses:
    """Log-normal lengths and tokens below `vocab`, e.g. `Responses(1024, max_len=2048, median=300, sigma=0.9)`.

    The logarithm of a length has variance `sigma` squared: the share `prompt_share` is common to a group's prompt
    and drawn from `seed`, the rest is drawn for each response. With `turns` a length counts the model's turns
    together, and the response limit also counts the observations.
    """

    def __init__(
        self,
        vocab: int,
        *,
        max_len: int,
        median: float,
        sigma: float,
        prompt_share: float = 0.0,
        seed: int = 0,
        turns: TurnsConfig | None = None,
    ) -> None:
        self._vocab = vocab
        self._max_len = max_len
        self._turns = turns
        self._mu = math.log(median)
        self._between, self._within = sigma * math.sqrt(prompt_share), sigma * math.sqrt(1.0 - prompt_share)
        self._seed = seed
        self._tables: dict[tuple[int, ...], IntArray] = {}  # by stop ids; a run has one tuple of them

    @classmethod
    def from_config(cls, emulation: EmulationConfig, vocab: int, *, max_len: int, seed: int) -> "Responses":
        """Build responses from the section `emulation`."""
        return cls(
            vocab,
            max_len=max_len,
            median=emulation.median_tokens,
            sigma=emulation.sigma,
            prompt_share=emulation.prompt_share,
            seed=seed,
            turns=emulation.turns,
        )

    def respond(self, request: GenerateRequest) -> PlannedResponse:
        """Plan the response to a request. With turns it ends with the next turn.

        Without stop ids, at the limit.
        """
        limit, length = response_limit(request, max_len=self._max_len), len(request.prefix_ids)
        source, stop_ids = self._source(request), request.sampling.stop_ids
        if length >= limit:
            return PlannedResponse(limit, FinishReason.LENGTH, source, None)
        turns, is_cut = self._turns_of(request, limit)
        # a prefix from another engine may be longer
        end = next((end for _, end in turns if end > length), length + 1)
        if is_cut and end == turns[-1][1]:
            return PlannedResponse(end, FinishReason.LENGTH, source, None)
        return PlannedResponse(end, FinishReason.STOP, source, stop_ids[0])

    def made(self, request: GenerateRequest, length: int) -> tuple[IntArray, tuple[Span, ...]]:
        """Make the first `length` tokens of a response, with observations, and their spans of version 0."""
        limit = response_limit(request, max_len=self._max_len)
        ids, spans, covered = self._source(request)[:length].copy(), list[Span](), 0
        turns, is_cut = self._turns_of(request, limit)
        for start, end in turns:
            if start > covered and covered < length:
                ids[covered:start] = OBSERVED
                spans.append(Span(None, covered, min(start, length)))
            if start < length:
                spans.append(Span(0, start, min(end, length)))
            if end <= length and not (is_cut and end == turns[-1][1]):
                ids[end - 1] = request.sampling.stop_ids[0]
            covered = end
        return ids, tuple(spans)

    def _turns_of(self, request: GenerateRequest, limit: int) -> tuple[list[tuple[int, int]], bool]:
        """The turns [start, end) of a response, and True if `limit` cuts the last turn."""
        bits, stop_ids, turns = splitmix(request.sampling.seed), request.sampling.stop_ids, self._turns
        if not stop_ids:
            return [(0, limit)], True
        drawn, most = self._length(bits, request), limit - (0 if turns is None else turns.observed_tokens)
        if turns is None:
            return [(0, min(drawn, most))], drawn > most
        assert most > 0, f"{request.rid}: {limit} tokens do not exceed the observations of its environment"
        return lay_out(min(drawn, most), bits, count=turns.count, gap=turns.observation_tokens), drawn > most

    def _source(self, request: GenerateRequest) -> IntArray:
        """The tokens [n] of a response, before stop ids replace some of them."""
        return self._table(request.sampling.stop_ids)[splitmix(splitmix(request.sampling.seed)) % _OFFSETS :]

    def _length(self, bits: int, request: GenerateRequest) -> int:
        """Draw the length of a response from 64 random bits, its group and its prompt."""
        log_length = self._mu + self._within * normal(bits)
        if self._between:
            asked = zlib.crc32(
                request.prompt_ids.tobytes(), zlib.crc32(f"{self._seed}/{request.group_id}".encode())
            )
            log_length += self._between * normal(splitmix(asked))
        return max(SHORTEST, round(math.exp(log_length)))

    def _table(self, stop_ids: tuple[int, ...]) -> IntArray:
        """Table of random ids without `stop_ids`, the same in every engine."""
        table = self._tables.get(stop_ids)
        if table is None:
            allowed = np.setdiff1d(np.arange(self._vocab, dtype=np.int32), np.array(stop_ids, np.int32))
            table = np.random.default_rng(0).choice(allowed, _OFFSETS + self._max_len)
            table.flags.writeable = False  # deltas are views of it
            self._tables[stop_ids] = table
        return table
