"""`laminar bench endpoint`: what agents get through the endpoint, over what the engine alone gives.

A replica and a process of environments as a run has them, over Ray. Agents are started as in a run and hand out
their keys; one process speaks for all of them over HTTP, on loopback. Then the engine is asked the same by as many
consumers in its own process, token by token where agents stream. Rounds of both are taken in turn, by engines of
one process. The time to the first token is an agent's that streams, from its request on, less the engine's for the
same request.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from transformers import Qwen3Config

from laminar_lab.bench.endpoint import agent
from laminar_lab.bench.endpoint.conversations import (
    MARKS,
    MAX_LEN,
    NUMBERS,
    PROMPT,
    ComparedRound,
    Conversations,
    HandedKeys,
    Timed,
    converse,
    open_keys,
)
from laminar_lab.bench.endpoint.replica import FixedTurnReplicaActor, RoundAlone, SpokenRound
from laminar_lab.bench.report import Ratio, Row, Tell, spread
from laminar_lab.bench.turns.replica import TurnParts
from laminar_lab.bench.workplace import SMALL, workplace, write_model
from laminar_py.config import RunConfig, parse_config
from laminar_py.data import EOS, PAD, SPECIAL, tiny_model
from laminar_py.records.codec import encode
from laminar_py.runtime.cluster import open_cluster

ROWS = (
    "endpoint_over_engine endpoint_over_engine_stream endpoint_over_engine_whole endpoint_stream_tokens_per_s "
    "engine_stream_tokens_per_s endpoint_whole_tokens_per_s engine_whole_tokens_per_s endpoint_added_ms "
    "endpoint_added_p95_ms endpoint_added_many_ms"
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

MANY = Conversations(name="many", agents=32, turns=3, tokens=(64, 128))
ONE = Conversations(name="one", agents=1, turns=12, tokens=(8, 16))
ONE_TIMES = 5  # in a round, since a few milliseconds scatter more than a rate


class EndpointBench:
    """A replica and an environments' process, e.g. `EndpointBench(folder, keys)`, within a Ray cluster."""

    def __init__(self, folder: Path, keys: HandedKeys, socket: Path) -> None:
        self._config = write_agent_run(folder)
        self._keys, self._socket = keys, socket
        self._parts = TurnParts(folder / "run", FixedTurnReplicaActor)

    async def start(self) -> None:
        """Return once both serve."""
        await self._parts.start(self._config, messages=True)

    async def speak(self, case: Conversations, *, number: int, streams: bool) -> Timed:
        """A round of agents."""
        assignments = case.assignments(str(self._socket), number=number)
        round = SpokenRound(assignments=assignments, lengths=case.lengths())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._parts.replica.call("speak", encode(round)), name="replica")
            async with self._keys.of(case.agents) as keys:
                return await converse(keys, case.says(), streams=streams)

    async def alone(self, case: Conversations, *, streams: bool) -> Timed:
        """Have the engine answer a round by itself."""
        again = RoundAlone(name=case.name, lengths=case.lengths(), streams=streams)
        return await self._parts.replica.call_for(Timed, "alone", encode(again))


@asynccontextmanager
async def open_bench(folder: Path) -> AsyncIterator[EndpointBench]:
    """Start both, for as long as it is open."""
    socket = folder / "keys"
    async with open_keys(socket) as keys:
        bench = EndpointBench(folder, keys, socket)
        await bench.start()
        yield bench


def rows(*, repeats: int = 5, tell: Tell, many: Conversations = MANY, one: Conversations = ONE) -> list[Row]:
    """Figures, medians over `repeats` rounds, of one agent over `ONE_TIMES` as many; one more warms all up."""
    cases = [(many, True), (many, False), *[(one, True)] * ONE_TIMES]
    with workplace() as folder, open_cluster(None):
        streamed, whole, *single = asyncio.run(_rounds(folder, cases, repeats=repeats, tell=tell))
    return table(many, one, (streamed, whole, [each for rounds in single for each in rounds]))


async def _rounds(
    folder: Path, cases: Sequence[tuple[Conversations, bool]], *, repeats: int, tell: Tell
) -> list[list[ComparedRound]]:
    """Rounds of each case; the engine alone comes first in every other."""
    found: list[list[ComparedRound]] = [[] for _ in cases]
    async with open_bench(folder) as bench:
        for number in range(repeats + 1):
            for place, (case, streams) in enumerate(cases):
                name = number * len(cases) + place
                one = await _round(bench, case, number=name, streams=streams, alone_first=number % 2 > 0)
                told = f"first token {one.added_ms():+.2f} ms" if streams else "whole answers"
                tell(
                    f"{case.name}: {one.endpoint.wall_s:.2f} s, engine {one.engine.wall_s:.2f} s,"
                    f" {one.ratio:.3f}; {told}"
                )
                if number:
                    found[place].append(one)
    return found


async def _round(
    bench: EndpointBench, case: Conversations, *, number: int, streams: bool, alone_first: bool
) -> ComparedRound:
    if alone_first:
        engine = await bench.alone(case, streams=streams)
        return ComparedRound(await bench.speak(case, number=number, streams=streams), engine)
    endpoint = await bench.speak(case, number=number, streams=streams)
    return ComparedRound(endpoint, await bench.alone(case, streams=streams))


def table(many: Conversations, one: Conversations, found: Sequence[Sequence[ComparedRound]]) -> list[Row]:
    """Rows of rounds of many agents that stream, of many that do not, and of one that streams."""
    streamed, whole, single = found
    fewest, most = many.tokens
    where = (
        f"{many.agents} agents of {many.turns} turns of {fewest} to {most} tokens, 25M parameters, one thread; one"
        " process of aiohttp speaks for all, with the keys that their processes hand out; beside the embedded"
        " engine's own stream of the same requests in its process"
    )
    ratios = [Ratio.of([each.ratio for each in rounds], [1.0] * len(rounds)) for rounds in (streamed, whole)]
    lower = min(ratios, key=lambda ratio: ratio.median)
    tokens = sum(map(sum, many.lengths()))

    def rate(name: str, seconds: list[float]) -> Row:
        rates = [tokens / each for each in seconds]
        return Row(name, median(rates), "tokens/s", f"{where}; {spread(rates)}")

    def added(name: str, values: list[float], told: str) -> Row:
        return Row(name, median(values), "ms", f"{told}; median of rounds {spread(values, '.2f')}")

    alone = (
        f"p50, one agent that streams, {one.turns} turns, no other at work; from its request to the first event"
    )
    return [
        Row("endpoint_over_engine", lower.median, "x", f"the lower of the next two; {where}"),
        Row("endpoint_over_engine_stream", ratios[0].median, "x", f"streams, {ratios[0]}; {where}"),
        Row("endpoint_over_engine_whole", ratios[1].median, "x", f"whole answers, {ratios[1]}; {where}"),
        rate("endpoint_stream_tokens_per_s", [each.endpoint.wall_s for each in streamed]),
        rate("engine_stream_tokens_per_s", [each.engine.wall_s for each in streamed]),
        rate("endpoint_whole_tokens_per_s", [each.endpoint.wall_s for each in whole]),
        rate("engine_whole_tokens_per_s", [each.engine.wall_s for each in whole]),
        added("endpoint_added_ms", [each.added_ms() for each in single], f"{alone}, less the engine's"),
        added("endpoint_added_p95_ms", [each.added_ms(0.95) for each in single], f"p95 in place of {alone}"),
        added("endpoint_added_many_ms", [each.added_ms() for each in streamed], f"p50, streams; {where}"),
    ]


def write_agent_run(folder: Path) -> RunConfig:
    """Write a model of 25 million parameters with a chat template; returns the config of a run on it."""
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
