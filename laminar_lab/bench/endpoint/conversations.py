"""Conversations of `laminar bench endpoint`, and their agents: one process sends the requests of all.

Conversations are the same in each round. Invariant: an agent asks as clients of the API do, the whole conversation
each time, and reads every event.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import msgspec
import numpy as np

from laminar_py.data import SPECIAL
from laminar_py.records import Problem, SamplingParams
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


PATIENCE_S = 120.0  # for agents to start


class SeenDelta(msgspec.Struct):
    """Text that an event adds."""

    content: str | None = None


class SeenMessage(msgspec.Struct):
    """Message of an answer."""

    content: str


class SeenChoice(msgspec.Struct):
    """Choice of an event, or of a whole answer."""

    delta: SeenDelta | None = None
    message: SeenMessage | None = None


class SeenAnswer(msgspec.Struct):
    """Event of a stream, or a whole answer."""

    choices: list[SeenChoice]


class KeyOfAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Leave to speak for an agent."""

    name: str
    url: str
    key: str


class HandedKeys:
    """Keys of agents, as these come."""

    def __init__(self) -> None:
        self._came: asyncio.Queue[tuple[KeyOfAgent, asyncio.StreamWriter]] = asyncio.Queue()

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Note what an agent tells."""
        self._came.put_nowait((msgspec.json.decode(await reader.readline(), type=KeyOfAgent), writer))

    @asynccontextmanager
    async def of(self, count: int) -> AsyncIterator[list[KeyOfAgent]]:
        """Keys of so many agents, in the order of their numbers; these end with it."""
        async with asyncio.timeout(PATIENCE_S):
            came = [await self._came.get() for _ in range(count)]
        try:
            yield sorted((key for key, _ in came), key=lambda key: int(key.name.rpartition(".")[2]))
        finally:
            for _, writer in came:
                writer.close()


@asynccontextmanager
async def open_keys(path: Path) -> AsyncIterator[HandedKeys]:
    """Keys that come to the socket at `path`."""
    keys = HandedKeys()
    async with await asyncio.start_unix_server(keys.take, path):
        yield keys


async def converse(keys: Sequence[KeyOfAgent], says: Sequence[Sequence[str]], *, streams: bool) -> Timed:
    """Have all agents speak with their model at the same time."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.monotonic()
        spoken = (_speak(session, key, said, streams=streams) for key, said in zip(keys, says, strict=True))
        first_s = await asyncio.gather(*spoken)
        return Timed(wall_s=time.monotonic() - began, first_s=first_s)


async def _speak(
    session: aiohttp.ClientSession, key: KeyOfAgent, says: Sequence[str], *, streams: bool
) -> list[float]:
    """Seconds to the first token of each turn."""
    url, headers = f"{key.url}/chat/completions", {"Authorization": f"Bearer {key.key}"}
    messages: list[dict[str, str]] = []
    found = []
    for said in says:
        messages.append({"role": "user", "content": said})
        body = {"model": "policy", "messages": messages, "stream": streams}
        began = time.monotonic()
        async with session.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            first_s, text = await _stream(response) if streams else await _whole(response)
        found.append(first_s - began)
        messages.append({"role": "assistant", "content": text})
    return found


async def _stream(response: aiohttp.ClientResponse) -> tuple[float, str]:
    """Read a stream; the time of its first token, and all of its text."""
    first_s, parts = 0.0, []
    async for line in response.content:
        if line.startswith(b"data: {"):
            delta = msgspec.json.decode(line[6:], type=SeenAnswer).choices[0].delta
            first_s = first_s or time.monotonic()
            parts.append((delta and delta.content) or "")
    return first_s, "".join(parts)


async def _whole(response: aiohttp.ClientResponse) -> tuple[float, str]:
    body = await response.read()
    message = msgspec.json.decode(body, type=SeenAnswer).choices[0].message
    assert message is not None, body
    return time.monotonic(), message.content
