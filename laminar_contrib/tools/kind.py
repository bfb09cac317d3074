"""The kind `tools`: a model that calls typed functions, and ends with a turn without a call."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Self

from pydantic import JsonValue, model_validator

from laminar_contrib.tools.settings import PYTHON, ToolSettings
from laminar_py.config import ConfigError, EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.environment import CallFamily, Environment


class ToolsEnvironment(EnvironmentConfig):
    """Tools that answer a turn's calls; a turn without a call ends, and the terms of the task judge it."""

    kind: str = "tools"
    tools: ToolSettings
    """Tools, and how the model calls them."""

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        if self.tools.timeout_s >= self.timeout_s:
            raise ConfigError(
                f"tools.timeout_s={self.tools.timeout_s:g}: not below environment.timeout_s={self.timeout_s:g};"
                " lower it, or a slow call drops its trajectory"
            )
        return self

    @property
    def definitions(self) -> Sequence[dict[str, JsonValue]]:
        """Tools for the chat template, which models that write tags do not have."""
        from laminar_contrib.tools.toolbox import definitions

        return () if self.tools.family is CallFamily.TAGS else definitions(self.tools)

    @property
    def has_session(self) -> bool:
        """True where `python` is among the tools."""
        return PYTHON in self.tools.use


@asynccontextmanager
async def open_tools(
    settings: ToolsEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Maker of environments of tools. Raises `ConfigError` where one cannot be had."""
    from laminar_contrib.tools.toolbox import open_toolbox

    async with open_toolbox(settings.tools, home.sandbox) as toolbox:
        yield toolbox.environment


TOOLS = EnvironmentKind(settings=ToolsEnvironment, open=open_tools)
