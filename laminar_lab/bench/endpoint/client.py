"""Agents of `laminar bench endpoint`: the requests of many, sent by one process with the keys that these hand out.

Invariant: an agent asks as clients of the API do, the whole conversation each time, and reads every event.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec

from laminar_lab.bench.endpoint.conversations import Timed

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
