"""Agents of trajectories: processes that the run starts, or external agents. `agents.kind` owns them.

The launcher process (`agents.launcher`) starts an agent in a working folder of its own and ends it with its
trajectory. The agent finds its model by the environment variables that API clients read, and its problem in a
file. An external agent requests a trajectory from the endpoint, with the run's key from a file of the run. No
agent outlives the environment process that started it. A trajectory goes to one external agent, unless that
process has crashed since (`tests/environment/agents/test_agents.py`).
"""

import asyncio
import os
import secrets
import shutil
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from itertools import islice
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from laminar_py.children import HostedCall, HostedProcess, ProcessLostError, last_line
from laminar_py.environment import Problem

KEY_BYTES = 24  # of the run's key
LOG = "agent.log"
KEPT = 1000  # folders of agents in each environment process
LAUNCHER_LOG = "launcher.log"
PROBLEM = "problem.json"
NO_KEY = "each-agent-has-its-own"  # for clients that the user's file creates at import
GRACE_S = 2.0
LAUNCHER_END_S = 10.0
LAUNCHER_CRASHED = "the process that starts agents has crashed"


class LauncherError(Exception):
    """The launcher process did not start; the message has the last line of its log."""


class RunningAgent:
    """An agent that the launcher started. If the agent exits by itself, it calls `exited` with a fault, or ""."""

    def __init__(
        self, folder: Path, call: HostedCall, *, keep_folder: bool, exited: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._call = call
        self._keep_folder = keep_folder
        self._exited: Callable[[str], None] | None = exited
        self._ending: asyncio.Task[None] | None = None
        call.answer.add_done_callback(self._report_exit)

    async def end(self) -> None:
        """Give the agent `GRACE_S` seconds to exit, then kill it and all processes that it started."""
        self._ending = self._ending or asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._exited = None
        await asyncio.wait([self._call.answer], timeout=GRACE_S)
        self._call.cancel()
        await asyncio.wait([self._call.answer])
        if not self._keep_folder:
            await asyncio.to_thread(_empty, self._folder)

    def _report_exit(self, answer: "asyncio.Future[bytes]") -> None:
        if self._exited is None or answer.cancelled():
            return
        if answer.exception() is not None:
            self._exited(LAUNCHER_CRASHED)
        elif (code := int(answer.result())) == 0:
            self._exited("")
        else:
            self._exited(
                f"the agent ended with code {code}: {last_line(self._folder / LOG) or 'it wrote nothing'}"
            )


class AgentRunner:
    """Starts agents of a command or a function, each in a folder below `folder`."""

    def __init__(
        self, *, command: list[str], function: str, url: str, folder: Path, model: Path, keep_folders: bool
    ) -> None:
        self._program = {"command": command, "function": function}
        self._variables = {"OPENAI_BASE_URL": url, "LAMINAR_MODEL": str(model.absolute())}
        self._keep_folders = keep_folders
        self._folder = folder.absolute()  # each agent has a folder of its own to be in
        self._launcher: HostedProcess | None = None
        self._starting = asyncio.Lock()
        self._agents: WeakValueDictionary[Path, RunningAgent] = WeakValueDictionary()  # by folder
        self._kept: OrderedDict[Path, None] = OrderedDict()  # folders that this process made, the oldest first

    async def start(
        self, problem: Problem, *, key: str, exited: Callable[[str], None]
    ) -> Callable[[], Awaitable[None]]:
        """Start the agent of a trajectory, see `AgentStarter`. Raises `LauncherError`."""
        folder = self._folder / problem.trajectory_id
        if (before := self._agents.get(folder)) is not None:
            await before.end()
        await asyncio.to_thread(_make, folder, msgspec.json.encode(problem))
        if not self._keep_folders:
            await asyncio.to_thread(self._forget_oldest, folder)
        launcher = await self.ensure_launcher()
        variables = {"OPENAI_API_KEY": key, "LAMINAR_PROBLEM": str(folder / PROBLEM), "PWD": str(folder)}
        order = {"folder": str(folder), "log": str(folder / LOG), "variables": variables}
        call = launcher.begin_call(msgspec.json.encode(order))
        agent = RunningAgent(folder, call, keep_folder=self._keep_folders, exited=exited)
        self._agents[folder] = agent
        return agent.end

    def _forget_oldest(self, newest: Path) -> None:
        """Delete the oldest folders beyond `KEPT`, but none of an agent that runs."""
        self._kept[newest] = None
        self._kept.move_to_end(newest)
        ended = (path for path in self._kept if path not in self._agents)
        for path in list(islice(ended, max(0, len(self._kept) - KEPT))):
            shutil.rmtree(path, ignore_errors=True)
            del self._kept[path]

    async def ensure_launcher(self) -> HostedProcess:
        """Return the launcher; start one if there is none or it has crashed. Raises `LauncherError`."""
        async with self._starting:
            if self._launcher is not None and not self._launcher.is_lost:
                return self._launcher
            await self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._launcher = launcher = await HostedProcess.start_module(
                "laminar_contrib.agents.launcher",
                variables={**self._variables, "OPENAI_API_KEY": NO_KEY, "PYTHONHASHSEED": "0"},
                log=self._folder / LAUNCHER_LOG,
                switches=["-P"],  # never import files that an agent wrote into its folder
            )
            try:
                await launcher.begin_call(msgspec.json.encode(self._program)).answer
            except ProcessLostError as error:
                raise LauncherError(error.last_line) from None
            return launcher

    async def close(self) -> None:
        """End the launcher and all of its agents."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.end(patience_s=LAUNCHER_END_S)


def _make(folder: Path, problem: bytes) -> None:
    """Create the folder of an agent with its problem, and keep only the log of an earlier agent."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _empty(folder)
    (folder / PROBLEM).write_bytes(problem)


def _empty(folder: Path) -> None:
    """Delete all files of a folder but the log."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOG:
            path.unlink(missing_ok=True)


class ExternalFile(msgspec.Struct, frozen=True):
    """Content of the file for external agents: the endpoint's address and the run's key."""

    url: str
    key: str


class ExternalAgents:
    """Trajectories that wait for external agents, in order. An agent needs the run's `key` to get one."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._offers: dict[str, Problem] = {}  # by the key of its agent
        self._has_offers = asyncio.Condition()

    async def start(
        self, problem: Problem, *, key: str, exited: Callable[[str], None]
    ) -> Callable[[], Awaitable[None]]:
        """Offer a trajectory; return a function that withdraws it. Never call `exited`: the exit is unseen."""
        async with self._has_offers:
            self._offers[key] = problem
            self._has_offers.notify_all()

        async def withdraw() -> None:
            self._offers.pop(key, None)

        return withdraw

    async def next_offer(self, patience_s: float) -> tuple[str, Problem] | None:
        """Take the key and problem that have waited longest; return None if there is none in `patience_s`."""
        try:
            async with asyncio.timeout(patience_s), self._has_offers:
                await self._has_offers.wait_for(lambda: self._offers)
                key = next(iter(self._offers))
                return key, self._offers.pop(key)
        except TimeoutError:
            return None

    def write_address(self, path: Path, *, url: str) -> None:
        """Write the file for external agents, readable only by its owner."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".new")
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(msgspec.json.encode(ExternalFile(url, self.key)))
        os.replace(unfinished, path)


def load_or_make_key(path: Path) -> str:
    """Read the run's key from the file of an earlier process, or make a new key."""
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=ExternalFile).key
    return f"sk-run-{secrets.token_urlsafe(KEY_BYTES)}"
