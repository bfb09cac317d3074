"""The kind `trl`: a class written for TRL's `environment_factory`, whose public methods are tools.

Its contract is that of TRL 1.16: `reset` takes the fields of the problem and returns a text or None, every other
public method is a tool, and `get_reward`, if there is one, gives the reward. The calls of a turn run one after
another, since they share the state of one object (`tests/environment/test_trl.py`).
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MethodType
from typing import Any, SupportsFloat

from pydantic import JsonValue

from laminar_contrib.environments.turns import row_of
from laminar_contrib.tools.kind import CallingEnvironment
from laminar_contrib.tools.tool import Tool, call_function, make_tool, run_call
from laminar_contrib.tools.tool_environment import CallTurns
from laminar_py.config import ConfigError, EnvironmentHome, EnvironmentKind, load_from_file
from laminar_py.environment import Answer, End, Environment, Observation, Problem

NO_TOOLS = ("reset", "get_reward")


class TrlEnvironment(CallingEnvironment):
    """A class for TRL's `environment_factory` in a Python file; a turn without a call ends."""

    kind: str = "trl"
    path: str
    """`path/to/file.py:Class`."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the class; TRL gives none."""

    def declared_tools(self) -> Mapping[str, Tool]:
        """Return the public methods of the class by name."""
        return load_tools(self)


class TrlTurns:
    """A trajectory in an object of the class at `environment.path`."""

    def __init__(
        self, game: Any, tools: Mapping[str, Tool], *, turns: CallTurns, settings: TrlEnvironment
    ) -> None:
        self._game = game
        self._tools = {name: replace(tool, function=getattr(game, name)) for name, tool in tools.items()}
        self._turns = turns
        self._settings = settings
        self.deterministic = bool(getattr(game, "deterministic", False))

    def reset(self, problem: Problem) -> Observation:
        """Begin with the fields of the problem that `reset` accepts."""
        row = row_of(problem)
        arguments = inspect.signature(self._game.reset).parameters.values()
        if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments):
            row = {argument.name: row[argument.name] for argument in arguments if argument.name in row}
        text = self._game.reset(**row)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"reset returned a {type(text).__name__}; return a text or None")
        return Observation(text or ())

    async def step(self, action: str) -> Answer:
        """Run the calls of a turn and return their results. A turn without a call ends with the reward."""
        calls, has_more = self._turns.read_calls(action)
        if not calls:
            return End(await self._reward())
        timeout_s, max_chars = self._settings.timeout_s, self._settings.tools.result_chars
        texts = [await run_call(call, self._tools, timeout_s=timeout_s, max_chars=max_chars) for call in calls]
        return self._turns.write_results(texts, has_more=has_more)

    async def _reward(self) -> float | None:
        """Return the number from `get_reward`; None if there is no such method or it returns None."""
        get_reward = getattr(self._game, "get_reward", None)
        reward = None if get_reward is None else await call_function(get_reward)
        if reward is None:
            return None
        if not isinstance(reward, SupportsFloat):
            raise ValueError(f"get_reward returned a {type(reward).__name__}; return a number or None")
        return float(reward)


@asynccontextmanager
async def open_trl(settings: TrlEnvironment, home: EnvironmentHome) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments. Raises `ConfigError` if the class does not fit TRL's interface."""
    tools = load_tools(settings)
    turns = CallTurns(settings.tools, tools)
    game_class = _load_class(settings.path)
    yield lambda: TrlTurns(game_class(**settings.arguments), tools, turns=turns, settings=settings)


def load_tools(settings: TrlEnvironment) -> dict[str, Tool]:
    """List the tools of the class by name, in TRL's order, without making an object. Raises `ConfigError`."""
    game_class = _load_class(settings.path)
    names = [name for name, _ in inspect.getmembers(game_class, inspect.isfunction) if not name.startswith("_")]
    if "reset" not in names:
        raise _refusal(settings.path, "has no method reset", "name a class as TRL's environment_factory takes it")
    tools = [name for name in names if name not in NO_TOOLS]
    if not tools:
        raise _refusal(settings.path, "has no public method that is a tool", "define one, or use the kind class")
    return {name: _make_tool(game_class, name, settings.path) for name in tools}


def _make_tool(game_class: type, name: str, path: str) -> Tool:
    """Make a tool of a method. It has no timeout but the turn's, after which the object's state is unknown."""
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    is_static = isinstance(inspect.getattr_static(game_class, name), staticmethod)
    function: Callable[..., object] = getattr(game_class, name)
    bound = function if is_static else MethodType(function, object())
    tool = make_tool(bound, name=name, setting=f"environment.path={path}, method {name}")
    _, texts, _ = parse_google_format_docstring(inspect.getdoc(function) or "")
    properties = {
        argument: {"description": texts[argument], **schema} if argument in (texts or {}) else schema
        for argument, schema in tool.parameters["properties"].items()
    }
    return replace(tool, parameters={**tool.parameters, "properties": properties}, has_own_limits=True)


def _load_class(path: str) -> type:
    loaded = load_from_file(path, field="environment.path")
    if not isinstance(loaded, type):
        raise _refusal(path, "is no class", "name a class as TRL's environment_factory takes it")
    return loaded


def _refusal(path: str, fault: str, remedy: str) -> ConfigError:
    return ConfigError(f"environment.path={path}: {fault}; {remedy}")


TRL = EnvironmentKind(settings=TrlEnvironment, open=open_trl)
