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

ROWS = "turn_added_ms turn_total_ms turn_engine_ms turn_2000_kept_ms turn_2000_computed_ms"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT, WORDS, MAX_LEN = 16, 16, 2560  # tokens of a prompt, of an answer, of a trajectory at most
MOST_TURNS = 100
TIMES = "times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Trajectories of a round, e.g. `Case(name="short", count=10, turns=16, first=64)`."""

    name: str
    count: int
    turns: int
    first: int  # tokens that the environment says before the first turn
    keeps: bool = True

    def play(self, number: int) -> PlayRound:
        """Make a round of trajectories whose turns have one token."""
        rng = np.random.default_rng([self.first, number])
        vocab = len(SPECIAL) + len(LETTERS)
        sampling = SamplingParams(max_new_tokens=MAX_LEN - PROMPT, stop_ids=tuple(range(vocab)))
        names = [f"{self.name}-{number}.{index}" for index in range(self.count)]
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
        return PlayRound(name=self.name, assignments=assignments, lengths=lengths, at_once=False, keeps=self.keeps)


SHORT = Case(name="short", count=10, turns=16, first=64)
LONG = Case(name="long", count=3, turns=16, first=2000)
COMPUTED = Case(name="computed", count=3, turns=16, first=2000, keeps=False)


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


def rows(*, repeats: int = 5, cases: Sequence[Case] = (SHORT, LONG, COMPUTED)) -> list[Row]:
    """Measure each case, medians over `repeats` rounds; one more round before them warms all parts up."""
    with workplace() as folder, open_cluster(None):
        found = asyncio.run(_rounds(folder, cases, repeats=repeats))
    return table(cases, found)


async def _rounds(folder: Path, cases: Sequence[Case], *, repeats: int) -> list[list[TurnTimes]]:
    """Return the times of each case, round by round."""
    times = folder / TIMES
    times.mkdir()
    config, parts = write_inputs(folder), BenchParts(folder / "run")
    await parts.start(config, messages=False)
    found: list[list[TurnTimes]] = [[] for _ in cases]
    for number in range(repeats + 1):
        for case, kept in zip(cases, found, strict=True):
            play = case.play(number)
            played = await parts.play(play)
            alone = await parts.replay(case.name, streams=True)
            answered_s = [json.loads((times / one.trajectory_id).read_text()) for one in play.assignments]
            taken = turn_times(answered_s, played.first_s, alone.first_s)
            log_line(f"{case.name}: {taken.total:.2f} ms, engine {taken.engine:.2f}, added {taken.added:.2f}")
            if number:
                kept.append(taken)
    return found


def table(cases: Sequence[Case], found: Sequence[Sequence[TurnTimes]]) -> list[Row]:
    """Make the rows of three cases: short, long, and long on an engine that keeps no KV cache."""

    def row(name: str, place: int, values: list[float], detail: str = "") -> Row:
        case = cases[place]
        where = (
            f"p50, {case.count} trajectories of {case.turns} turns behind {PROMPT + case.first} tokens and more"
        )
        return Row(name, median(values), "ms", f"{where}{detail}; median of rounds {spread(values, '.2f')}")

    short, long, computed = found
    return [
        row("turn_added_ms", 0, [times.added for times in short], ", without the engine's own time"),
        row("turn_total_ms", 0, [times.total for times in short]),
        row("turn_engine_ms", 0, [times.engine for times in short], ", from its request to the engine alone"),
        row("turn_2000_kept_ms", 1, [times.total for times in long]),
        row("turn_2000_computed_ms", 2, [times.total for times in computed], ", no KV cache kept between them"),
    ]


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
