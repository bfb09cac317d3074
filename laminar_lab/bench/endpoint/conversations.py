"""Conversations of `laminar bench endpoint`, and their agents: one process sends the requests of all agents.

Conversations are the same in each round. An agent sends the whole conversation each time, as clients of the API
do, and reads every event.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from laminar_lab.bench.turns.replica import PlayRound, TimedRound
from laminar_py.data import SPECIAL
from laminar_py.records import Problem, SamplingParams
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind

MARKS = ("<user>", "<assistant>")
VOCAB = 8192
NUMBERS = [f"{number:04d}" for number in range(VOCAB - len(MARKS) - len(SPECIAL))]  # a token each
PROMPT, MAX_LEN = 16, 1024  # tokens of a prompt, of a trajectory at most
PATIENCE_S = 120.0  # for agents to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Agents that speak at a time, e.g. `Conversations(name="many", agents=32, turns=3, tokens=(8, 16))`."""

    name: str
    agents: int
    turns: int
    tokens: tuple[int, int]  # of a turn, the fewest and the most
    words: int = 32  # tokens of an agent's message before each turn

    def lengths(self) -> list[list[int]]:
        """Draw how many tokens each agent gets in each turn."""
        rng = np.random.default_rng(self.agents)
        fewest, most = self.tokens
        drawn: list[list[int]] = rng.integers(fewest, most, (self.agents, self.turns), endpoint=True).tolist()
        return drawn

    def messages(self) -> list[list[str]]:
        """Draw the messages of each agent, one before each turn."""
        rng = np.random.default_rng(self.agents)
        drawn = rng.integers(len(NUMBERS), size=(self.agents, self.turns, self.words)).tolist()
        return [["".join(NUMBERS[word] for word in words) for words in agent] for agent in drawn]

    def play(self, socket: str, *, number: int) -> PlayRound:
        """Make the trajectories of a round; their agents hand their keys to `socket`."""
        names = [f"{self.name}-{number}.{agent}" for agent in range(self.agents)]
        prompt = np.arange(PROMPT, dtype=np.int32)  # no agent's conversation begins with it
        assignments = [
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
        return PlayRound(name=self.name, assignments=assignments, lengths=self.lengths(), at_once=True)


class AgentKey(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to speak for an agent."""

    name: str
    url: str
    key: str


class HandedKeys:
    """Keys that agents have sent to a socket."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[tuple[AgentKey, asyncio.StreamWriter]] = asyncio.Queue()

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read the key of an agent; its connection stays open until its round ends."""
        self._arrived.put_nowait((msgspec.json.decode(await reader.readline(), type=AgentKey), writer))

    @asynccontextmanager
    async def next_keys(self, count: int) -> AsyncIterator[list[AgentKey]]:
        """Yield the keys of so many agents by their numbers; the end of the context ends the agents."""
        async with asyncio.timeout(PATIENCE_S):
            arrived = [await self._arrived.get() for _ in range(count)]
        try:
            yield sorted((key for key, _ in arrived), key=lambda key: int(key.name.rpartition(".")[2]))
        finally:
            for _, writer in arrived:
                writer.close()


@asynccontextmanager
async def open_keys(path: Path) -> AsyncIterator[HandedKeys]:
    """Listen for keys on the socket at `path`."""
    keys = HandedKeys()
    async with await asyncio.start_unix_server(keys.receive, path):
        yield keys


async def converse(keys: Sequence[AgentKey], messages: Sequence[Sequence[str]], *, streams: bool) -> TimedRound:
    """Have all agents speak with their model at the same time."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.monotonic()
        spoken = (_speak(session, key, some, streams=streams) for key, some in zip(keys, messages, strict=True))
        first_s = await asyncio.gather(*spoken)
        return TimedRound(wall_s=time.monotonic() - began, first_s=first_s)


async def _speak(
    session: aiohttp.ClientSession, agent: AgentKey, texts: Sequence[str], *, streams: bool
) -> list[float]:
    """Hold one conversation; return the seconds to the first token of each turn."""
    url, headers = f"{agent.url}/chat/completions", {"Authorization": f"Bearer {agent.key}"}
    messages: list[dict[str, str]] = []
    found = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": "policy", "messages": messages, "stream": streams}
        began = time.monotonic()
        async with session.post(url, json=body, headers=headers) as response:
            response.raise_for_status()
            first_s, answer = await _read_stream(response) if streams else await _read_whole(response)
        found.append(first_s - began)
        messages.append({"role": "assistant", "content": answer})
    return found


async def _read_stream(response: aiohttp.ClientResponse) -> tuple[float, str]:
    """Read a stream; return the moment of its first event, and all its text."""
    first_s, parts = 0.0, []
    async for line in response.content:
        if line.startswith(b"data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            first_s = first_s or time.monotonic()
            parts.append(delta.get("content") or "")
    return first_s, "".join(parts)


async def _read_whole(response: aiohttp.ClientResponse) -> tuple[float, str]:
    body = await response.read()
    return time.monotonic(), str(json.loads(body)["choices"][0]["message"]["content"])
