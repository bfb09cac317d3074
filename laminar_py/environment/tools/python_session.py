"""The tool `python`: code of a model, run in the sandbox in a session that keeps its variables between turns."""

import asyncio
from contextlib import AsyncExitStack

from laminar_py.sandbox.pool import SandboxPool
from laminar_py.sandbox.records import SandboxLabel, SandboxResult
from laminar_py.sandbox.session import SandboxSession


class PythonSession:
    """The session of one trajectory, begun at its first call, which waits for a slot, and held until `close`.

    Calls run one after another, in their order.
    """

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._stack = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._turn = asyncio.Lock()

    async def python(self, code: str) -> str:
        """Run Python code and read what it prints; variables stay for the next call.

        Raises `SandboxError` where the sandbox itself fails.
        """
        async with self._turn:
            if self._session is None:
                self._session = await self._stack.enter_async_context(self._pool.session())
            return _told(await self._session.run(code))

    async def close(self) -> None:
        """End the session and give its slot back."""
        async with self._turn:
            self._session = None
            await self._stack.aclose()


def _told(result: SandboxResult) -> str:
    """A result in the words of a terminal: output, errors, and what ended it."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.label is not SandboxLabel.OK and not (result.label is SandboxLabel.ERROR and result.stderr):
        parts.append(f"{result.label.value}: {result.detail}")
    if not result.alive:
        parts.append("The variables are lost.")
    return "\n".join(part for part in parts if part) or "no output"
