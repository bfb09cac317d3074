"""Time that we add between an environment's answer and the first token of the next turn.

Trajectories run one after another through a replica and an environment's process as a run has them. The
environment takes no time and notes when it has answered, by `time.monotonic`, which is one clock for a host. Turns
have one token, so the first token of a turn leaves the engine at once; the replica's process notes when it
arrives. The engine then answers the same requests again by its own stream; its time from request to first token is
subtracted.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from transformers import AutoConfig

from laminar_lab.bench.report import Row, log_line, spread
from laminar_lab.bench.turns import clocked
from laminar_lab.bench.turns.replica import BenchParts, PlayRound
from laminar_lab.bench.workplace import workplace, write_model
from laminar_py.config import RunConfig, parse_config
from laminar_py.data import SPECIAL, tiny_model
from laminar_py.records import Problem, SamplingParams
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind
from laminar_py.runtime.cluster import open_cluster

ROWS = ("turn_added_ms", "turn_total_ms", "turn_engine_ms")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT, WORDS, MAX_LEN = 16, 16, 2560  # tokens of a prompt, of an answer, of a trajectory at most
MOST_TURNS = 100
TIMES = "times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """Trajectories of a round, e.g. `Trajectories(count=10, turns=16, first=64)`."""

    count: int = 10
    turns: int = 16
    first: int = 64  # tokens of the environment before the first turn

    def play(self, number: int) -> PlayRound:
        """Make a round of trajectories whose turns have one token."""
        rng = np.random.default_rng([self.first, number])
        vocab = len(SPECIAL) + len(LETTERS)
        sampling = SamplingParams(max_new_tokens=MAX_LEN - PROMPT, stop_ids=tuple(range(vocab)))
        names = [f"turns-{number}.{index}" for index in range(self.count)]
        assignments = [
            Assignment(
                trajectory_id=name,
                epoch=0,
                group_id=name,
                kind=Kind.TRAIN,
                prompt_ids=rng.integers(len(SPECIAL), vocab, PROMPT, dtype=np.int32),
                sampling=sampling,
                problem=Problem(
                    prompt="", answer=name, fields={"turns": self.turns, "first": self.first, "words": WORDS}
                ),
            )
            for name in names
        ]
        lengths = [[1] * self.turns for _ in names]
        return PlayRound(name="turns", assignments=assignments, lengths=lengths, at_once=False)


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Medians over the turns of a round but the first of each trajectory, in ms."""

    total: float  # from the environment's answer to the first token
    engine: float  # from the request of the same turn to the engine alone, to its first token
    added: float  # total less engine, turn by turn


def turn_times(
    answered_s: Sequence[Sequence[float]], played: Sequence[Sequence[float]], alone_s: Sequence[Sequence[float]]
) -> TurnTimes:
    """Compare the turns of trajectories.

    Moments of answers and of first tokens, and seconds of the engine alone.
    """
    totals, engines = [], []
    for answers, firsts, alone in zip(answered_s, played, alone_s, strict=True):
        for answered, first, engine in list(zip(answers, firsts, alone, strict=True))[1:]:
            totals.append(1e3 * (first - answered))
            engines.append(1e3 * engine)
    added = [total - engine for total, engine in zip(totals, engines, strict=True)]
    return TurnTimes(median(totals), median(engines), median(added))


def rows(*, repeats: int = 5, count: int = 10) -> list[Row]:
    """Measure `count` trajectories a round, medians over `repeats` rounds; one more round warms all parts up."""
    trajectories = Trajectories(count=count)
    with workplace() as folder, open_cluster(None):
        rounds = asyncio.run(_measure_rounds(folder, trajectories, repeats=repeats))
    where = (
        f"p50, {count} trajectories of {trajectories.turns} turns behind {PROMPT + trajectories.first} tokens and"
        " more"
    )

    def row(name: str, times_ms: list[float], detail: str = "") -> Row:
        return Row(name, median(times_ms), "ms", f"{where}{detail}; median of rounds {spread(times_ms, '.2f')}")

    return [
        row("turn_added_ms", [times.added for times in rounds], ", without the engine's own time"),
        row("turn_total_ms", [times.total for times in rounds]),
        row("turn_engine_ms", [times.engine for times in rounds], ", from its request to the engine alone"),
    ]


async def _measure_rounds(folder: Path, trajectories: Trajectories, *, repeats: int) -> list[TurnTimes]:
    """Play and replay rounds on one replica; return the times of all rounds but the first."""
    times = folder / TIMES
    times.mkdir()
    config, parts = write_inputs(folder), BenchParts(folder / "run")
    await parts.start(config, messages=False)
    rounds: list[TurnTimes] = []
    for number in range(repeats + 1):
        play = trajectories.play(number)
        played = await parts.play(play)
        alone = await parts.replay(play.name, streams=True)
        answered_s = [json.loads((times / each.trajectory_id).read_text()) for each in play.assignments]
        rounds.append(turn_times(answered_s, played.first_s, alone.first_s))
        log_line(f"{rounds[-1].total:.2f} ms, engine {rounds[-1].engine:.2f}, added {rounds[-1].added:.2f}")
    return rounds[1:]


def write_inputs(folder: Path) -> RunConfig:
    """Write a model of 230,000 parameters; return the config of a run on it."""
    model = folder / "model"
    model.mkdir()
    files = tiny_model(LETTERS, pattern="[a-z]", context=MAX_LEN)
    (model / "config.json").write_text(files["model/config.json"])
    write_model(model, AutoConfig.from_pretrained(model))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text(files[f"model/{name}"])
    return parse_config(
        {
            "name": "turns",
            "steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "none.jsonl"},
            "environment": {
                "kind": "class",
                "path": f"{clocked.__file__}:ClockedEnvironment",
                "arguments": {"out": str(folder / TIMES)},
                "max_turns": MOST_TURNS,
            },
            "rollout": {"max_batch": 8, "max_len": MAX_LEN, "sampling": {"max_new_tokens": MAX_LEN - PROMPT}},
            "reward": {"use": ["environment"]},
        }
    )
