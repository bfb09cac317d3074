"""Answers of an emulated engine: the length of a response and its tokens. Called by the emulated engine.

Tokens are slices of one table of random ids, so a thousand cost as much as one. With `emulation.turns` a response
is several turns of the model, with what environments write between them; all of them have their places in it, so
the length of a prefix tells which turn comes next. Invariant: length, turns, end and every token depend on the
seeds of run and request, group, prompt, and the token's place alone, so a response does not depend on where it
runs, in which batch, or how often it was interrupted.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np

from laminar_py.config.emulation import SHORTEST, EmulationConfig, TurnsConfig
from laminar_py.engines.emulated.turns import OBSERVED, lay_out, normal, splitmix
from laminar_py.engines.requests import response_limit
from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason

LOGPROB = -0.5  # of every token
_OFFSETS = 1 << 16  # places in the table where a response may begin


class PlannedResponse(NamedTuple):
    """A response as it will be, e.g. `PlannedResponse(1530, FinishReason.STOP, table[17:], stop_id=1)`.

    With turns, up to the end of the turn that is to be generated.
    """

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
    within. With `turns` lengths are those of all turns of the model together, and the cap on a response has room
    for what environments write besides.
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
        self._tables: dict[tuple[int, ...], IntArray] = {}  # by stop ids, of which a run has one tuple

    @classmethod
    def from_config(cls, emulation: EmulationConfig, vocab: int, *, max_len: int, seed: int) -> "Responses":
        """Responses with the lengths that a config gives."""
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
        """The response to a request, with turns up to the end of the next one; without stop ids, up to its cap."""
        limit, length = response_limit(request, max_len=self._max_len), len(request.prefix_ids)
        source, stop_ids = self._source(request), request.sampling.stop_ids
        if length >= limit:
            return PlannedResponse(limit, FinishReason.LENGTH, source, None)
        turns, is_cut = self._turns_of(request, limit)
        # a prefix that was made elsewhere may be longer
        end = next((end for _, end in turns if end > length), length + 1)
        if is_cut and end == turns[-1][1]:
            return PlannedResponse(end, FinishReason.LENGTH, source, None)
        return PlannedResponse(end, FinishReason.STOP, source, stop_ids[0])

    def made(self, request: GenerateRequest, length: int) -> tuple[IntArray, tuple[Span, ...]]:
        """The first tokens of a response to a request, environments' among them, and spans of some version."""
        limit = response_limit(request, max_len=self._max_len)
        ids, spans, told = self._source(request)[:length].copy(), list[Span](), 0
        turns, is_cut = self._turns_of(request, limit)
        for start, end in turns:
            if start > told and told < length:
                ids[told:start] = OBSERVED
                spans.append(Span(None, told, min(start, length)))
            if start < length:
                spans.append(Span(0, start, min(end, length)))
            if end <= length and not (is_cut and end == turns[-1][1]):
                ids[end - 1] = request.sampling.stop_ids[0]
            told = end
        return ids, tuple(spans)

    def _turns_of(self, request: GenerateRequest, limit: int) -> tuple[list[tuple[int, int]], bool]:
        """Places of the turns of a response, and True where the last one is cut."""
        bits, stop_ids, turns = splitmix(request.sampling.seed), request.sampling.stop_ids, self._turns
        if not stop_ids:
            return [(0, limit)], True
        drawn, most = self._length(bits, request), limit - (0 if turns is None else turns.observed_tokens)
        if turns is None:
            return [(0, min(drawn, most))], drawn > most
        assert most > 0, f"{request.rid}: {limit} tokens hold no more than what its environment writes"
        return lay_out(min(drawn, most), bits, count=turns.count, gap=turns.observation_tokens), drawn > most

    def _source(self, request: GenerateRequest) -> IntArray:
        """[n] tokens of a response, but for its stop ids."""
        return self._table(request.sampling.stop_ids)[splitmix(splitmix(request.sampling.seed)) % _OFFSETS :]

    def _length(self, bits: int, request: GenerateRequest) -> int:
        """Tokens of a response, from 64 random bits and what it answers."""
        log_length = self._mu + self._within * normal(bits)
        if self._between:
            asked = zlib.crc32(
                request.prompt_ids.tobytes(), zlib.crc32(f"{self._seed}/{request.group_id}".encode())
            )
            log_length += self._between * normal(splitmix(asked))
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
