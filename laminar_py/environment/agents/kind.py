"""The kind `agent`: an agent that speaks to its model over the chat completions API, as it is."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.environment import EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.config.section import ConfigError, Count, Seconds
from laminar_py.environment.agents.agent import AgentEnvironment, Keys
from laminar_py.environment.agents.endpoint import serve
from laminar_py.environment.agents.messages import AssistantMessages
from laminar_py.environment.agents.runner import AgentRunner
from laminar_py.environment.protocol import Environment
from laminar_py.environment.tools.calls import HermesCalls, LlamaCalls
from laminar_py.environment.tools.settings import CallFamily

LOOPBACK = "127.0.0.1"


class AgentConfig(EnvironmentConfig):
    """An agent, a process for each trajectory, and the endpoint that answers it."""

    kind: str = "agent"
    at_once: Count = 1024
    """Agents of a process that work between two requests at the same time; others wait."""
    timeout_s: Seconds = 120.0
    """Longest time between an answer and the next request; what takes longer is dropped as
    `environment_timeout`."""
    max_observation_bytes: Count = 2**20
    """Longest request with its tools, as text; a longer one drops the trajectory as `environment_failed`."""
    command: Annotated[list[str], Field(min_length=1)]
    """Command of the agent, e.g. `[python, agent.py]`, or `[agent.py:run]` for a function without arguments. It
    finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, its problem in the file `LAMINAR_PROBLEM`."""
    family: CallFamily = CallFamily.HERMES
    """How the model writes calls of the agent's tools: `hermes` or `llama`."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port of the endpoint, on loopback; 0: one that is free."""
    max_body_bytes: Count = 4 * 2**20
    """Longest request; a longer one is refused by status 413."""


@asynccontextmanager
async def open_agents(settings: AgentConfig, home: EnvironmentHome) -> AsyncIterator[Callable[[], Environment]]:
    """Maker of environments that are agents. Raises `ConfigError` where the endpoint cannot be served."""
    if settings.family is CallFamily.TAGS:
        raise ConfigError("environment.family=tags: agents name arguments; write hermes or llama")
    is_hermes = settings.family is CallFamily.HERMES
    messages = (
        AssistantMessages(HermesCalls(), mark="<tool_call>")
        if is_hermes
        else AssistantMessages(LlamaCalls(), mark="<|python_tag|>")
    )
    keys = Keys()
    async with serve(keys, host=LOOPBACK, port=settings.port, max_body_bytes=settings.max_body_bytes) as url:
        runner = AgentRunner(_resolved(settings.command), url=url, folder=home.folder / "agents")
        yield lambda: AgentEnvironment(runner, messages, keys=keys)


def _resolved(command: list[str]) -> list[str]:
    """A command that means the same from any folder: files by their whole path, `python` this one."""
    first = sys.executable if command[0] in ("python", "python3") else command[0]
    return [_absolute(word) for word in (first, *command[1:])]


def _absolute(word: str) -> str:
    path, colon, name = word.rpartition(":")
    if colon and Path(path).is_file():
        return f"{Path(path).absolute()}:{name}"
    return str(Path(word).absolute()) if Path(word).is_file() else word


AGENT = EnvironmentKind(settings=AgentConfig, open=open_agents)
