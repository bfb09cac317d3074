"""Sessions of an OpenEnv server, one WebSocket each, which last as long as their trajectories.

Owned by `openenv_kind`. Messages are JSON, and each but the last has one answer:

    -> {"type": "reset", "data": {"seed": 7}}       <- {"type": "observation", "data": {"observation": {...}, ...}}
    -> {"type": "step", "data": {"message": "4"}}   <- the same, or {"type": "error", "data": {"code": ..., ...}}
    -> {"type": "close"}

Invariants: a session is read at all times, so that the pings of its server are answered while the model samples;
what is read of a message is bounded.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from laminar_py.environment import CallFailedError
from laminar_py.records import DropReason

CONNECT_S = 10.0
CLOSE_S = 2.0
NO_ROOM = "CAPACITY_REACHED"  # code of a server that has as many sessions as it takes
INVALID = "VALIDATION_ERROR"  # code for an action that is none of its kind
ROOM_TRIES = 20  # since a session that ends may still take its place
ROOM_PAUSE_S = 0.25
SCHEMA_BYTES = 2**22


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a reset or a step, e.g. `Observed(observation={"hint": "more"}, reward=0.0)`."""

    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False


class ServerFault(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to what a server did not do; `errors` say what is wrong with an action."""

    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = []

    @property
    def line(self) -> str:
        """Fault in one line."""
        told = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}" for one in self.errors]
        return "; ".join(told) or self.message


class ObservationMessage(msgspec.Struct, frozen=True, tag="observation", tag_field="type"):
    """Message that a reset or a step was done."""

    data: Observed


class FaultMessage(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """Message that a reset or a step was not done."""

    data: ServerFault


class ServerFaultError(Exception):
    """Refusal of a server, or its failure."""

    def __init__(self, fault: ServerFault) -> None:
        super().__init__(f"its server says {fault.code}: {fault.line}")
        self.fault = fault


class OpenEnvSession:
    """Session that goes on, e.g. `await session.ask("step", {"message": "4"})`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._coming = asyncio.create_task(socket.receive(), name="openenv-message")

    async def ask(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """Answer to a message.

        Raises `ServerFaultError`, `ValueError` for what is no answer, `CallFailedError` where the session is lost.
        """
        is_unasked = self._coming.done()
        if not is_unasked:
            await self._send({"type": kind, "data": data})
        told = self._read(await self._coming)
        self._coming = asyncio.create_task(self._socket.receive(), name="openenv-message")
        if isinstance(told, FaultMessage):
            raise ServerFaultError(told.data)
        if is_unasked:
            raise ValueError("its server answered what nobody had asked")
        return told.data

    async def close(self) -> None:
        """End the session, on the server too."""
        self._coming.cancel()
        await asyncio.gather(self._coming, return_exceptions=True)
        await self._send({"type": "close"})
        await self._socket.close()

    async def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, aiohttp.ClientError):  # what comes, if only the end, says why
            await self._socket.send_str(msgspec.json.encode(message).decode())

    def _read(self, message: aiohttp.WSMessage) -> ObservationMessage | FaultMessage:
        if message.type is aiohttp.WSMsgType.TEXT:
            try:
                return msgspec.json.decode(message.data, type=ObservationMessage | FaultMessage)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"its server answered no message of OpenEnv ({error})") from error
        if message.type is aiohttp.WSMsgType.ERROR and _is_too_big(message.data):
            raise ValueError(f"its server answered too much ({message.data})")
        raise _lost(f"its server ended the session (WebSocket code {self._socket.close_code})")


class OpenEnvServer:
    """Server of environments, e.g. `OpenEnvServer(http, "http://127.0.0.1:8000", max_message_bytes=2**20)`."""

    def __init__(self, http: aiohttp.ClientSession, url: str, *, max_message_bytes: int) -> None:
        self._http = http
        self._url = url.rstrip("/")
        self._max_message_bytes = max_message_bytes

    async def action_schema(self) -> dict[str, Any]:
        """JSON schema of its actions. Raises `OSError` where there is no such server."""
        try:
            async with asyncio.timeout(CONNECT_S), self._http.get(f"{self._url}/schema") as answer:
                answer.raise_for_status()
                schemas = msgspec.json.decode(await _read(answer.content), type=dict[str, dict[str, Any]])
                return schemas["action"]
        except (aiohttp.ClientError, ValueError, KeyError, TimeoutError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def begin(self, data: Mapping[str, Any]) -> tuple[OpenEnvSession, Observed]:
        """Session, and the answer to its reset, once the server has room. Raises as `ask` does."""
        for _ in range(ROOM_TRIES):
            try:
                return await self._begin(data)
            except ServerFaultError as error:
                if error.fault.code != NO_ROOM:
                    raise
            await asyncio.sleep(ROOM_PAUSE_S)  # no server says when it has
        return await self._begin(data)

    async def _begin(self, data: Mapping[str, Any]) -> tuple[OpenEnvSession, Observed]:
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await self._http.ws_connect(
                    f"{self._url}/ws",
                    max_msg_size=self._max_message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_S),
                )
        except (OSError, aiohttp.ClientError) as error:
            raise _lost(f"no session at {self._url} ({error})") from error
        session = OpenEnvSession(socket)
        try:
            return session, await session.ask("reset", data)
        except BaseException:
            await session.close()
            raise


@asynccontextmanager
async def connected(url: str, *, max_message_bytes: int) -> AsyncIterator[OpenEnvServer]:
    """A server whose sessions end with it."""
    unlimited = aiohttp.TCPConnector(limit=0)  # trajectories in flight are bounded, and each has one
    async with aiohttp.ClientSession(connector=unlimited) as http:
        yield OpenEnvServer(http, url, max_message_bytes=max_message_bytes)


async def _read(content: aiohttp.StreamReader) -> bytes:
    """Body of an answer. Raises `ValueError` above `SCHEMA_BYTES`."""
    found = b""
    while chunk := await content.read(SCHEMA_BYTES):
        found += chunk
        if len(found) > SCHEMA_BYTES:
            raise ValueError(f"more than {SCHEMA_BYTES:,} bytes")
    return found


def _is_too_big(error: object) -> bool:
    return isinstance(error, aiohttp.WebSocketError) and error.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


def _lost(detail: str) -> CallFailedError:
    return CallFailedError(DropReason.ENVIRONMENT_LOST, detail)
