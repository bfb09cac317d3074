"""An environment of tools: it runs the calls in a model's turn and answers with their results.

A turn without calls ends the trajectory. Each call that is run has one result, in the order of the calls
(`tests/environment/tools/test_environment.py`).
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from types import MethodType

from laminar_contrib.sandbox import PythonSession, SandboxPool
from laminar_contrib.tools.calculator import calculator
from laminar_contrib.tools.call_formats import (
    FORMATS,
    Call,
    CallFamily,
    CallFormat,
    TagCalls,
    read_turn,
)
from laminar_contrib.tools.kind import PYTHON, CallSettings, ToolSettings
from laminar_contrib.tools.search import PassageSearch, read_corpus
from laminar_contrib.tools.tool import Tool, fault_line, make_tool, run_call
from laminar_py.config import ConfigError, SandboxConfig, load_from_file
from laminar_py.environment import Answer, End, Observation, Problem, Role


class CallTurns:
    """Reads calls and writes results as the settings say, e.g. `CallTurns(settings, tools).read_calls(turn)`."""

    def __init__(self, settings: CallSettings, tools: Mapping[str, Tool]) -> None:
        self._settings = settings
        self._format = _call_format(settings.family, tools)
        self._form = self._format.result_form if settings.result_form is None else settings.result_form

    def read_calls(self, turn: str) -> tuple[list[Call], bool]:
        """Return the calls of a turn to run, and True if the turn has more calls than allowed."""
        _, calls = read_turn(turn, self._format)
        most = self._settings.most_calls
        return calls[:most], len(calls) > most

    def write_results(self, texts: Sequence[str], *, has_more: bool) -> Observation:
        """Write the results of a turn's calls, each as a message of its own."""
        most = self._settings.most_calls
        more = [fault_line(f"the calls after the first {most} were not run")] if has_more else []
        return Observation(tuple(self._form.replace("{}", text) for text in [*texts, *more]), role=Role.TOOL)


class ToolEnvironment:
    """Tools by name, for one trajectory, which may have a Python session. `close` ends that session."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        settings: ToolSettings,
        turns: CallTurns,
        session: PythonSession | None = None,
    ) -> None:
        self._tools = tools
        self._settings = settings
        self._turns = turns
        self._session = session
        self.deterministic = session is None  # other tools depend on their arguments alone

    def reset(self, problem: Problem) -> Observation:
        """Add no message: the prompt is the whole conversation."""
        return Observation()

    async def step(self, action: str) -> Answer:
        """Run the calls of a turn and return their results. A turn without a call ends. Raises `SandboxError`."""
        calls, has_more = self._turns.read_calls(action)
        if not calls:
            return End()
        timeout_s, max_chars = self._settings.timeout_s, self._settings.result_chars
        running = [run_call(call, self._tools, timeout_s=timeout_s, max_chars=max_chars) for call in calls]
        texts = []
        for result in await asyncio.gather(*running, return_exceptions=True):  # no call outlives the turn
            if isinstance(result, BaseException):
                raise result
            texts.append(result)
        return self._turns.write_results(texts, has_more=has_more)

    async def close(self) -> None:
        """End the Python session, if there is one."""
        if self._session is not None:
            await self._session.close()


@asynccontextmanager
async def open_tool_environments(
    settings: ToolSettings, sandbox: SandboxConfig
) -> AsyncIterator[Callable[[], ToolEnvironment]]:
    """Load the tools, open a sandbox pool if `python` is among them, and yield a function that makes environments.

    Raises `ConfigError` if a tool cannot be loaded.
    """
    tools = load_tools(settings)
    make = partial(ToolEnvironment, settings=settings, turns=CallTurns(settings, tools))

    def make_with_session() -> ToolEnvironment:
        session = PythonSession(pool)
        python = replace(tools[PYTHON], function=session.python)
        return make({**tools, PYTHON: python}, session=session)

    async with AsyncExitStack() as stack:
        if PYTHON not in settings.use:
            yield partial(make, tools)
        else:
            pool = await stack.enter_async_context(SandboxPool.from_config(sandbox))
            yield make_with_session


def load_tools(settings: ToolSettings, *, only_declared: bool = False) -> dict[str, Tool]:
    """Load the tools by name; if `only_declared`, without the corpus of `search`. Raises `ConfigError`.

    An environment gives `python` the session of its trajectory.
    """
    tools: dict[str, Tool] = {}
    for use in settings.use:
        tool = _load_tool(use, settings, only_declared=only_declared)
        if tool.name in tools:
            raise ConfigError(f"tools.use={use}: another tool is named {tool.name}; rename one of them")
        tools[tool.name] = tool
    return tools


def _load_tool(use: str, settings: ToolSettings, *, only_declared: bool) -> Tool:
    if use == "calculator":
        return make_tool(calculator)
    if use == PYTHON:
        return replace(make_tool(MethodType(PythonSession.python, object())), has_own_limits=True)
    if use == "search":
        if only_declared:
            return make_tool(MethodType(PassageSearch.search, object()))
        assert settings.corpus is not None, "settings are checked"
        passages = read_corpus(settings.corpus)
        return make_tool(PassageSearch(passages, most=settings.passages, chars=settings.passage_chars).search)
    if ":" not in use:
        remedy = "write calculator, search, python or path/to/file.py:function"
        raise ConfigError(f"tools.use={use}: no such tool; {remedy}")
    function = load_from_file(use, field="tools.use")
    return make_tool(function, name=use.rpartition(":")[2], setting=f"tools.use={use}")


def _call_format(family: CallFamily, tools: Mapping[str, Tool]) -> CallFormat:
    """Return the call format of a family. Raises `ConfigError` for a tool that it cannot call."""
    if family is not CallFamily.TAGS:
        return FORMATS[family]
    arguments: dict[str, str] = {}
    for name, tool in tools.items():
        if tool.sole_argument is None:
            fault = f"{name} has no argument or several, and a tag gives one"
            remedy = "give all but one of them a default, or set hermes"
            raise ConfigError(f"tools.family=tags: {fault}; {remedy}")
        arguments[name] = tool.sole_argument
    return TagCalls(arguments)


def describe_tools(family: CallFamily, tools: Mapping[str, Tool]) -> str:
    """Return a text from which a model learns the tools and how to call them. Raises `ConfigError`."""
    functions = (json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools.values())
    lines = ["You can call these tools:", *functions, "Write a call as", _call_format(family, tools).example]
    return "\n".join([*lines, "and stop. Then you read the result, and go on."])
