"""Tools by name, loaded once in a process, and the environments that are made of them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MethodType

from laminar_contrib.sandbox import PythonSession, SandboxPool
from laminar_contrib.tools.given import PassageSearch, calculator, read_corpus
from laminar_contrib.tools.kind import PYTHON, ToolSettings
from laminar_contrib.tools.signature import Tool, make_tool
from laminar_contrib.tools.tool_environment import ToolEnvironment, format_of
from laminar_py.config import ConfigError, SandboxConfig, load_from_file
from laminar_py.environment import Json


class Toolbox:
    """Tools of a process, e.g. `Toolbox(ToolSettings(use=["calculator"])).environment()`.

    The tool `python` runs in `pool`. Raises `ConfigError` if a tool cannot be loaded.
    """

    def __init__(self, settings: ToolSettings, *, pool: SandboxPool | None = None) -> None:
        assert pool is not None or PYTHON not in settings.use, "python needs a pool"
        self._settings = settings
        self._pool = pool
        self._tools: dict[str, Tool] = {}
        for given in settings.use:
            tool = self._load(given)
            if tool.name in self._tools:
                raise ConfigError(f"tools.use={given}: another tool is named {tool.name}; rename one of them")
            self._tools[tool.name] = tool
        self._format = format_of(settings.family, self._tools)

    @property
    def definitions(self) -> list[dict[str, Json]]:
        """Tools for a chat template."""
        return [tool.definition for tool in self._tools.values()]

    def environment(self) -> ToolEnvironment:
        """Make the environment of a trajectory."""
        if self._pool is None or PYTHON not in self._settings.use:
            return ToolEnvironment(self._tools, settings=self._settings, call_format=self._format)
        session = PythonSession(self._pool)
        tools = {**self._tools, PYTHON: replace(self._tools[PYTHON], function=session.python)}
        return ToolEnvironment(tools, settings=self._settings, call_format=self._format, session=session)

    def _load(self, given: str) -> Tool:
        """Make a built-in tool by its name, or load a user's function from a file."""
        if given == "calculator":
            return make_tool(calculator)
        if given == "search":
            settings = self._settings
            assert settings.corpus is not None, "settings are checked"
            passages = read_corpus(settings.corpus)
            return make_tool(PassageSearch(passages, most=settings.passages, chars=settings.passage_chars).search)
        if given == PYTHON:
            assert self._pool is not None, "see above"
            return replace(make_tool(PythonSession(self._pool).python), is_timed=False)
        return _own(given)


@asynccontextmanager
async def open_toolbox(settings: ToolSettings, sandbox: SandboxConfig) -> AsyncIterator[Toolbox]:
    """Open a toolbox, and a sandbox pool with it if `python` is among its tools."""
    if PYTHON not in settings.use:
        yield Toolbox(settings)
        return
    async with SandboxPool.from_config(sandbox) as pool:
        yield Toolbox(settings, pool=pool)


def definitions(settings: ToolSettings) -> list[dict[str, Json]]:
    """Return the tools for a chat template, without loading what a call needs. Raises `ConfigError`."""
    return [_declared(given).definition for given in settings.use]


def _declared(given: str) -> Tool:
    """Make a tool only for its signature: it reads no passages and needs no sandbox."""
    built_in: dict[str, Callable[..., object]] = {
        "calculator": calculator,
        "search": MethodType(PassageSearch.search, object()),
        PYTHON: MethodType(PythonSession.python, object()),
    }
    return make_tool(built_in[given]) if given in built_in else _own(given)


def _own(given: str) -> Tool:
    """Load the tool `path/to/file.py:function`. Raises `ConfigError`."""
    if ":" not in given:
        remedy = "write calculator, search, python or path/to/file.py:function"
        raise ConfigError(f"tools.use={given}: no such tool; {remedy}")
    return make_tool(
        load_from_file(given, field="tools.use"), name=given.rpartition(":")[2], given=f"tools.use={given}"
    )
