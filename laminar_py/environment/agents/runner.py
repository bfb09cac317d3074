"""Agents as processes: each has a working folder of its own, with what it wrote, and ends with its trajectory.

Owned by `agents.kind`; the process of `agents.launcher` starts and ends them. An agent is told where its model is
by the variables that clients of the API read, and its problem by a file. Invariant: no agent outlives the process
of environments that started it.
"""

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from laminar_py.environment.agents.launcher import Program
from laminar_py.environment.protocol import Problem

LOG = "agent.log"
LAUNCHER_LOG = "launcher.log"
PROBLEM = "problem.json"
KEPT = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV")  # of the run's environment variables
NO_KEY = "each-agent-has-its-own"  # of what an imported file makes before there are agents
TAIL_BYTES = 2000
GRACE_S = 2.0
LAUNCHER_DIED = "the process that starts agents has died"


class LauncherError(Exception):
    """The process that starts agents could not begin; the message has its last words."""


class RunningAgent:
    """An agent of the launcher; `ended` is called when it has ended by itself, with a fault unless that is ""."""

    def __init__(
        self, folder: Path, *, keeps: bool, ended: Callable[[str], None], kill: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._keeps = keeps
        self._ended: Callable[[str], None] | None = ended
        self._kill = kill
        self._left = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    async def end(self) -> None:
        """End it and all that it started, once it has had a moment to end by itself."""
        self._ending = self._ending or asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._ended = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await self._left.wait()
        if not self._left.is_set():
            self._kill()
            await self._left.wait()
        if not self._keeps:
            await asyncio.to_thread(_empty, self._folder)

    def left(self, code: int | None) -> None:
        """Note that it has ended; without a code, since the launcher has."""
        self._left.set()
        if self._ended is not None and code is None:
            self._ended(LAUNCHER_DIED)
        elif self._ended is not None:
            self._ended("" if code == 0 else f"the agent ended with code {code}: {_last_line(self._folder / LOG)}")


class AgentRunner:
    """Starts agents of a program; the folders of those that have ended it `keeps`, or else their logs alone."""

    def __init__(self, program: Program, *, url: str, folder: Path, model: Path, keeps: bool) -> None:
        self._program = program
        self._model = {"OPENAI_BASE_URL": url, "LAMINAR_MODEL": str(model.absolute())}
        self._keeps = keeps
        self._folder = folder.absolute()  # each agent has a folder of its own to be in
        self._launcher: asyncio.subprocess.Process | None = None
        self._beginning = asyncio.Lock()
        self._agents: dict[int, RunningAgent] = {}  # of this launcher
        self._in_folder: WeakValueDictionary[Path, RunningAgent] = WeakValueDictionary()
        self._last = 0
        self._reading: asyncio.Task[None] | None = None

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> RunningAgent:
        """The agent of a trajectory, whose requests have `key`. Raises `LauncherError`."""
        folder = self._folder / problem.trajectory_id
        if (before := self._in_folder.get(folder)) is not None:
            await before.end()
        await asyncio.to_thread(_make, folder, msgspec.json.encode(problem))
        await self.begin()
        self._last += 1
        number = self._last
        variables = {"OPENAI_API_KEY": key, "LAMINAR_PROBLEM": str(folder / PROBLEM), "PWD": str(folder)}
        kill = partial(self._order, {"end": number})
        agent = RunningAgent(folder, keeps=self._keeps, ended=ended, kill=kill)
        self._agents[number] = self._in_folder[folder] = agent
        self._order({"start": number, "folder": str(folder), "log": str(folder / LOG), "variables": variables})
        return agent

    async def begin(self) -> None:
        """Have a launcher. Raises `LauncherError` with its last words where it does not begin."""
        async with self._beginning:
            if self._reading is not None and not self._reading.done():
                return
            self._folder.mkdir(parents=True, exist_ok=True)
            log = self._folder / LAUNCHER_LOG
            variables = {name: os.environ[name] for name in KEPT if name in os.environ}
            variables |= {**self._model, "OPENAI_API_KEY": NO_KEY, "PYTHONHASHSEED": "0"}
            with log.open("ab") as file:
                launcher = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-P",  # nothing that an agent wrote into its folder is imported
                    "-m",
                    "laminar_py.environment.agents.launcher",
                    json.dumps(asdict(self._program)),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=file,
                    env=variables,
                )
            assert launcher.stdout is not None, "a pipe was asked for"
            if not await launcher.stdout.readline():
                await launcher.wait()
                raise LauncherError(_last_line(log))
            self._launcher, self._agents = launcher, {}
            self._reading = asyncio.get_running_loop().create_task(self._read(launcher.stdout, self._agents))

    async def close(self) -> None:
        """End the launcher, and with it every agent."""
        if self._launcher is not None and self._reading is not None:
            assert self._launcher.stdin is not None, "a pipe was asked for"
            self._launcher.stdin.close()
            await self._launcher.wait()
            await self._reading

    async def _read(self, news: asyncio.StreamReader, agents: dict[int, RunningAgent]) -> None:
        while line := await news.readline():
            told = json.loads(line)
            agents.pop(told["left"]).left(told["code"])
        for agent in agents.values():
            agent.left(None)
        agents.clear()

    def _order(self, order: dict[str, object]) -> None:
        assert self._launcher is not None, "it has begun"
        assert self._launcher.stdin is not None, "a pipe was asked for"
        self._launcher.stdin.write(json.dumps(order).encode() + b"\n")  # of one that died nobody reads it


@asynccontextmanager
async def open_runner(
    program: Program, *, url: str, folder: Path, model: Path, keeps: bool
) -> AsyncIterator[AgentRunner]:
    """A runner whose agents end with it. Raises `LauncherError`."""
    runner = AgentRunner(program, url=url, folder=folder, model=model, keeps=keeps)
    await runner.begin()
    try:
        yield runner
    finally:
        await runner.close()


def _make(folder: Path, problem: bytes) -> None:
    """A folder with nothing but the problem, and the log of an agent that was here before."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _empty(folder)
    (folder / PROBLEM).write_bytes(problem)


def _empty(folder: Path) -> None:
    """Delete all but the log."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOG:
            path.unlink(missing_ok=True)


def _last_line(log: Path) -> str:
    if not log.is_file():
        return "it wrote nothing"
    with log.open("rb") as file:
        file.seek(-min(TAIL_BYTES, log.stat().st_size), os.SEEK_END)
        lines = file.read(TAIL_BYTES).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
