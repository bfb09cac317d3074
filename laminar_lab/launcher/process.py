"""A process that the launcher starts and that no fault of the launcher ends. Used by the queue.

asyncio's own kill their process when they are collected, at the latest when the event loop is closed by an error.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


class RunProcess:
    """A running command, e.g. `RunProcess(["sleep", "1"], log=path, env={})`; `log` gets its output."""

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal is passed on by the queue, once
            )

    async def wait(self) -> int:
        """Exit code, negative for a signal, once it has ended."""
        if self._process.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            handle = os.pidfd_open(self._process.pid)
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self._process.wait()

    def interrupt(self) -> None:
        """Ask it to stop, unless it has just ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
