"""The kind `openenv`: an environment on an OpenEnv server, played in words.

A trajectory is one session of the server. A turn takes at most one step; it takes none without an
action, or if the server refuses its action (`tests/environment/test_openenv.py`).

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
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import aiohttp
import msgspec
from pydantic import JsonValue, model_validator

from laminar_contrib.environments.turns import ActionConfig, row_of
from laminar_py.config import ConfigError, EnvironmentHome, EnvironmentKind
from laminar_py.environment import Answer, CallFailedError, End, Environment, Observation, Problem
from laminar_py.records import DropReason

CONNECT_S = 10.0
CLOSE_S = 2.0
SERVER_FULL = "CAPACITY_REACHED"  # code of a server that has as many sessions as it takes
INVALID = "VALIDATION_ERROR"  # code for an action that does not fit the server's schema
MAX_TRIES = 20  # at a full server: a session that ends may still take its place
RETRY_S = 0.25
ESCAPED_BYTES = 6  # of JSON for one byte of text, at most
EXTRA_BYTES = 2**20  # of a message, beyond the observation that the model reads
FAULT_CHARS = 400  # of a fault in an action
JSON_OBJECT = r"(?s)\A[^{]*(\{.*\})"  # anchored, else each brace of a long turn would scan all text behind it
WHOLE_TURN = r"(?s)\A(.*)\Z"


class OpenEnvEnvironment(ActionConfig):
    """An environment on an OpenEnv server; the reward is the sum of its steps' rewards.

    Without a pattern, the whole turn is the action, or the JSON object in it.
    """

    kind: str = "openenv"
    url: str
    """Address of the server, e.g. `http://10.0.0.4:8000`. It must take as many sessions as trajectories are in
    flight (`max_concurrent_envs`)."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of `reset`, beside the seed and the fields of the problem."""
    action_field: str | None = None
    """Field of an action that gets the text of a turn, e.g. `message`. Default: the only field that the server's
    schema requires, if that field is a text; else a turn has the whole action, as a JSON object."""
    form: str | None = None
    """An observation as the model reads it, with `{name}` for its fields, e.g. `{hint}`. Default: all of them but
    `metadata`, as JSON."""
    deterministic: bool = False
    """The same actions always have the same answers, so a crash of the process repeats the actions. Otherwise the
    crash drops the trajectory as `environment_lost`."""

    @model_validator(mode="after")
    def _check_url(self) -> Self:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.url={self.url}: no URL; write for example http://10.0.0.4:8000")
        return self


class ServerObservation(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a reset or a step, e.g. `ServerObservation(observation={"hint": "more"}, reward=0.0)`."""

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

    data: ServerObservation


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
        self._next_message = asyncio.create_task(socket.receive(), name="openenv-message")

    async def send_request(self, kind: str, data: Mapping[str, Any]) -> ServerObservation:
        """Send a request and return the server's answer.

        Raises `ServerFaultError`, `ValueError` if the answer cannot be read, `CallFailedError` if the session is
        lost.
        """
        if not self._next_message.done():  # else the session has ended
            await self._send({"type": kind, "data": data})
        answer = self._read(await self._next_message)
        self._next_message = asyncio.create_task(self._socket.receive(), name="openenv-message")
        if isinstance(answer, FaultMessage):
            raise ServerFaultError(answer.data)
        return answer.data

    async def close(self) -> None:
        """End the session, on the server too."""
        self._next_message.cancel()
        await asyncio.gather(self._next_message, return_exceptions=True)
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
                raise ValueError(f"its server sent a message that OpenEnv does not define ({error})") from error
        if isinstance(message.data, aiohttp.WebSocketError) and message.data.code == 1009:
            raise ValueError(f"its server sent too large a message ({message.data})")
        detail = f"its server ended the session (WebSocket code {self._socket.close_code})"
        raise CallFailedError(DropReason.ENVIRONMENT_LOST, detail)


class OpenEnvServer:
    """A server of environments."""

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

    async def begin(self, data: Mapping[str, Any]) -> tuple[OpenEnvSession, ServerObservation]:
        """Open a session and reset it with `data`; retry a full server. Raises the errors of `send_request`."""
        for _ in range(MAX_TRIES):
            try:
                return await self._begin(data)
            except ServerFaultError as error:
                if error.fault.code != SERVER_FULL:
                    raise
            await asyncio.sleep(RETRY_S)  # no server says when it has room
        return await self._begin(data)

    async def _begin(self, data: Mapping[str, Any]) -> tuple[OpenEnvSession, ServerObservation]:
        timeout = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
        try:
            async with asyncio.timeout(CONNECT_S):
                socket = await self._http.ws_connect(
                    f"{self._url}/ws", max_msg_size=self._max_message_bytes, timeout=timeout
                )
        except (OSError, aiohttp.ClientError) as error:
            raise CallFailedError(DropReason.ENVIRONMENT_LOST, f"no session at {self._url} ({error})") from error
        session = OpenEnvSession(socket)
        try:
            return session, await session.send_request("reset", data)
        except BaseException:
            await session.close()
            raise


class OpenEnvTurns:
    """A trajectory in its own session. A turn's text fills the action's `field`; None: a turn is a JSON action."""

    def __init__(self, server: OpenEnvServer, settings: OpenEnvEnvironment, field: str | None) -> None:
        self._server = server
        self._field = field
        self._settings = settings
        self._session: OpenEnvSession | None = None
        self._return: float | None = None  # None while no step had a reward
        self.deterministic = settings.deterministic

    async def reset(self, problem: Problem) -> Observation:
        """Begin a session with the fields of the problem; the server ignores unknown ones."""
        data = {"seed": problem.seed, "episode_id": problem.trajectory_id, **self._settings.arguments}
        self._session, observation = await self._server.begin({**data, **row_of(problem)})
        if observation.done:
            raise ValueError("the server ended the episode at the reset, before the first turn")
        return Observation(self._text(observation))

    async def step(self, action: str) -> Answer:
        """Take the action of a turn. Without an action that the server accepts, tell the model why."""
        assert self._session is not None, "reset has begun it"
        data = read_action(self._settings, self._field, action)
        if data is None:
            return Observation(f"No action. Write one{'' if self._field else ' as a JSON object'}.")
        try:
            observation = await self._session.send_request("step", data)
        except ServerFaultError as error:
            if error.fault.code != INVALID:
                raise
            return Observation(f"No action: {error.fault.line[:FAULT_CHARS]}")
        if observation.reward is not None:
            self._return = (self._return or 0.0) + float(observation.reward)
        return End(self._return) if observation.done else Observation(self._text(observation))

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    def _text(self, observation: ServerObservation) -> str:
        fields = {name: value for name, value in observation.observation.items() if name != "metadata"}
        if self._settings.form is None:
            return msgspec.json.encode(fields).decode()
        try:
            return self._settings.form.format(**observation.observation)
        except (LookupError, AttributeError) as error:
            known = ", ".join(fields)
            raise ValueError(f"environment.form has {error}, and an observation has {known}") from error


def read_action(settings: OpenEnvEnvironment, field: str | None, turn: str) -> dict[str, Any] | None:
    """Read the action of a turn, e.g. `{"message": "4"}`; None if it has none.

    The text of the turn is the `field` of the action, or else the action as JSON.
    """
    text = settings.find_action(turn, default=WHOLE_TURN if field is not None else JSON_OBJECT) or ""
    if field is not None:
        return {field: text} if text else None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return None


@asynccontextmanager
async def open_openenv(
    settings: OpenEnvEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments.

    Raises `ConfigError` if no server answers, or its actions differ.
    """
    max_bytes = ESCAPED_BYTES * settings.max_observation_bytes + EXTRA_BYTES
    unlimited = aiohttp.TCPConnector(limit=0)  # trajectories in flight are bounded, and each has one
    async with aiohttp.ClientSession(connector=unlimited) as http:
        server = OpenEnvServer(http, settings.url, max_message_bytes=max_bytes)
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
    setting = f"environment.action_field={settings.action_field}"
    if settings.action_field not in properties:
        raise ConfigError(f"{setting}: no field of an action; choose of {', '.join(properties)}")
    if more := [name for name in required if name != settings.action_field]:
        raise ConfigError(
            f"{setting}: an action needs {', '.join(more)} too; remove the setting, so that turns are JSON"
        )
    return settings.action_field


OPENENV = EnvironmentKind(settings=OpenEnvEnvironment, open=open_openenv)
