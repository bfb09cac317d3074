"""Turns of a model that calls tools: calls out of its text, and their results into an observation.

Owned by each environment that has tools.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from laminar_contrib.tools.results import fault_line
from laminar_contrib.tools.settings import CallSettings
from laminar_contrib.tools.signature import Tool
from laminar_py.config import ConfigError
from laminar_py.environment import (
    Call,
    CallFamily,
    CallFormat,
    HermesCalls,
    LlamaCalls,
    Observation,
    Role,
    TagCalls,
    outside_reasoning,
)


class CallTurns:
    """Turns as the settings have them, e.g. `CallTurns(CallSettings(), HermesCalls()).read(turn)`."""

    def __init__(self, settings: CallSettings, call_format: CallFormat) -> None:
        self._settings = settings
        self._format = call_format
        self._form = call_format.result_form if settings.result_form is None else settings.result_form

    def read(self, turn: str) -> tuple[list[Call], bool]:
        """Calls of a turn that are to be run, and True where it has more than may be."""
        parsed = self._format.parse(outside_reasoning(turn, begun=self._settings.opens_reasoning))
        calls = list(islice(parsed, self._settings.most_calls))
        return calls, next(parsed, None) is not None

    def told(self, texts: Sequence[str], *, has_more: bool) -> Observation:
        """Results of the calls of a turn, each a message of its own."""
        most = self._settings.most_calls
        more = [fault_line(f"the calls after the first {most} were not run")] if has_more else []
        return Observation(tuple(self._form.replace("{}", text) for text in [*texts, *more]), role=Role.TOOL)


def format_of(family: CallFamily, tools: Mapping[str, Tool]) -> CallFormat:
    """Format of a family. Raises `ConfigError` for a tool that it cannot call."""
    if family is not CallFamily.TAGS:
        return HermesCalls() if family is CallFamily.HERMES else LlamaCalls()
    arguments = {name: tool.sole_argument for name, tool in tools.items()}
    for name, argument in arguments.items():
        if argument is None:
            raise ConfigError(
                f"tools.family=tags: {name} has no argument or several, and a tag gives one; give all but one of"
                " them a default, or set hermes"
            )
    return TagCalls({name: argument for name, argument in arguments.items() if argument is not None})
