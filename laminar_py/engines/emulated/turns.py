"""Turns of emulated trajectories: where they end in a response, and the environments between them.

The engine places turns by `lay_out`; a replica calls `EmulatedEnvironments`. They share no state. Ends of turns
and latencies depend only on the seeds of run and request, the trajectory and the number of the turn. A trajectory
is therefore the same wherever it runs and however often it is interrupted
(`tests/engines/emulated/test_turns.py`).
"""

import asyncio
import math
from collections.abc import Sequence
from hashlib import blake2b
from statistics import NormalDist

import numpy as np

from laminar_py.config.emulation import TurnsConfig
from laminar_py.config.run import RunConfig
from laminar_py.records.environment import EnvironmentTurn, ModelTurn, TurnPart
from laminar_py.records.spans import num_turns

_WORD = (1 << 64) - 1
_NORMAL = NormalDist()

OBSERVED = 0  # token id of all observations
MOST_REMEMBERED = (
    1 << 17
)  # more than a fleet has trajectories; nothing reports trajectories that moved away, so drop the oldest
_P95 = NormalDist().inv_cdf(0.95)
_NOTHING = np.empty(0, np.int32)


def bits_of(name: str) -> int:
    """Hash a name to 64 bits."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def splitmix(value: int) -> int:
    """Hash an integer to 64 bits: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def uniform(bits: int) -> float:
    """Convert 64 random bits to a uniform number in the open interval (0, 1)."""
    return ((bits >> 11) + 0.5) * 2.0**-53


def normal(bits: int) -> float:
    """Convert 64 random bits to a standard normal number."""
    return _NORMAL.inv_cdf(uniform(bits))


def lay_out(num_tokens: int, bits: int, *, count: int = 1, gap: int = 0) -> list[tuple[int, int]]:
    """Split `num_tokens` into `count` model turns. Returns their positions [start, end) in the response.

    An observation of `gap` tokens stands between two turns. The split points are uniform. No turn is empty, so
    there are fewer turns if there are fewer than `count` tokens.
    """
    count = min(count, num_tokens)
    weights = []
    for _ in range(count):
        bits = splitmix(bits)
        weights.append(-math.log(uniform(bits)))
    total, passed, start, turns = sum(weights), 0.0, 0, list[tuple[int, int]]()
    for place, weight in enumerate(weights):
        passed += weight
        is_last = place == count - 1
        sampled = num_tokens if is_last else place + 1 + int((num_tokens - count) * passed / total)
        end = sampled + place * gap
        turns.append((start, end))
        start = end + gap
    return turns


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
        self._due: dict[
            str, tuple[int, float]
        ] = {}  # by trajectory: number of its last turn, and when its answer is due

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

    def hear(self, parts: Sequence[TurnPart]) -> None:
        """Ignore partial turns."""

    async def forget(self, trajectory_id: str) -> None:
        """Drop the state of a trajectory that has ended."""
        self._due.pop(trajectory_id, None)

    def latency_s(self, trajectory_id: str, turn: int) -> float:
        """Draw the emulated seconds that the environment takes after turn number `turn` of a trajectory."""
        bits = splitmix(bits_of(f"{self._seed}/{trajectory_id}/{turn}"))
        return self._turns.median_s * math.exp(self._sigma * normal(bits))


def environments_of(config: RunConfig) -> EmulatedEnvironments | None:
    """Build the environments of an emulated run; None if trajectories have one turn."""
    emulation = config.emulation
    if emulation is None or emulation.turns is None:
        return None
    return EmulatedEnvironments(emulation.turns, seed=config.seed, compression=emulation.compression)
