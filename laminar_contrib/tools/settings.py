"""Settings of tools: which there are, how a model calls them, and their bounds."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config import ConfigError, Count, Seconds, Section
from laminar_py.environment import CallFamily

PYTHON = "python"


class CallSettings(Section):
    """How a model calls tools and reads their results, e.g. `{family: llama}`."""

    family: CallFamily = CallFamily.HERMES
    """`hermes`: JSON in `<tool_call>`, of Qwen2.5, Qwen3 and Hermes. `llama`: JSON alone, of Llama 3. `tags`:
    `<calculator>12*3</calculator>`, for tiny models."""
    opens_reasoning: bool = False
    """True where the chat template itself writes the `<think>` that a turn begins in."""
    most_calls: Count = 8
    """Calls of one turn that are run; others are told that they were not."""
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


class ToolSettings(CallSettings):
    """Tools that a model may call, e.g. `{use: [calculator], family: tags}`; the calls of a turn run together."""

    use: Annotated[list[str], Field(min_length=1)]
    """`calculator`, `search`, `python`, or `path/to/file.py:function` for a typed function of your own, whose
    answer depends on its arguments alone."""
    timeout_s: Seconds = 10.0
    """Longest time of a call, seconds, below `environment.timeout_s`; the model is told of one that takes longer.
    The limits of `python` are those of the sandbox."""
    corpus: Path | None = None
    """What `search` looks through: a `.jsonl` file with `text`, and `title` if there is one, or a text file whose
    passages are separated by empty lines."""
    passages: Count = 3
    """Passages that `search` gives."""
    passage_chars: Count = 1000
    """Longest passage that it gives, characters."""

    @model_validator(mode="after")
    def _check_corpus(self) -> Self:
        if "search" in self.use and self.corpus is None:
            raise ConfigError("tools.corpus: is not set, and tools.use has search; name a file, or leave it out")
        return self
