"""Conversations of `laminar bench endpoint`, the same in each round, and the times that are taken of them."""

from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from laminar_py.data.tiny_model import SPECIAL
from laminar_py.records.engine import SamplingParams
from laminar_py.records.environment import Problem
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind

MARKS = ("<user>", "<assistant>")
VOCAB = 8192
NUMBERS = [f"{number:04d}" for number in range(VOCAB - len(MARKS) - len(SPECIAL))]  # a token each
PROMPT, MAX_LEN = 16, 1024  # tokens of a prompt, of a trajectory at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Agents that speak at a time, e.g. `Conversations(name="many", agents=32, turns=3, tokens=(8, 16))`."""

    name: str
    agents: int
    turns: int
    tokens: tuple[int, int]  # of a turn, the fewest and the most
    words: int = 32  # tokens of what an agent says before each turn

    def lengths(self) -> list[list[int]]:
        """Tokens of each turn of each agent."""
        rng = np.random.default_rng(self.agents)
        fewest, most = self.tokens
        drawn: list[list[int]] = rng.integers(fewest, most, (self.agents, self.turns), endpoint=True).tolist()
        return drawn

    def says(self) -> list[list[str]]:
        """Texts of each agent, one before each turn."""
        rng = np.random.default_rng(self.agents)
        drawn = rng.integers(len(NUMBERS), size=(self.agents, self.turns, self.words)).tolist()
        return [["".join(NUMBERS[word] for word in words) for words in agent] for agent in drawn]

    def assignments(self, socket: str, *, number: int) -> list[Assignment]:
        """Trajectories of a round, by its number; any token may end a turn."""
        names = [f"{self.name}-{number}.{agent}" for agent in range(self.agents)]
        prompt = np.arange(PROMPT, dtype=np.int32)  # which no agent's conversation begins with
        return [
            Assignment(
                trajectory_id=name,
                epoch=0,
                group_id=name,
                kind=Kind.TRAIN,
                prompt_ids=prompt,
                sampling=SamplingParams(max_new_tokens=MAX_LEN - PROMPT, stop_ids=tuple(range(VOCAB)), seed=seed),
                problem=Problem(prompt="", trajectory_id=name, fields={"socket": socket}),
            )
            for seed, name in enumerate(names)
        ]


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A round, e.g. `Timed(wall_s=9.5, first_s=[[0.02, 0.01], [0.03, 0.01]])`: two agents with two turns each."""

    wall_s: float  # from the first request to the last token
    first_s: list[list[float]]  # from a turn's request to its first token

    def added_ms(self, engine: "Timed") -> list[float]:
        """By how much the first token of each turn came later than from an engine."""
        pairs = zip(self.first_s, engine.first_s, strict=True)
        return [1e3 * (one - other) for ours, alone in pairs for one, other in zip(ours, alone, strict=True)]


@dataclass(frozen=True, slots=True)
class ComparedRound:
    """A round through the endpoint, and the same of the engine alone."""

    endpoint: Timed
    engine: Timed

    @property
    def ratio(self) -> float:
        """Tokens a second of the one over those of the other."""
        return self.engine.wall_s / self.endpoint.wall_s

    def added_ms(self, share: float = 0.5) -> float:
        """Time to the first token that is added, at this share of the turns."""
        added = self.endpoint.added_ms(self.engine)
        return median(added) if share == 0.5 else float(np.quantile(added, share))
