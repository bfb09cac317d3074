"""Processes of agents: each has a working folder of its own, with what it wrote, and ends with its trajectory.

Owned by `agents.kind`. An agent is told where its model is by the variables that clients of the API read, and its
problem by a file. Invariant: no agent outlives the process of environments that started it.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from laminar_py.environment.protocol import Problem

LOG = "agent.log"
PROBLEM = "problem.json"
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")  # of the run's environment variables
TAIL_BYTES = 2000
GRACE_S = 2.0


class RunningAgent:
    """Process of an agent; `ended` is called when it has ended by itself, with a fault unless that is ""."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, *, ended: Callable[[str], None]) -> None:
        self._process = process
        self._log = log
        self._ended = ended
        self._task = asyncio.get_running_loop().create_task(self._watch(), name=f"agent-{process.pid}")

    async def end(self) -> None:
        """End it and all that it started, once it has had a moment to end by itself."""
        self._task.cancel()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _watch(self) -> None:
        code = await self._process.wait()
        self._ended("" if code == 0 else f"the agent ended with code {code}: {self._last_line()}")

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            file.seek(-min(TAIL_BYTES, self._log.stat().st_size), os.SEEK_END)
            lines = file.read(TAIL_BYTES).decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")


class AgentRunner:
    """Starts agents by a command, e.g. `AgentRunner(["python", "agent.py"], url=..., folder=...)`."""

    def __init__(self, command: Sequence[str], *, url: str, folder: Path) -> None:
        self._command = list(command)
        self._url = url
        self._folder = folder

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> RunningAgent:
        """The agent of a trajectory, whose requests have `key`. Raises `OSError` where it cannot be started."""
        folder = self._folder / problem.trajectory_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PROBLEM).write_bytes(msgspec.json.encode(problem))
        variables = {name: os.environ[name] for name in KEPT if name in os.environ}
        variables |= {
            "OPENAI_BASE_URL": self._url,
            "OPENAI_API_KEY": key,
            "LAMINAR_PROBLEM": str(folder / PROBLEM),
            "PWD": str(folder),
        }
        with (folder / LOG).open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # nothing that an agent wrote into its folder is imported
                "-m",
                "laminar_py.environment.agents.launch",
                json.dumps([os.getpid(), self._command]),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=variables,
                start_new_session=True,
            )
        return RunningAgent(process, folder / LOG, ended=ended)
