"""A task of laminar_py as an environment of `verifiers` 0.4, which finds it by the name of this module.

Its turns are those of a class with `reset` and `step`, its problems the lines of a data set, and its reward is the
one that the class ends with. The model is spoken to from this process, so that nothing is installed for it.
"""

import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from openai import APIError, AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

from laminar_py import End, Observation, Problem
from laminar_py.config.registry import load_from_file

__all__ = ["ChatHarness", "LaminarEnv", "LaminarTaskset"]
NAMED = ("prompt", "answer", "task")  # fields of a line that problems have by name


class LaminarData(vf.TaskData):
    """A line of the data set, and the class that answers the turns of the model."""

    line: dict[str, Any]
    path: str
    arguments: dict[str, Any]


class LaminarTasksetConfig(vf.TasksetConfig):
    """Settings of the task, as a run has them in `environment` and `data`."""

    path: str = ""
    """`path/to/file.py:Class`."""
    arguments: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the class."""
    data: str = ""
    """JSON lines, each a problem."""


class LaminarTask(vf.Task[LaminarData]):
    """One problem."""


class LaminarTaskset(vf.Taskset[LaminarTask, LaminarTasksetConfig]):
    """Problems of a data set."""

    def load(self) -> Iterator[LaminarTask]:
        """Each line as a task, which the environment opens: it has no prompt of its own."""
        config = self.config
        with Path(config.data).open() as lines:
            for line in map(json.loads, lines):
                yield LaminarTask(
                    LaminarData(line=line, path=config.path, arguments=config.arguments), config.task
                )


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A model that is spoken to and has no tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Ask for the next turn of the conversation so far."""
        messages = [message_to_wire(message) for message in data.prompt or []]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            try:
                await client.chat.completions.create(model=ctx.model, messages=messages)
            except APIError as error:  # as where the turns are used up
                return vf.ProgramResult(exit_code=1, stdout="", stderr=str(error))
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class LaminarEnvConfig(vf.EnvConfig):
    """The model, and the machine that it is spoken to from."""

    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class LaminarEnv(vf.Env[LaminarEnvConfig]):
    """Turns between a model and an environment; a trajectory that has not ended with the last turn gets 0."""

    async def run(self, task: LaminarTask, agents: vf.Agents) -> None:
        """One trajectory."""
        environment = load_from_file(task.data.path, field="path")(**task.data.arguments)
        problem, end = _problem(task.data.line), End(0.0)
        said = problem.prompt + _text(await _called(environment.reset, problem))
        async with agents.player.interaction(task) as exchange:
            segment = await exchange.turn(said)
            while not segment.terminated:
                answer = await _called(environment.step, segment.last_reply)
                if isinstance(answer, End):
                    end = answer
                    break
                segment = await exchange.turn(_text(answer))
        exchange.trace.record_reward("environment", end.reward or 0.0)


def _problem(line: Mapping[str, Any]) -> Problem:
    named = {name: str(line[name]) for name in NAMED if name in line}
    return Problem(**named, fields={name: value for name, value in line.items() if name not in NAMED})


async def _called(function: Any, given: object) -> Any:
    answer = function(given)
    return await answer if inspect.isawaitable(answer) else answer


def _text(answer: object) -> str:
    if not isinstance(answer, Observation) or answer.after is not None:
        raise TypeError(f"{answer!r}: an exchange continues with text; return an Observation or End")
    return "".join(answer.messages)
