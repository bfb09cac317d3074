"""Planned responses of an emulated engine (length, turns and tokens), and the environments between its turns.

The engine and the simulator call `Responses`; a replica calls `EmulatedEnvironments`. They share no state.

Tokens are slices of one table of random ids, so long responses cost no more than short ones. With
`rollout.engine.turns` a response has several turns of the model, with observations of environments between them.
The length of a prefix then gives the next turn. Length, turns, end, every token and the latency after each turn
depend only on the seeds of run and request, the group, the prompt, the trajectory and the position. A trajectory
is therefore the same wherever it runs and however often it is interrupted (`tests/emulation/test_turns.py`).
"""

import asyncio
import math
import zlib
from hashlib import blake2b
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from laminar_lab.emulation.settings import SHORTEST, TurnsConfig, emulation_of
from laminar_py.config import RunConfig
from laminar_py.engines import response_limit
from laminar_py.records import FinishReason, GenerateRequest
from laminar_py.records.codec import IntArray
from laminar_py.records.environment import EnvironmentTurn, ModelTurn
from laminar_py.records.spans import Span, num_turns

LOGPROB = -0.5  # of every token
OBSERVED = 0  # token id of all observations
# more than a fleet has trajectories; nothing reports trajectories that moved away, so drop the oldest
MOST_REMEMBERED = 1 << 17
_OFFSETS = 1 << 16  # number of offsets in the table at which a response may start
_WORD = (1 << 64) - 1
_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
_NOTHING = np.empty(0, np.int32)


def splitmix(value: int) -> int:
    """Hash an integer to 64 bits: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def normal(bits: int) -> float:
    """Convert 64 random bits to a standard normal number."""
    return _NORMAL.inv_cdf(_uniform(bits))


def _uniform(bits: int) -> float:
    """Convert 64 random bits to a uniform number in the open interval (0, 1)."""
    return ((bits >> 11) + 0.5) * 2.0**-53


def lay_out(num_tokens: int, bits: int, *, count: int = 1, gap: int = 0) -> list[tuple[int, int]]:
    """Split `num_tokens` into `count` model turns. Returns their positions [start, end) in the response.

    An observation of `gap` tokens stands between two turns. The split points are uniform. No turn is empty, so
    there are fewer turns if there are fewer than `count` tokens.
    """
    count = min(count, num_tokens)
    weights = []
    for _ in range(count):
        bits = splitmix(bits)
        weights.append(-math.log(_uniform(bits)))
    total, passed, start, turns = sum(weights), 0.0, 0, list[tuple[int, int]]()
    for place, weight in enumerate(weights):
        passed += weight
        is_last = place == count - 1
        sampled = num_tokens if is_last else place + 1 + int((num_tokens - count) * passed / total)
        end = sampled + place * gap
        turns.append((start, end))
        start = end + gap
    return turns


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
    def from_config(cls, config: RunConfig, vocab: int) -> "Responses":
        """Build the responses of a run, with tokens below `vocab`."""
        emulation = emulation_of(config)
        return cls(
            vocab,
            max_len=config.rollout.max_len,
            median=emulation.median_tokens,
            sigma=emulation.sigma,
            prompt_share=emulation.prompt_share,
            seed=config.seed,
            turns=emulation.turns,
        )

    def respond(self, request: GenerateRequest) -> PlannedResponse:
        """Plan the response to a request whose prefix is below the response limit.

        With turns it ends with the next turn; without stop ids, at the limit.
        """
        limit, length = response_limit(request, max_len=self._max_len), len(request.prefix_ids)
        source, stop_ids = self._source(request), request.sampling.stop_ids
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


class EmulatedEnvironments:
    """Environments that answer after a log-normal time with observations of one length.

    `compression` emulated seconds pass in a second of the event loop. The time of a turn counts from its first
    request, also when a caller repeats the request. See `records.environment.Environments`.
    """

    def __init__(self, turns: TurnsConfig, *, seed: int, compression: float) -> None:
        self._turns = turns
        self._seed = seed
        self._compression = compression
        self._sigma = math.log(turns.p95_s / turns.median_s) / _P95
        self._answer = np.full(turns.observation_tokens, OBSERVED, np.int32)
        # by trajectory: number of its last turn, and when its answer is due
        self._due: dict[str, tuple[int, float]] = {}

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Answer a turn: no tokens before the first turn, the end after the last, an observation between turns."""
        name, done = turn.trajectory_id, num_turns(turn.spans)
        if not done:
            return EnvironmentTurn(ids=_NOTHING)
        if done >= self._turns.count:
            return EnvironmentTurn(ends=True)
        takes_s = self.latency_s(name, done) / self._compression
        now_s = asyncio.get_running_loop().time()
        if self._due.get(name, (0, 0.0))[0] != done:
            self._due.pop(name, None)
            self._due[name] = done, now_s + takes_s
            if len(self._due) > MOST_REMEMBERED:
                del self._due[next(iter(self._due))]
        await asyncio.sleep(self._due[name][1] - now_s)
        return EnvironmentTurn(ids=self._answer, elapsed_s=takes_s)

    async def forget(self, trajectory_id: str) -> None:
        """Drop the state of a trajectory that has ended."""
        self._due.pop(trajectory_id, None)

    def latency_s(self, trajectory_id: str, turn: int) -> float:
        """Draw the emulated seconds that the environment takes after turn number `turn` of a trajectory."""
        digest = blake2b(f"{self._seed}/{trajectory_id}/{turn}".encode(), digest_size=8).digest()
        bits = splitmix(int.from_bytes(digest, "little"))
        return self._turns.median_s * math.exp(self._sigma * normal(bits))


def environments_of(config: RunConfig) -> EmulatedEnvironments | None:
    """Build the environments of an emulated run; None if trajectories have one turn."""
    emulation = emulation_of(config)
    if emulation.turns is None:
        return None
    return EmulatedEnvironments(emulation.turns, seed=config.seed, compression=emulation.compression)
