"""Code that environment kinds share: an action in the text of a turn, and a problem as a row of its data set."""

import re
from typing import Any, Self

from pydantic import model_validator

from laminar_contrib.text_terms import compiled
from laminar_contrib.tools.call_formats import outside_reasoning
from laminar_py.config import ConfigError, EnvironmentConfig
from laminar_py.environment import Problem


class ActionConfig(EnvironmentConfig):
    """An environment that reads an action, or an answer, in the text of a turn."""

    pattern: str | None = None
    """Regular expression whose first group is the action: its last match in a turn, outside of reasoning, counts.
    Capitals do not matter. Default: as the kind has it."""

    @model_validator(mode="after")
    def _check_pattern(self) -> Self:
        if self.pattern is not None and not compiled("environment.pattern", self.pattern).groups:
            remedy = "put parentheses around the action"
            raise ConfigError(f"environment.pattern={self.pattern!r}: has no group; {remedy}")
        return self

    def find_action(self, turn: str, *, default: str) -> str | None:
        """Return the action of a turn, stripped, by `pattern` or the pattern `default`; None without a match."""
        text = outside_reasoning(turn)
        pattern = default if self.pattern is None else self.pattern
        actions = [match[1] or "" for match in re.finditer(pattern, text, re.IGNORECASE)]
        return actions[-1].strip() if actions else None


def row_of(problem: Problem) -> dict[str, Any]:
    """Return a problem as a row of its data set."""
    named = {"prompt": problem.prompt, "answer": problem.answer, "task": problem.task}
    return {**{name: value for name, value in named.items() if value}, **problem.fields}


def format_observation(form: str, observation: object) -> str:
    """Write an observation by a format, e.g. `"{} and {}"` of `(14, 10)`; names are keys of a dictionary."""
    value = to_plain(observation)
    if isinstance(value, dict):
        return form.format(**value)
    return form.format(*value) if isinstance(value, list) else form.format(value)


def to_plain(observation: object) -> Any:
    """Convert an observation to plain Python values."""
    if isinstance(observation, dict):
        return {str(name): to_plain(value) for name, value in observation.items()}
    if isinstance(observation, tuple | list):
        return [to_plain(value) for value in observation]
    tolist = getattr(observation, "tolist", None)  # of arrays and numbers of numpy
    return observation if tolist is None else tolist()


def error_line(error: Exception) -> str:
    """Describe an error in one line, e.g. `ValueError: no such map`."""
    return " ".join(f"{type(error).__name__}: {error}".split())
