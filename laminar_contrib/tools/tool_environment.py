"""An environment of tools: it runs the calls in a model's turn and answers with their results.

Made by a `Toolbox`, one for each trajectory. A turn without calls ends the trajectory. Each call that
is run has one result, in the order of the calls (`tests/environment/tools/test_environment.py`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice

from laminar_contrib.sandbox import PythonSession
from laminar_contrib.tools.kind import CallSettings, ToolSettings
from laminar_contrib.tools.signature import Tool, fault_line, result_of
from laminar_py.config import ConfigError
from laminar_py.environment import (
    Answer,
    Call,
    CallFamily,
    CallFormat,
    End,
    HermesCalls,
    LlamaCalls,
    Observation,
    Problem,
    Role,
    TagCalls,
    outside_reasoning,
)


class CallTurns:
    """Reads calls and writes results as the settings say.

    E.g. `CallTurns(CallSettings(), HermesCalls()).read_calls(turn)`.
    """

    def __init__(self, settings: CallSettings, call_format: CallFormat) -> None:
        self._settings = settings
        self._format = call_format
        self._form = call_format.result_form if settings.result_form is None else settings.result_form

    def read_calls(self, turn: str) -> tuple[list[Call], bool]:
        """Return the calls of a turn to run, and True if the turn has more calls than allowed."""
        parsed = self._format.parse(outside_reasoning(turn, begun=self._settings.opens_reasoning))
        calls = list(islice(parsed, self._settings.most_calls))
        return calls, next(parsed, None) is not None

    def write_results(self, texts: Sequence[str], *, has_more: bool) -> Observation:
        """Write the results of a turn's calls, each as a message of its own."""
        most = self._settings.most_calls
        more = [fault_line(f"the calls after the first {most} were not run")] if has_more else []
        return Observation(tuple(self._form.replace("{}", text) for text in [*texts, *more]), role=Role.TOOL)


def format_of(family: CallFamily, tools: Mapping[str, Tool]) -> CallFormat:
    """Return the call format of a family. Raises `ConfigError` for a tool that it cannot call."""
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


class ToolEnvironment:
    """Tools by name, for one trajectory, which may have a Python session. `close` ends that session."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        settings: ToolSettings,
        call_format: CallFormat,
        session: PythonSession | None = None,
    ) -> None:
        self._tools = tools
        self._settings = settings
        self._turns = CallTurns(settings, call_format)
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
        return self._turns.write_results(await self._results(calls), has_more=has_more)

    async def close(self) -> None:
        """End the Python session, if there is one."""
        if self._session is not None:
            await self._session.close()

    async def _results(self, calls: Sequence[Call]) -> list[str]:
        """Run calls at the same time and return their results. If one raises, the others have ended, too."""
        timeout_s, chars = self._settings.timeout_s, self._settings.result_chars
        running = [result_of(call, self._tools, timeout_s=timeout_s, chars=chars) for call in calls]
        texts = []
        for result in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            texts.append(result)
        return texts
