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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from laminar_contrib.agents.launcher import Program
from laminar_py.children import HostedCall, HostedProcess, ProcessLostError, last_line
from laminar_py.environment import Problem

KEY_BYTES = 24  # of the run's key
LOG = "agent.log"
LAUNCHER_LOG = "launcher.log"
PROBLEM = "problem.json"
NO_KEY = "each-agent-has-its-own"  # for clients that the user's file creates at import
GRACE_S = 2.0
LAUNCHER_END_S = 10.0
LAUNCHER_CRASHED = "the process that starts agents has crashed"


class LauncherError(Exception):
    """The launcher process did not start; the message has the last line of its log."""


class RunningAgent:
    """An agent that the launcher started. If it exits by itself, it calls `ended` with a fault, or ""."""

    def __init__(self, folder: Path, call: HostedCall, *, keeps: bool, ended: Callable[[str], None]) -> None:
        self._folder = folder
        self._call = call
        self._keeps = keeps
        self._ended: Callable[[str], None] | None = ended
        self._ending: asyncio.Task[None] | None = None
        call.answer.add_done_callback(self._report_end)

    async def end(self) -> None:
        """Give the agent `GRACE_S` seconds to exit, then kill it and all processes that it started."""
        self._ending = self._ending or asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._ended = None
        await asyncio.wait([self._call.answer], timeout=GRACE_S)
        self._call.cancel()
        await asyncio.wait([self._call.answer])
        if not self._keeps:
            await asyncio.to_thread(_empty, self._folder)

    def _report_end(self, answer: "asyncio.Future[bytes]") -> None:
        if self._ended is None or answer.cancelled():
            return
        if answer.exception() is not None:
            self._ended(LAUNCHER_CRASHED)
        elif (code := int(answer.result())) == 0:
            self._ended("")
        else:
            self._ended(f"the agent ended with code {code}: {last_line(self._folder / LOG)}")


class AgentRunner:
    """Starts agents of a program. It `keeps` the folders of ended agents, or else only their logs."""

    def __init__(self, program: Program, *, url: str, folder: Path, model: Path, keeps: bool) -> None:
        self._program = program
        self._model = {"OPENAI_BASE_URL": url, "LAMINAR_MODEL": str(model.absolute())}
        self._keeps = keeps
        self._folder = folder.absolute()  # each agent has a folder of its own to be in
        self._launcher: HostedProcess | None = None
        self._beginning = asyncio.Lock()
        self._in_folder: WeakValueDictionary[Path, RunningAgent] = WeakValueDictionary()

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> RunningAgent:
        """Start the agent of a trajectory, with the API key `key`. Raises `LauncherError`."""
        folder = self._folder / problem.trajectory_id
        if (before := self._in_folder.get(folder)) is not None:
            await before.end()
        await asyncio.to_thread(_make, folder, msgspec.json.encode(problem))
        launcher = await self.ensure_launcher()
        variables = {"OPENAI_API_KEY": key, "LAMINAR_PROBLEM": str(folder / PROBLEM), "PWD": str(folder)}
        order = {"folder": str(folder), "log": str(folder / LOG), "variables": variables}
        call = launcher.begin_call(msgspec.json.encode(order))
        agent = self._in_folder[folder] = RunningAgent(folder, call, keeps=self._keeps, ended=ended)
        return agent

    async def ensure_launcher(self) -> HostedProcess:
        """Return the launcher; start one if there is none or it has crashed. Raises `LauncherError`."""
        async with self._beginning:
            if self._launcher is not None and not self._launcher.is_lost:
                return self._launcher
            await self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            launcher = await HostedProcess.start_module(
                "laminar_contrib.agents.launcher",
                variables={**self._model, "OPENAI_API_KEY": NO_KEY, "PYTHONHASHSEED": "0"},
                log=self._folder / LAUNCHER_LOG,
                switches=["-P"],  # never import files that an agent wrote into its folder
            )
            self._launcher = launcher
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


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTrajectory:
    """A trajectory offered to external agents: the key for its requests, and its problem."""

    key: str
    problem: Problem
    withdraw: Callable[[], None]

    async def end(self) -> None:
        """Withdraw the offer."""
        self.withdraw()


class ExternalAgents:
    """Trajectories that wait for external agents, in order. An agent needs `key` to get one."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._offers: dict[str, OfferedTrajectory] = {}  # by the agent's key
        self._some = asyncio.Event()

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> OfferedTrajectory:
        """Offer a trajectory, with `key` for its requests.

        It never calls `ended`: an external agent's exit is unseen.
        """
        offer = OfferedTrajectory(key=key, problem=problem, withdraw=lambda: self._withdraw(key))
        self._offers[key] = offer
        self._some.set()
        return offer

    async def next_offer(self, patience_s: float) -> OfferedTrajectory | None:
        """Take the offer that has waited longest; wait up to `patience_s` seconds for one, else return None."""
        try:
            async with asyncio.timeout(patience_s):
                while not self._offers:
                    await self._some.wait()
        except TimeoutError:
            return None
        offer = self._offers[next(iter(self._offers))]
        offer.withdraw()
        return offer

    def _withdraw(self, key: str) -> None:
        self._offers.pop(key, None)
        if not self._offers:
            self._some.clear()


class ExternalFile(msgspec.Struct, frozen=True):
    """Content of the file for external agents: the endpoint's address and the run's key."""

    url: str
    key: str


def load_or_make_key(path: Path) -> str:
    """Read the run's key from the file of an earlier process, or make a new key."""
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=ExternalFile).key
    return f"sk-run-{secrets.token_urlsafe(KEY_BYTES)}"


def write_address_file(path: Path, *, url: str, key: str) -> None:
    """Write the file for external agents, readable only by its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_bytes(msgspec.json.encode(ExternalFile(url, key)))
    os.replace(beside, path)
