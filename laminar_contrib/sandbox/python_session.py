"""The tool `python`: it runs code of a model in a sandbox session, which keeps variables between turns."""

import asyncio
from contextlib import AsyncExitStack

from laminar_contrib.sandbox.pool import SandboxPool
from laminar_contrib.sandbox.records import SandboxLabel, SandboxResult
from laminar_contrib.sandbox.session import SandboxSession

LOST = "The variables are lost."


class SessionClosedError(Exception):
    """A call of a session that has been closed."""


class PythonSession:
    """The sandbox session of one trajectory. Its first call waits for a slot and holds it until `close`.

    Calls run one after another, in order. A call that its caller cancels ends the program, so its variables are
    lost.
    """

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._stack = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[str]] = set()
        self._was_cancelled = False  # the call before this one
        self._closed = False

    async def python(self, code: str) -> str:
        """Run Python code and read its output; variables stay for the next call.

        Raises `SandboxError` if the sandbox itself fails, `SessionClosedError` if `close` comes first.
        """
        if self._closed:
            raise SessionClosedError
        call = asyncio.get_running_loop().create_task(self._run(code), name="python")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and (current is None or not current.cancelling()):
                raise SessionClosedError from None
            raise

    async def close(self) -> None:
        """Cancel all running and waiting calls, and release the slot."""
        self._closed, calls = True, list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._session = None
        await self._stack.aclose()

    async def _run(self, code: str) -> str:
        """Run code in the trajectory's session and return its output as on a terminal.

        If an earlier call was cancelled, the output begins with a note that its variables are lost.
        """
        async with self._turn:
            if self._session is None:
                self._session = await self._stack.enter_async_context(self._pool.session())
            try:
                result = await self._session.run(code)
            except asyncio.CancelledError:
                self._was_cancelled = True
                raise
            before, self._was_cancelled = [LOST] if self._was_cancelled else [], False
            return "\n".join([*before, _as_terminal_text(result)])


def _as_terminal_text(result: SandboxResult) -> str:
    """Show a result as a terminal would: output, errors, and the reason why the code ended."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.label is not SandboxLabel.OK and not (result.label is SandboxLabel.ERROR and result.stderr):
        parts.append(f"{result.label.value}: {result.detail}")
    if not result.alive:
        parts.append(LOST)
    return "\n".join(part for part in parts if part) or "no output"
