"""The tool `python`: code of a model, run in the sandbox in a session that keeps its variables between turns."""

import asyncio
from contextlib import AsyncExitStack

from laminar_py.sandbox.pool import SHELL, SandboxPool
from laminar_py.sandbox.records import SandboxLabel, SandboxResult
from laminar_py.sandbox.session import SandboxSession

LOST = "The variables are lost."


class SessionClosedError(Exception):
    """Code for a session that has ended."""


class PythonSession:
    """The session of one trajectory, begun at its first call, which waits for a slot, and held until `close`.

    Calls run one after another, in their order. One that its caller breaks off takes the variables with it.
    """

    def __init__(self, pool: SandboxPool) -> None:
        self._pool = pool
        self._stack = AsyncExitStack()
        self._session: SandboxSession | None = None
        self._turn = asyncio.Lock()
        self._calls: set[asyncio.Task[str]] = set()
        self._was_broken = False  # off, the call before
        self._closed = False

    @property
    def has_shell(self) -> bool:
        """True where its code may start a shell."""
        return self._pool.has_shell

    async def shell(self, command: str) -> str:
        """`python`, with a command that a shell runs in the folder of the session."""
        run = f"__import__('subprocess').run(({SHELL!r}, '-c', {command!r}), stdin=-3, stderr=-2).returncode"
        return await self.python(f"(lambda code: print(f'exit status {{code}}') if code else None)({run})")

    async def python(self, code: str) -> str:
        """Run Python code and read what it prints; variables stay for the next call.

        Raises `SandboxError` where the sandbox itself fails, `SessionClosedError` where `close` comes first.
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
        """Break off what runs and what waits, and give the slot back."""
        self._closed, calls = True, list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        self._session = None
        await self._stack.aclose()

    async def _run(self, code: str) -> str:
        async with self._turn:
            if self._session is None:
                self._session = await self._stack.enter_async_context(self._pool.session())
            try:
                result = await self._session.run(code)
            except asyncio.CancelledError:
                self._was_broken = True
                raise
            before, self._was_broken = [LOST] if self._was_broken else [], False
            return "\n".join([*before, _told(result)])


def _told(result: SandboxResult) -> str:
    """A result in the words of a terminal: output, errors, and what ended it."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.label is not SandboxLabel.OK and not (result.label is SandboxLabel.ERROR and result.stderr):
        parts.append(f"{result.label.value}: {result.detail}")
    if not result.alive:
        parts.append(LOST)
    return "\n".join(part for part in parts if part) or "no output"
