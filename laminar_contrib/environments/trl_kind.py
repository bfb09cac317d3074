"""The kind `trl`: a class written for TRL's `environment_factory`, whose public methods are tools.

Its contract is that of TRL 1.16: `reset` takes the fields of the problem and returns a text or None, every other
public method is a tool, and `get_reward`, if there is one, gives the reward. The calls of a turn run one after
another, since they share the state of one object (`tests/environment/test_trl.py`).
"""

import inspect
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, SupportsFloat

from pydantic import JsonValue

from laminar_contrib.tools.kind import CallSettings
from laminar_contrib.tools.signature import Tool, called, make_tool, result_of
from laminar_contrib.tools.tool_environment import CallTurns, format_of
from laminar_py.config import ConfigError, EnvironmentConfig, EnvironmentHome, EnvironmentKind, load_from_file
from laminar_py.environment import Answer, CallFamily, End, Environment, Json, Observation, Problem

NO_TOOLS = ("reset", "get_reward")
SECTION = re.compile(
    r"^\s*Args:[ ]*\n(.*?)(?=^\s*(?:Returns|Raises|Yields|Examples?):|\Z)", re.DOTALL | re.MULTILINE
)
ARGUMENT = re.compile(r"\s*(\w+)(?: \([^)]*\))?:(.*)")


class TrlEnvironment(EnvironmentConfig):
    """A class for TRL's `environment_factory` in a Python file; a turn without a call ends."""

    kind: str = "trl"
    path: str
    """`path/to/file.py:Class`."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the class; TRL gives none."""
    tools: CallSettings = CallSettings()
    """How the model calls the methods."""

    @property
    def definitions(self) -> Sequence[dict[str, JsonValue]]:
        """Methods for the chat template, which models that write tags do not have."""
        if self.tools.family is CallFamily.TAGS:
            return ()
        return [tool.definition for tool in declared(self).values()]


class TrlTurns:
    """A trajectory in an object of such a class of its own."""

    def __init__(self, own: Any, tools: Mapping[str, Tool], *, turns: CallTurns, settings: TrlEnvironment) -> None:
        self._own = own
        self._tools = {name: replace(tool, function=getattr(own, name)) for name, tool in tools.items()}
        self._turns = turns
        self._settings = settings
        self.deterministic = bool(getattr(own, "deterministic", False))

    def reset(self, problem: Problem) -> Observation:
        """Begin with the fields of the problem that `reset` accepts."""
        given = {"prompt": problem.prompt, "answer": problem.answer, "task": problem.task}
        row = {**{name: value for name, value in given.items() if value}, **problem.fields}
        arguments = inspect.signature(self._own.reset).parameters.values()
        if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments):
            row = {argument.name: row[argument.name] for argument in arguments if argument.name in row}
        said = self._own.reset(**row)
        if said is not None and not isinstance(said, str):
            raise ValueError(f"reset returned a {type(said).__name__}; return a text or None")
        return Observation(said or ())

    async def step(self, action: str) -> Answer:
        """Run the calls of a turn and return their results. A turn without a call ends with the reward."""
        calls, has_more = self._turns.read_calls(action)
        if not calls:
            return End(await self._reward())
        timeout_s, chars = self._settings.timeout_s, self._settings.tools.result_chars
        texts = [await result_of(call, self._tools, timeout_s=timeout_s, chars=chars) for call in calls]
        return self._turns.write_results(texts, has_more=has_more)

    async def _reward(self) -> float | None:
        """Return the number from `get_reward`; None if there is no such method or it returns None."""
        get_reward = getattr(self._own, "get_reward", None)
        reward = None if get_reward is None else await called(get_reward, {})
        if reward is None:
            return None
        if not isinstance(reward, SupportsFloat):
            raise ValueError(f"get_reward returned a {type(reward).__name__}; return a number or None")
        return float(reward)


@asynccontextmanager
async def open_trl(settings: TrlEnvironment, home: EnvironmentHome) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments. Raises `ConfigError` if the class does not fit TRL's interface."""
    tools = declared(settings)
    turns = CallTurns(settings.tools, format_of(settings.tools.family, tools))
    own = _load(settings.path)
    yield lambda: TrlTurns(own(**settings.arguments), tools, turns=turns, settings=settings)


def declared(settings: TrlEnvironment) -> dict[str, Tool]:
    """List the tools of the class by name, in TRL's order, without making an object. Raises `ConfigError`."""
    own = _load(settings.path)
    names = [name for name, _ in inspect.getmembers(own, inspect.isfunction) if not name.startswith("_")]
    if "reset" not in names:
        raise _refused(settings.path, "has no method reset", "name a class as TRL's environment_factory takes it")
    tools = [name for name in names if name not in NO_TOOLS]
    if not tools:
        raise _refused(settings.path, "has no public method that is a tool", "define one, or use the kind class")
    return {name: _declared(own, name, settings.path) for name in tools}


def _declared(own: type, name: str, path: str) -> Tool:
    """Make a tool of a method. It has no timeout but the turn's, after which the object's state is unknown."""
    is_static = isinstance(inspect.getattr_static(own, name), staticmethod)
    function: Callable[..., object] = getattr(own, name)
    bound = function if is_static else MethodType(function, object())
    tool = make_tool(bound, name=name, given=f"environment.path={path}, method {name}")
    return replace(tool, parameters=_described(tool.parameters, inspect.getdoc(function) or ""), is_timed=False)


def _described(parameters: Mapping[str, Json], docstring: str) -> dict[str, Json]:
    """Return the schema of arguments, with descriptions from the docstring's `Args:`, as TRL does."""
    texts = argument_texts(docstring)
    properties = {
        name: {"description": texts[name], **schema} if name in texts else schema
        for name, schema in parameters["properties"].items()
    }
    return {**parameters, "properties": properties}


def argument_texts(docstring: str) -> dict[str, str]:
    """Read descriptions of arguments from a docstring in Google style, e.g. `{"guess": "The number."}`."""
    section = SECTION.search(docstring)
    lines = [line for line in section[1].split("\n") if line.strip()] if section else []
    texts: dict[str, str] = {}
    depth, name = min(map(_depth, lines), default=0), ""
    for line in lines:
        begun = ARGUMENT.match(line) if _depth(line) == depth else None
        if begun:
            name, texts[begun[1]] = begun[1], begun[2].strip()
        elif name:
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return texts


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _load(path: str) -> type:
    found = load_from_file(path, field="environment.path")
    if not isinstance(found, type):
        raise _refused(path, "is no class", "name a class as TRL's environment_factory takes it")
    return found


def _refused(path: str, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"environment.path={path}: {fault}; {remedy}")


TRL = EnvironmentKind(settings=TrlEnvironment, open=open_trl)
