"""Environments over a tokenizer that merges wherever it can, and trajectories as a replica leads them."""

import itertools
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import tokenizers
from tokenizers.models import BPE

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.environment import EnvironmentConfig, EnvironmentHome
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.environment.calls import EnvironmentCalls
from laminar_py.environment.host import EnvironmentHost
from laminar_py.environment.protocol import End, Observation, Rewrite
from laminar_py.environment.saved_turns import SavedTurns
from laminar_py.environment.writer import PlainWriter
from laminar_py.records.environment import ModelTurn, Problem
from laminar_py.records.spans import Span, add_span

LETTERS = "abcd"
END = 0  # ends a turn
HOME = EnvironmentHome(sandbox=SandboxConfig(), folder=Path("environments"), model=Path("model"), decode_turn=None)


def greedy_tokenizer() -> Tokenizer:
    """Letters, all pairs of them and all pairs of pairs: whatever touches becomes one token."""
    pairs = ["".join(pair) for pair in itertools.product(LETTERS, repeat=2)]
    fours = ["".join(pair) for pair in itertools.product(pairs[:6], repeat=2)]
    words = ["<end>", *LETTERS, *pairs, *fours]
    merges = [*itertools.product(LETTERS, repeat=2), *itertools.product(pairs[:6], repeat=2)]
    backend = tokenizers.Tokenizer(BPE({word: id for id, word in enumerate(words)}, merges))
    backend.add_special_tokens(["<end>"])
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, eos_ids=(END,))


class Chatter:
    """Says a word after each turn, and ends after as many as the problem says."""

    deterministic = True

    def reset(self, problem):
        self.turns, self.made = int(problem.answer), 0
        return Observation("ab" if self.turns % 2 else ())

    def step(self, action):
        self.made += 1
        if self.made >= self.turns:
            return End(float(len(action)))
        return Observation("abcd"[: 1 + self.made % 4])


class Wanderer:
    """Goes back to the first turn, or begins anew, every few turns."""

    deterministic = True

    def reset(self, problem):
        self.turns, self.made, self.here = int(problem.answer), 0, 0
        return Observation("a")

    def step(self, action):
        self.made, self.here = self.made + 1, self.here + 1
        if self.made >= self.turns:
            return End(1.0)
        if (self.made + self.turns) % 5 == 0:
            self.here = 0
            return Rewrite("abcd" * (1 + self.made % 3))
        if self.here > 2:
            self.here = 1
            return Observation("dcba"[: 1 + self.made % 4], after=1)
        return Observation("abcd"[: 1 + self.made % 4])


class Diary:
    """Like `Chatter`, of which a snapshot can be taken; `steps` has each turn that any of them was given."""

    steps: ClassVar[list[str]] = []

    def reset(self, problem):
        self.said = ""
        return Observation()

    def step(self, action):
        Diary.steps.append(action)
        self.said += action
        return Observation(f"c{len(self.said) % 7 * 'a'}")

    def snapshot(self):
        return self.said.encode()

    def restore(self, state):
        self.said = state.decode()


class Forgetful:
    """Nothing of it can be had again."""

    def __init__(self):
        self.made = 0

    def reset(self, problem):
        return Observation("a")

    def step(self, action):
        self.made += 1
        return Observation("b" * self.made)


def make_host(make, folder, *, tokenizer=None, **limits) -> EnvironmentHost:
    settings = EnvironmentConfig(**limits)
    return EnvironmentHost(
        make,
        calls=EnvironmentCalls(settings),
        writer=PlainWriter(tokenizer or greedy_tokenizer(), stop_ids=(END,)),
        saved=SavedTurns(folder),
        limits=settings,
    )


def first_turn(given, *, name="g0.0") -> ModelTurn:
    """A trajectory of this problem before its first token."""
    return ModelTurn(trajectory_id=name, problem=given, response_ids=np.empty(0, np.int32), spans=())


def appended(turn, ids, version=None, follows=None, *, limit=None, stop=()) -> ModelTurn:
    """The trajectory with ids of the environment, or of the model at a version."""
    spans, length = list(turn.spans), len(turn.response_ids)
    if len(ids):
        end = length + len(ids)
        add_span(spans, Span(version, length, end, follows=follows, turn_limit=limit, stop=stop))
    joined = np.concatenate([turn.response_ids, np.array(ids, np.int32)])
    return msgspec.structs.replace(turn, response_ids=joined, spans=tuple(spans))


def problem(turns: int) -> Problem:
    return Problem(prompt="ab", answer=str(turns))
