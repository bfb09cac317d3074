"""Time that we add between an environment's answer and the first token of the next turn.

Trajectories run one after the other through a replica and an environment's process as a run has them, which reach
each other over Ray. The environment takes no time and notes when it has answered, by its own clock, which is the
replica's too: `time.monotonic` is one clock for a host. Turns are of one token, so a turn's first token leaves the
engine at once; its time is taken where the replica has it. From that goes off what the engine takes for the same
turn in the same process with nothing else to do, prefill and one step of decoding, without the thread that it
otherwise has: what handing over to that thread takes is added by us.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from transformers import AutoConfig

from laminar_lab.bench.report import Row, Tell, spread
from laminar_lab.bench.turns import clocked
from laminar_lab.bench.turns.replica import ClockedReplicaActor, Play, Played, TurnParts
from laminar_lab.bench.workplace import workplace, write_model
from laminar_py.config import RunConfig, parse_config
from laminar_py.data import SPECIAL, tiny_model
from laminar_py.records import Problem, SamplingParams
from laminar_py.records.codec import encode
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

    def assignments(self, number: int) -> list[Assignment]:
        """Trajectories of a round; every token ends a turn."""
        rng = np.random.default_rng([self.first, number])
        vocab = len(SPECIAL) + len(LETTERS)
        sampling = SamplingParams(max_new_tokens=MAX_LEN - PROMPT, stop_ids=tuple(range(vocab)))
        names = [f"{self.name}-{number}.{index}" for index in range(self.count)]
        return [
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


SHORT = Case(name="short", count=10, turns=16, first=64)
LONG = Case(name="long", count=3, turns=16, first=2000)
COMPUTED = Case(name="computed", count=3, turns=16, first=2000, keeps=False)


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Medians over the turns of a round but the first of each trajectory, in ms."""

    total: float  # from the environment's answer to the first token
    engine: float  # that the engine alone takes for it
    added: float  # by which the one exceeds the other, turn by turn

    @classmethod
    def of(cls, answered_s: dict[str, list[float]], played: Played) -> "TurnTimes":
        """From the times of all turns, by trajectory."""
        totals, engines = [], []
        for name, turns in played.items():
            for answered, turn in list(zip(answered_s[name], turns, strict=True))[1:]:
                totals.append(1e3 * (turn.first_s - answered))
                engines.append(1e3 * turn.alone_s)
        added = [total - engine for total, engine in zip(totals, engines, strict=True)]
        return cls(median(totals), median(engines), median(added))


class TurnsBench:
    """A replica and an environment's process, e.g. `TurnsBench(folder)`, within a Ray cluster."""

    def __init__(self, folder: Path) -> None:
        self._config, self._times = write_inputs(folder), folder / TIMES
        self._times.mkdir()
        self._parts = TurnParts(folder / "run", ClockedReplicaActor)

    async def start(self) -> None:
        """Return once both serve."""
        await self._parts.start(self._config, messages=False)

    async def round(self, case: Case, number: int) -> TurnTimes:
        """Times of a round."""
        play = Play(assignments=case.assignments(number), keeps=case.keeps)
        played = await self._parts.replica.call_for(Played, "play", encode(play))
        return TurnTimes.of({name: json.loads((self._times / name).read_text()) for name in played}, played)


def rows(*, repeats: int = 5, tell: Tell, cases: Sequence[Case] = (SHORT, LONG, COMPUTED)) -> list[Row]:
    """Figures, medians over `repeats` rounds; one more before them warms all up."""
    with workplace() as folder, open_cluster(None):
        found = asyncio.run(_rounds(folder, cases, repeats=repeats, tell=tell))
    return table(cases, found)


async def _rounds(folder: Path, cases: Sequence[Case], *, repeats: int, tell: Tell) -> list[list[TurnTimes]]:
    """Times of each case, round by round."""
    bench = TurnsBench(folder)
    await bench.start()
    found: list[list[TurnTimes]] = [[] for _ in cases]
    for number in range(repeats + 1):
        for case, times in zip(cases, found, strict=True):
            taken = await bench.round(case, number)
            tell(f"{case.name}: {taken.total:.2f} ms, engine alone {taken.engine:.2f}, added {taken.added:.2f}")
            if number:
                times.append(taken)
    return found


def table(cases: Sequence[Case], found: Sequence[Sequence[TurnTimes]]) -> list[Row]:
    """Rows of the times of three cases: short, long, and long on an engine that keeps nothing."""

    def row(name: str, place: int, values: list[float], told: str = "") -> Row:
        case = cases[place]
        where = (
            f"p50, {case.count} trajectories of {case.turns} turns behind {PROMPT + case.first} tokens and more"
        )
        return Row(name, median(values), "ms", f"{where}{told}; median of rounds {spread(values, '.2f')}")

    short, long, computed = found
    return [
        row("turn_added_ms", 0, [times.added for times in short], ", without the engine's own time"),
        row("turn_total_ms", 0, [times.total for times in short]),
        row("turn_engine_ms", 0, [times.engine for times in short], ", prefill and one step, alone"),
        row("turn_2000_kept_ms", 1, [times.total for times in long]),
        row("turn_2000_computed_ms", 2, [times.total for times in computed], ", no KV cache kept between them"),
    ]


def write_inputs(folder: Path) -> RunConfig:
    """Write a model of 230,000 parameters; returns the config of a run on it."""
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
