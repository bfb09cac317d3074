"""An environment of tools: it runs the calls in a model's turn and answers with their results.

Made by a `Toolbox`, one for each trajectory. Invariants: a turn without calls ends the trajectory; each call that
is run has one result, in the order of the calls.
"""

import asyncio
from collections.abc import Mapping, Sequence

from laminar_contrib.tools.results import result_of
from laminar_contrib.tools.settings import ToolSettings
from laminar_contrib.tools.signature import Tool
from laminar_contrib.tools.turns import CallTurns
from laminar_py.environment import Answer, Call, CallFormat, End, Observation, Problem, PythonSession


class ToolEnvironment:
    """Tools by name, for one trajectory, which may have a session of Python. `close` ends what it started."""

    deterministic = False

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

    def reset(self, problem: Problem) -> Observation:
        """Say nothing: the prompt is all there is."""
        return Observation()

    async def step(self, action: str) -> Answer:
        """Results of the calls of a turn; the end where it has none. Raises `SandboxError`."""
        calls, has_more = self._turns.read(action)
        if not calls:
            return End()
        return self._turns.told(await self._results(calls), has_more=has_more)

    async def close(self) -> None:
        """End the session of Python, if there is one."""
        if self._session is not None:
            await self._session.close()

    async def _results(self, calls: Sequence[Call]) -> list[str]:
        """Results of calls that run together. All have ended where one raises, so that none runs on by itself."""
        timeout_s, chars = self._settings.timeout_s, self._settings.result_chars
        running = [result_of(call, self._tools, timeout_s=timeout_s, chars=chars) for call in calls]
        texts = []
        for result in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            texts.append(result)
        return texts


class StatelessToolEnvironment(ToolEnvironment):
    """Tools that keep nothing from one call to the next: there is nothing to save."""

    deterministic = True

    def snapshot(self) -> bytes:
        """Nothing."""
        return b""

    def restore(self, state: bytes) -> None:
        """Go on, with nothing to be restored."""
        assert state == b"", f"{len(state)} bytes of another environment"
