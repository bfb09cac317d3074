"""The kind `tools`: a model that calls typed functions, and ends with a turn without a call; and its settings."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, JsonValue, model_validator

from laminar_contrib.tools.call_formats import CallFamily, ToolCall, check_family
from laminar_py.config import (
    ConfigError,
    Count,
    EnvironmentConfig,
    EnvironmentHome,
    EnvironmentKind,
    Seconds,
    Section,
)
from laminar_py.environment import Environment

if TYPE_CHECKING:
    from laminar_contrib.tools.tool import Tool

PYTHON = "python"


class ShownIn(StrEnum):
    """Places where a model reads which tools there are."""

    TEMPLATE = "template"
    SYSTEM = "system"
    PROMPT = "prompt"


class CallSettings(Section):
    """How a model calls tools and reads their results, e.g. `{family: llama}`."""

    family: CallFamily = CallFamily.HERMES
    """`hermes`: JSON in `<tool_call>`, of Qwen2.5, Qwen3 and Hermes. `llama`: JSON alone, of Llama 3. `tags`:
    `<calculator>12*3</calculator>`, for tiny models."""
    shown_in: ShownIn = ShownIn.TEMPLATE
    """Where the model reads which tools there are: `template`, as the chat template shows them; `system`, in the
    system message, for a template that shows none; `prompt`, in your prompts alone."""
    most_calls: Count = 8
    """Most calls of one turn that are run; the model reads that further calls were not run."""
    result_chars: Annotated[int, Field(ge=200)] = 4000
    """Longest result of a call, characters; the middle of a longer one is left out."""
    result_form: str | None = None
    """A result as the model reads it, with `{}` in its place. Default: `<result>{}</result>` for `tags`, else
    `{}`, since chat templates have marks of their own."""

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.result_form is not None and self.result_form.count("{}") != 1:
            raise ConfigError(f"tools.result_form={self.result_form}: write {{}} once, where the result stands")
        return self


class CallingEnvironment(EnvironmentConfig):
    """An environment whose model calls tools; a turn without a call ends. A subclass declares the tools."""

    tools: CallSettings = CallSettings()
    """How the model calls the tools."""

    def declared_tools(self) -> "Mapping[str, Tool]":
        """Return the tools by name. Raises `ConfigError` if one cannot be declared."""
        raise NotImplementedError

    @property
    def definitions(self) -> Sequence[dict[str, JsonValue]]:
        """Definitions of the tools for the chat template; none for models that write tags."""
        if self.tools.family is CallFamily.TAGS or self.tools.shown_in is not ShownIn.TEMPLATE:
            return ()
        return [tool.definition for tool in self.declared_tools().values()]

    @property
    def system_text(self) -> str:
        """Text about the tools that ends the system message, if they are shown there."""
        if self.tools.shown_in is not ShownIn.SYSTEM:
            return ""
        from laminar_contrib.tools.tool_environment import describe_tools

        return describe_tools(self.tools.family, self.declared_tools())

    @property
    def calls_tools(self) -> bool:
        """True: a turn without a call ends the trajectory."""
        return True

    def check_call(self, text: str, name: str, arguments: dict[str, str]) -> None:
        """Raise `ConfigError` if `tools.family` does not read a call in `text`."""
        check_family(self.tools.family, text, ToolCall(name, arguments), field="environment.tools.family")


class ToolSettings(CallSettings):
    """Tools that a model may call, e.g. `{use: [calculator], family: tags}`; the calls of a turn run together."""

    use: Annotated[list[str], Field(min_length=1)]
    """`calculator`, `search`, `python`, or `path/to/file.py:function` for a typed function of your own, whose
    answer depends on its arguments alone."""
    timeout_s: Seconds = 10.0
    """Longest time of a call, seconds, below `environment.timeout_s`; the model reads that a longer call failed.
    `python` has the limits of the sandbox."""
    corpus: Path | None = None
    """File that `search` looks through: `.jsonl` with `text` and perhaps `title`, or a text file with empty lines
    between passages."""
    passages: Count = 3
    """Passages that `search` gives."""
    passage_chars: Count = 1000
    """Longest passage that it gives, characters."""

    @model_validator(mode="after")
    def _check_corpus(self) -> Self:
        if "search" in self.use and self.corpus is None:
            raise ConfigError("tools.corpus: is not set, and tools.use has search; name a file, or leave it out")
        return self


class ToolsEnvironment(CallingEnvironment):
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

    def declared_tools(self) -> "Mapping[str, Tool]":
        """Return the tools of `tools.use` by name."""
        from laminar_contrib.tools.tool_environment import load_tools

        return load_tools(self.tools, only_declared=True)

    @property
    def has_session(self) -> bool:
        """True where `python` is among the tools."""
        return PYTHON in self.tools.use


@asynccontextmanager
async def open_tools(
    settings: ToolsEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Yield a function that makes environments. Raises `ConfigError` if a tool cannot be loaded."""
    from laminar_contrib.tools.tool_environment import open_tool_environments

    async with open_tool_environments(settings.tools, home.sandbox) as make:
        yield make


TOOLS = EnvironmentKind(settings=ToolsEnvironment, open=open_tools)
