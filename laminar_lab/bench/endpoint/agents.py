"""Tokens a second of agents through the endpoint over the engine's own, and the time to their first token.

The replica and the process of environments are as in a run. Agents are started as in a run and hand out their
keys; one process sends the requests of all agents over HTTP, on loopback. The engine then answers the same
requests to as many consumers in its own process, token by token where agents stream. Rounds of both take turns on
one engine. The time to the first token runs from a streaming agent's request, less the engine's for
the same request.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from transformers import Qwen3Config

from laminar_lab.bench.endpoint import agent
from laminar_lab.bench.endpoint.conversations import (
    MARKS,
    MAX_LEN,
    NUMBERS,
    PROMPT,
    Conversations,
    HandedKeys,
    converse,
    open_keys,
)
from laminar_lab.bench.report import Ratio, Row, log_line, spread
from laminar_lab.bench.turns.replica import BenchParts, TimedRound
from laminar_lab.bench.workplace import SMALL, workplace, write_model
from laminar_py.config import RunConfig, parse_config
from laminar_py.data import EOS, PAD, SPECIAL, tiny_model
from laminar_py.runtime.cluster import open_cluster

ROWS = ("endpoint_over_engine_stream", "endpoint_over_engine_whole", "endpoint_added_ms")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

MANY = Conversations(name="many", agents=32, turns=3, tokens=(64, 128))
ONE = Conversations(name="one", agents=1, turns=12, tokens=(8, 16))
ONE_TIMES = 5  # in a round, since a few milliseconds scatter more than a rate


@dataclass(frozen=True, slots=True)
class ComparedRound:
    """A round through the endpoint, and the same requests to the engine alone."""

    endpoint: TimedRound
    engine: TimedRound

    @property
    def ratio(self) -> float:
        """Tokens a second through the endpoint over tokens a second of the engine."""
        return self.engine.wall_s / self.endpoint.wall_s

    def added_ms(self) -> float:
        """Return how much later the first token comes than from the engine alone, the median over turns."""
        agents = zip(self.endpoint.first_s, self.engine.first_s, strict=True)
        return median(
            1e3 * (ours_s - alone_s)
            for turns, alone in agents
            for ours_s, alone_s in zip(turns, alone, strict=True)
        )


def rows(*, repeats: int = 5, many: Conversations = MANY, one: Conversations = ONE) -> list[Row]:
    """Measure medians over `repeats` rounds, of one agent over `ONE_TIMES` as many.

    One more round warms all up.
    """
    cases = [(many, True), (many, False), *[(one, True)] * ONE_TIMES]
    with workplace() as folder, open_cluster(None):
        streamed, whole, *single = asyncio.run(_rounds(folder, cases, repeats=repeats))
    return table(many, one, (streamed, whole, [each for rounds in single for each in rounds]))


async def _rounds(
    folder: Path, cases: Sequence[tuple[Conversations, bool]], *, repeats: int
) -> list[list[ComparedRound]]:
    """Return the rounds of each case; the engine alone comes first in every other round."""
    found: list[list[ComparedRound]] = [[] for _ in cases]
    socket, parts = folder / "keys", BenchParts(folder / "run")
    async with open_keys(socket) as keys:
        await parts.start(write_agent_run(folder), messages=True)
        for number in range(repeats + 1):
            for index, (case, streams) in enumerate(cases):
                engine = await parts.replay(case.name, streams=streams) if number % 2 else None
                name = number * len(cases) + index
                endpoint = await _speak(parts, keys, case, socket, number=name, streams=streams)
                compared = ComparedRound(endpoint, engine or await parts.replay(case.name, streams=streams))
                log_line(
                    f"{case.name}, {'streams' if streams else 'whole answers'}: {endpoint.wall_s:.2f} s, engine"
                    f" {compared.engine.wall_s:.2f} s, first token {compared.added_ms():+.2f} ms"
                )
                if number:
                    found[index].append(compared)
    return found


async def _speak(
    parts: BenchParts, keys: HandedKeys, case: Conversations, socket: Path, *, number: int, streams: bool
) -> TimedRound:
    """Run a round of agents, timed by the process that speaks for them."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(parts.play(case.play(str(socket), number=number)), name="replica")
        async with keys.next_keys(case.agents) as given:
            return await converse(given, case.messages(), streams=streams)


def table(many: Conversations, one: Conversations, found: Sequence[Sequence[ComparedRound]]) -> list[Row]:
    """Make the rows of three kinds of rounds: many streaming agents, many with whole answers, one streaming."""
    streamed, whole, single = found
    fewest, most = many.tokens
    tokens = sum(map(sum, many.lengths()))
    where = (
        f"{many.agents} agents of {many.turns} turns of {fewest} to {most} tokens, 25M parameters, one thread; one"
        " process of aiohttp speaks for all, with the keys that their processes hand out; beside the embedded"
        " engine's own stream of the same requests in its process"
    )

    def over(name: str, kind: str, rounds: Sequence[ComparedRound]) -> Row:
        ratio = Ratio.between([each.ratio for each in rounds], [1.0] * len(rounds))
        ours, engine = (
            spread([tokens / seconds for seconds in side])
            for side in ([each.endpoint.wall_s for each in rounds], [each.engine.wall_s for each in rounds])
        )
        return ratio.row(name, f"{kind}, {ours} tokens/s, the engine {engine}; {where}")

    added_ms = [compared.added_ms() for compared in single]
    alone = (
        f"one agent that streams, {one.turns} turns, no other at work; from its request to the first event, less"
        " the engine's time"
    )
    return [
        over("endpoint_over_engine_stream", "streams", streamed),
        over("endpoint_over_engine_whole", "whole answers", whole),
        Row(
            "endpoint_added_ms",
            median(added_ms),
            "ms",
            f"p50, {alone}; median of rounds {spread(added_ms, '.2f')}",
        ),
    ]


def write_agent_run(folder: Path) -> RunConfig:
    """Write a model of 25 million parameters with a chat template; return the config of a run on it."""
    ends = {"eos_token_id": SPECIAL.index(EOS), "pad_token_id": SPECIAL.index(PAD)}
    model = write_model(folder / "model", Qwen3Config.from_dict({**SMALL.to_dict(), **ends}))
    files = tiny_model((*MARKS, *NUMBERS), pattern=r"<\w+>|\d{4}", template=TEMPLATE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).write_text(files[f"model/{name}"])
    return parse_config(
        {
            "name": "endpoint",
            "steps": 1,
            "model": {"path": str(model)},
            "data": {"train": "none.jsonl"},
            "environment": {"kind": "agent", "function": f"{agent.__file__}:run", "max_turns": 100},
            "rollout": {
                "max_batch": MANY.agents,
                "max_len": MAX_LEN,
                "sampling": {"max_new_tokens": MAX_LEN - PROMPT},
            },
            "reward": {"use": ["environment"]},
        }
    )
