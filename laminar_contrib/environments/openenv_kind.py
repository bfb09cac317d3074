"""The kind `openenv`: an environment on an OpenEnv server, played in words.

A trajectory is one session of the server. A turn takes at most one step; it takes none if it has no action, or one
that the server refuses (`tests/environment/test_openenv.py`).

A session has one WebSocket, which lasts as long as its trajectory. Messages are JSON, and each but the last has
one answer:

    -> {"type": "reset", "data": {"seed": 7}}       <- {"type": "observation", "data": {"observation": {...}, ...}}
    -> {"type": "step", "data": {"message": "4"}}   <- the same, or {"type": "error", "data": {"code": ..., ...}}
    -> {"type": "close"}

A session always reads, so that it answers the server's pings while the model samples. The size of a message is
bounded.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import msgspec
from pydantic import JsonValue, model_validator

from laminar_py.config import ConfigError, EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.environment import (
    Answer,
    CallFailedError,
    End,
    Environment,
    Observation,
    Problem,
    check_pattern,
    last_group,
    outside_reasoning,
)
from laminar_py.records import DropReason

CONNECT_S = 10.0
CLOSE_S = 2.0
NO_ROOM = "CAPACITY_REACHED"  # code of a server that has as many sessions as it takes
INVALID = "VALIDATION_ERROR"  # code for an action that is none of its kind
ROOM_TRIES = 20  # since a session that ends may still take its place
ROOM_PAUSE_S = 0.25


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a reset or a step, e.g. `Observed(observation={"hint": "more"}, reward=0.0)`."""

    observation: dict[str, Any]
    reward: bool | float | None = None
    done: bool = False


class ServerFault(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of a server that refused a request; `errors` describe the faults of an action."""

    message: str = ""
    code: str = ""
    errors: list[dict[str, Any]] = []

    @property
    def line(self) -> str:
        """The fault in one line."""
        faults = [f"{'.'.join(map(str, fault.get('loc', ())))}: {fault.get('msg', '')}" for fault in self.errors]
        return "; ".join(faults) or self.message


class ObservationMessage(msgspec.Struct, frozen=True, tag="observation", tag_field="type"):
    """Message of a server after a reset or a step."""

    data: Observed


class FaultMessage(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """Message of a server that refused a reset or a step."""

    data: ServerFault


class ServerFaultError(Exception):
    """A server refused a request, or failed."""

    def __init__(self, fault: ServerFault) -> None:
        super().__init__(f"its server says {fault.code}: {fault.line}")
        self.fault = fault


class OpenEnvSession:
    """A running session, e.g. `await session.send_request("step", {"message": "4"})`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._coming = asyncio.create_task(socket.receive(), name="openenv-message")

    async def send_request(self, kind: str, data: Mapping[str, Any]) -> Observed:
        """Send a request and return the server's answer.

        Raises `ServerFaultError`, `ValueError` if the answer cannot be read, `CallFailedError` if the session is
        lost.
        """
        is_unasked = self._coming.done()
        if not is_unasked:
            await self._send({"type": kind, "data": data})
        message = self._read(await self._coming)
        self._coming = asyncio.create_task(self._socket.receive(), name="openenv-message")
        if isinstance(message, FaultMessage):
            raise ServerFaultError(message.data)
        if is_unasked:
            raise ValueError("its server sent a message without a request")
        return message.data

    async def close(self) -> None:
        """End the session, on the server too."""
        self._coming.cancel()
        await asyncio.gather(self._coming, return_exceptions=True)
        await self._send({"type": "close"})
        await self._socket.close()

    async def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError, aiohttp.ClientError):  # the next message, or the end, says why
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
        """Fetch the JSON schema of the server's actions. Raises `OSError` if the server does not answer."""
        try:
            async with asyncio.timeout(CONNECT_S), self._http.get(f"{self._url}/schema") as answer:
                answer.raise_for_status()
                schemas = msgspec.json.decode(await answer.read(), type=dict[str, dict[str, Any]])
                return schemas["action"]
        except (aiohttp.ClientError, ValueError, KeyError, TimeoutError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    async def begin(self, data: Mapping[str, Any]) -> tuple[OpenEnvSession, Observed]:
        """Wait until the server has room, open a session and reset it. Raises as `send_request` does."""
        for _ in range(ROOM_TRIES):
            try:
                return await self._begin(data)
            except ServerFaultError as error:
                if error.fault.code != NO_ROOM:
                    raise
            await asyncio.sleep(ROOM_PAUSE_S)  # no server says when it has
        return await self._begin(data)

    async def _begin(self, data: Mapping[str, Any]) -> tuple[OpenEnvSession, Observed]:
        """Open a session and reset it with `data`; return session and first observation."""
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
            return session, await session.send_request("reset", data)
        except BaseException:
            await session.close()
            raise


@asynccontextmanager
async def connected(url: str, *, max_message_bytes: int) -> AsyncIterator[OpenEnvServer]:
    """Open a server; its sessions end with the context."""
    unlimited = aiohttp.TCPConnector(limit=0)  # trajectories in flight are bounded, and each has one
    async with aiohttp.ClientSession(connector=unlimited) as http:
        yield OpenEnvServer(http, url, max_message_bytes=max_message_bytes)


def _is_too_big(error: object) -> bool:
    return isinstance(error, aiohttp.WebSocketError) and error.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


def _lost(detail: str) -> CallFailedError:
    return CallFailedError(DropReason.ENVIRONMENT_LOST, detail)


OBJECT = re.compile(r"(\{.*\})", re.DOTALL)
ESCAPED = 6  # bytes of JSON for one of text, at most
MORE_BYTES = 2**20  # of a message, beyond the observation that the model reads
FAULT_CHARS = 400  # of a fault in an action


class OpenEnvEnvironment(EnvironmentConfig):
    """An environment that a server of OpenEnv has; the reward is the sum of its steps' rewards."""

    kind: str = "openenv"
    url: str
    """Address of the server, e.g. `http://10.0.0.4:8000`. It is to take as many sessions as trajectories are in
    flight (`max_concurrent_envs`)."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of `reset`, beside the seed and the fields of the problem."""
    action_field: str | None = None
    """Field of an action that gets the text of a turn, e.g. `message`. Default: the only field that the server's
    schema requires, if that field is a text; else a turn has the whole action, as a JSON object."""
    pattern: str | None = None
    """Regular expression whose first group is the action: its last match in a turn, outside of reasoning, counts.
    Default: the whole turn, or the object in it."""
    opens_reasoning: bool = False
    """True where the chat template itself writes the `<think>` that a turn begins in."""
    form: str | None = None
    """An observation as the model reads it, with `{name}` for its fields, e.g. `{hint}`. Default: all of them but
    `metadata`, as JSON."""
    deterministic: bool = False
    """The same actions always have the same answers, so a crash of the process repeats the actions. Otherwise the
    crash drops the trajectory as `environment_lost`."""

    @model_validator(mode="after")
    def _check_openenv(self) -> Self:
        check_pattern(self.pattern)
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.url={self.url}: no URL; write for example http://10.0.0.4:8000")
        return self


def read_action(settings: OpenEnvEnvironment, name: str | None, turn: str) -> dict[str, Any] | None:
    """Read the action of a turn; None if it has none.

    The text of the turn is the field `name` of the action, e.g. `{"message": "4"}`, or else the action as JSON.
    """
    said = outside_reasoning(turn, begun=settings.opens_reasoning).strip()
    if settings.pattern is not None:
        said = last_group(re.compile(settings.pattern), said) or ""
    if name is not None:
        return {name: said} if said else None
    try:
        return msgspec.json.decode(last_group(OBJECT, said) or "", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


class OpenEnvTurns:
    """A trajectory in a session of its own."""

    def __init__(self, server: OpenEnvServer, settings: OpenEnvEnvironment, field: str | None) -> None:
        self._server = server
        self._field = field  # of an action that gets the text of a turn
        self._settings = settings
        self._session: OpenEnvSession | None = None
        self._earned: float | None = None  # of the steps so far; None where none of them said
        self.deterministic = settings.deterministic

    async def reset(self, problem: Problem) -> Observation:
        """Begin a session with the fields of the problem; the server ignores unknown ones."""
        given = {"prompt": problem.prompt, "answer": problem.answer, "task": problem.task}
        row = {name: value for name, value in given.items() if value}
        named = {"seed": problem.seed, "episode_id": problem.trajectory_id}
        self._session, observed = await self._server.begin(
            {**named, **row, **self._settings.arguments, **problem.fields}
        )
        if observed.done:
            raise ValueError("it is over before the first turn")
        return Observation(self._text(observed))

    async def step(self, action: str) -> Answer:
        """Take the action of a turn, or tell the model that it has none."""
        assert self._session is not None, "reset has begun it"
        data = read_action(self._settings, self._field, action)
        if data is None:
            what = "one" if self._field is not None else "one as a JSON object"
            return Observation(f"No action. Write {what}.")
        try:
            observed = await self._session.send_request("step", data)
        except ServerFaultError as error:
            if error.fault.code != INVALID:
                raise
            return Observation(f"No action: {error.fault.line[:FAULT_CHARS]}")
        if observed.reward is not None:
            self._earned = (self._earned or 0.0) + float(observed.reward)
        return End(self._earned) if observed.done else Observation(self._text(observed))

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    def _text(self, observed: Observed) -> str:
        fields = {name: value for name, value in observed.observation.items() if name != "metadata"}
        if self._settings.form is None:
            return msgspec.json.encode(fields).decode()
        try:
            return self._settings.form.format(**observed.observation)
        except (LookupError, AttributeError) as error:
            known = ", ".join(fields)
            raise ValueError(f"environment.form has {error}, and an observation has {known}") from error


@asynccontextmanager
async def open_openenv(
    settings: OpenEnvEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments.

    Raises `ConfigError` if no server answers, or its actions differ.
    """
    most = ESCAPED * settings.max_observation_bytes + MORE_BYTES
    async with connected(settings.url, max_message_bytes=most) as server:
        try:
            schema = await server.action_schema()
        except OSError as error:
            remedy = "start one there, or mend the address"
            raise ConfigError(f"environment.url={settings.url}: no OpenEnv server ({error}); {remedy}") from error
        field = _action_field(settings, schema)
        yield lambda: OpenEnvTurns(server, settings, field)


def _action_field(settings: OpenEnvEnvironment, schema: Mapping[str, Any]) -> str | None:
    """Return the action field that takes a turn's text; None if turns are JSON. Raises `ConfigError`."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if settings.action_field is None:
        is_text = len(required) == 1 and properties.get(required[0], {}).get("type") == "string"
        return str(required[0]) if is_text else None
    given = f"environment.action_field={settings.action_field}"
    if settings.action_field not in properties:
        raise ConfigError(f"{given}: no field of an action; choose of {', '.join(properties)}")
    if more := [name for name in required if name != settings.action_field]:
        raise ConfigError(f"{given}: an action needs {', '.join(more)} too; leave it out, and have turns of JSON")
    return settings.action_field


OPENENV = EnvironmentKind(settings=OpenEnvEnvironment, open=open_openenv)
