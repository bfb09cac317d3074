"""The kind `agent`: an unmodified agent that calls its model over the chat completions API."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_contrib.agents.agent import AgentEnvironment, AgentStarter
from laminar_contrib.agents.connections import ConnectionBounds
from laminar_contrib.agents.endpoint import serve
from laminar_contrib.agents.runner import AgentRunner, ExternalAgents, LauncherError, load_or_make_key
from laminar_contrib.agents.token_bytes import TokenBytes
from laminar_contrib.sandbox import PythonSession, SandboxPool
from laminar_contrib.tools.call_formats import FORMATS, CallFamily, ToolCall, check_family
from laminar_py.config.environment import EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.config.section import ConfigError, Count, Seconds

LOOPBACK = "127.0.0.1"
MAX_PORT = 65_535


class AgentConfig(EnvironmentConfig):
    """An agent, a process for each trajectory, and the endpoint that answers it."""

    kind: str = "agent"
    at_once: Count = 1024
    """Agents of a process that work between two requests at the same time; others wait."""
    timeout_s: Seconds = 120.0
    """Longest time between an answer and the next request; what takes longer is dropped as
    `environment_timeout`."""
    max_observation_bytes: Count = 2**20
    """Longest new text of a request, its tools included; a trajectory with a longer one is dropped as
    `environment_failed`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Command of the agent, e.g. `[python, agent.py]`. It finds the endpoint in `OPENAI_BASE_URL` and
    `OPENAI_API_KEY`, its problem in the file `LAMINAR_PROBLEM`, the tokenizer in the folder `LAMINAR_MODEL`."""
    function: str | None = None
    """In place of a command: `path/to/file.py:function`, called with the problem. Its return value is the reward,
    unless it is None. The file is imported once, and each agent is a fork of that process."""
    external: bool = False
    """In place of both: agents run elsewhere, and ask the endpoint for trajectories."""
    python: bool = False
    """Let agents run code of the model in the `sandbox`, by `POST /v1/python` at the endpoint. Each has a session
    of its own, which holds one of `sandbox.slots` from its first code until its trajectory ends."""
    keep_folders: bool = False
    """Keep the working folder of each agent that has ended; else the logs of the last 1,000 in each process."""
    family: CallFamily = CallFamily.HERMES
    """How the model writes calls of the agent's tools: `hermes` or `llama`."""
    deterministic: bool = True
    """True: after a crash of its process an agent starts again, and must send the same requests; its other effects
    happen twice. False: the crash drops its trajectory as `environment_lost`."""
    host: str = LOOPBACK
    """Address that the endpoint is served on; other addresses than loopback are for external agents on other
    machines. Traffic is not encrypted."""
    port: Annotated[int, Field(ge=0, le=MAX_PORT)] = 0
    """Port of the first process's endpoint; other processes have the following ports. 0: any free port."""
    max_body_bytes: Count = 4 * 2**20
    """Longest request; a longer one is refused by status 413."""
    max_connections: Count = 4096
    """Most connections of the endpoint, and never more than half of the file descriptors. Beyond them, connections
    without an agent's key get status 503."""

    def check_call(self, text: str, name: str, arguments: dict[str, str]) -> None:
        """Raise `ConfigError` if `family` does not read a call in `text`."""
        check_family(self.family, text, ToolCall(name, arguments), field="environment.family")

    @property
    def has_session(self) -> bool:
        """True where agents may run code in the sandbox."""
        return self.python

    @model_validator(mode="after")
    def _check_agent(self) -> Self:
        given = [self.command is not None, self.function is not None, self.external].count(True)
        if given != 1:
            raise ConfigError(
                f"environment.command, environment.function, environment.external: {given} are set; set one"
            )
        if self.port + self.workers - 1 > MAX_PORT:
            needed = f"{self.workers} processes need as many; choose a lower one"
            raise ConfigError(f"environment.port={self.port}: {needed}")
        if self.function is not None and ".py:" not in self.function:
            raise ConfigError(f"environment.function={self.function}: write path/to/file.py:function")
        if self.family is CallFamily.TAGS:
            raise ConfigError(
                "environment.family=tags: agents name their arguments, which tags cannot; write hermes or llama"
            )
        return self


@asynccontextmanager
async def open_agents(
    settings: AgentConfig, home: EnvironmentHome
) -> AsyncIterator[Callable[[], AgentEnvironment]]:
    """Serve the endpoint, and yield a function that makes environments. Raises `ConfigError`."""
    call_format = FORMATS[settings.family]
    agents: dict[str, AgentEnvironment] = {}
    address_file = home.folder / "agents" / f"external-{home.index}.json"
    external = ExternalAgents(load_or_make_key(address_file)) if settings.external else None
    port = settings.port + home.index if settings.port else 0
    bounds = ConnectionBounds(connections=settings.max_connections, body_bytes=settings.max_body_bytes)
    async with AsyncExitStack() as stack:
        token_bytes = TokenBytes(home.model, home.decode_turn)
        served = serve(agents, token_bytes, external=external, host=settings.host, port=port, bounds=bounds)
        url = await stack.enter_async_context(served)
        pool = await stack.enter_async_context(SandboxPool.from_config(home.sandbox)) if settings.python else None
        if external is None:
            starter: AgentStarter = await stack.enter_async_context(open_runner(settings, home, url=url))
        else:
            external.write_address(address_file, url=url)
            starter = external
        yield lambda: AgentEnvironment(
            starter,
            call_format,
            agents=agents,
            deterministic=settings.deterministic,
            session=None if pool is None else PythonSession(pool),
        )


@asynccontextmanager
async def open_runner(settings: AgentConfig, home: EnvironmentHome, *, url: str) -> AsyncIterator[AgentRunner]:
    """Open a runner for the command or the function. Raises `ConfigError` if its launcher does not start."""
    runner = AgentRunner(
        command=_absolute_command(settings.command or []),
        function=_absolute(settings.function or ""),
        url=url,
        folder=home.folder / "agents",
        model=home.model,
        keep_folders=settings.keep_folders,
    )
    try:
        try:
            await runner.ensure_launcher()
        except LauncherError as error:
            setting = "command" if settings.function is None else f"function={settings.function}"
            raise ConfigError(f"environment.{setting}: {error}; mend it") from None
        yield runner
    finally:
        await runner.close()


def _absolute_command(command: list[str]) -> list[str]:
    """Make a command independent of the folder: absolute paths of files, and this interpreter for `python`."""
    first = sys.executable if command[:1] in (["python"], ["python3"]) else "".join(command[:1])
    return [_absolute(word) for word in (first, *command[1:])]


def _absolute(word: str) -> str:
    path, colon, name = word.rpartition(":")
    if colon and Path(path).is_file():
        return f"{Path(path).absolute()}:{name}"
    return str(Path(word).absolute()) if Path(word).is_file() else word


AGENT = EnvironmentKind(settings=AgentConfig, open=open_agents)
