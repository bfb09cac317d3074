"""Agents of trajectories: processes of ours, or agents that run elsewhere. Owned by `agents.kind`.

An agent of ours has a working folder of its own, with what it wrote, and ends with its trajectory; the process of
`agents.launcher` starts and ends it. The agent is told where its model is by the variables that clients of the API
read, and its problem by a file. An external agent asks the endpoint for a trajectory, with the run's key, which a
file of the run has. Invariants: no agent outlives the process of environments that started it; a trajectory is
handed out once, unless that process died since.
"""

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from laminar_py.environment.agents.launcher import Program
from laminar_py.environment.protocol import Problem
from laminar_py.sandbox.hosted import HostedCall, HostedProcess, ProcessLostError, last_line

KEY_BYTES = 24  # of the run
LOG = "agent.log"
LAUNCHER_LOG = "launcher.log"
PROBLEM = "problem.json"
NO_KEY = "each-agent-has-its-own"  # of what an imported file makes before there are agents
GRACE_S = 2.0
LAUNCHER_DIED = "the process that starts agents has died"


class LauncherError(Exception):
    """The process that starts agents could not begin; the message has its last words."""


class RunningAgent:
    """An agent of the launcher; `ended` is called when it has ended by itself, with a fault unless that is ""."""

    def __init__(self, folder: Path, call: HostedCall, *, keeps: bool, ended: Callable[[str], None]) -> None:
        self._folder = folder
        self._call = call
        self._keeps = keeps
        self._ended: Callable[[str], None] | None = ended
        self._ending: asyncio.Task[None] | None = None
        call.answer.add_done_callback(self._left)

    async def end(self) -> None:
        """End it and all that it started, once it has had a moment to end by itself."""
        self._ending = self._ending or asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        self._ended = None
        await asyncio.wait([self._call.answer], timeout=GRACE_S)
        self._call.cancel()
        await asyncio.wait([self._call.answer])
        if not self._keeps:
            await asyncio.to_thread(_empty, self._folder)

    def _left(self, answer: "asyncio.Future[bytes]") -> None:
        if self._ended is None or answer.cancelled():
            return
        if answer.exception() is not None:
            self._ended(LAUNCHER_DIED)
        elif (code := int(answer.result())) == 0:
            self._ended("")
        else:
            self._ended(f"the agent ended with code {code}: {last_line(self._folder / LOG)}")


class AgentRunner:
    """Starts agents of a program; the folders of those that have ended it `keeps`, or else their logs alone."""

    def __init__(self, program: Program, *, url: str, folder: Path, model: Path, keeps: bool) -> None:
        self._program = program
        self._model = {"OPENAI_BASE_URL": url, "LAMINAR_MODEL": str(model.absolute())}
        self._keeps = keeps
        self._folder = folder.absolute()  # each agent has a folder of its own to be in
        self._launcher: HostedProcess | None = None
        self._beginning = asyncio.Lock()
        self._in_folder: WeakValueDictionary[Path, RunningAgent] = WeakValueDictionary()

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> RunningAgent:
        """The agent of a trajectory, whose requests have `key`. Raises `LauncherError`."""
        folder = self._folder / problem.trajectory_id
        if (before := self._in_folder.get(folder)) is not None:
            await before.end()
        await asyncio.to_thread(_make, folder, msgspec.json.encode(problem))
        launcher = await self.begin()
        variables = {"OPENAI_API_KEY": key, "LAMINAR_PROBLEM": str(folder / PROBLEM), "PWD": str(folder)}
        order = {"folder": str(folder), "log": str(folder / LOG), "variables": variables}
        call = launcher.begin(msgspec.json.encode(order))
        agent = self._in_folder[folder] = RunningAgent(folder, call, keeps=self._keeps, ended=ended)
        return agent

    async def begin(self) -> HostedProcess:
        """A launcher, another where the last has died. Raises `LauncherError` with its last words."""
        async with self._beginning:
            if self._launcher is not None and not self._launcher.is_lost:
                return self._launcher
            await self.close()
            self._folder.mkdir(parents=True, exist_ok=True)
            launcher = await HostedProcess.start(
                "laminar_py.environment.agents.launcher",
                variables={**self._model, "OPENAI_API_KEY": NO_KEY, "PYTHONHASHSEED": "0"},
                log=self._folder / LAUNCHER_LOG,
                switches=["-P"],  # nothing that an agent wrote into its folder is imported
            )
            self._launcher = launcher
            try:
                await launcher.begin(msgspec.json.encode(self._program)).answer
            except ProcessLostError as error:
                raise LauncherError(error.last_line) from None
            return launcher

    async def close(self) -> None:
        """End the launcher, and with it every agent."""
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.end(kill=False)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTrajectory:
    """A trajectory that is, or was, to be had: its agent's key, and its problem."""

    key: str
    problem: Problem
    withdraw: Callable[[], None]

    async def end(self) -> None:
        """Have nobody take it any more; whoever has it is refused from here on."""
        self.withdraw()


class ExternalAgents:
    """Trajectories that wait for agents, the longest waiting first; `key` is that of those who may take one."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._offers: dict[str, OfferedTrajectory] = {}  # by the agent's key
        self._some = asyncio.Event()

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> OfferedTrajectory:
        """Offer a trajectory, whose requests are to have `key`; nobody tells when its agent has `ended`."""
        offer = OfferedTrajectory(key=key, problem=problem, withdraw=lambda: self._withdraw(key))
        self._offers[key] = offer
        self._some.set()
        return offer

    async def take(self, patience_s: float) -> OfferedTrajectory | None:
        """The one that waits longest; None where there was none for so long."""
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
    """Address at which external agents ask for trajectories, and the key for it."""

    url: str
    key: str


def run_key(path: Path) -> str:
    """The key in the file of an earlier process, or a new one."""
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=ExternalFile).key
    return f"sk-run-{secrets.token_urlsafe(KEY_BYTES)}"


def tell_where(path: Path, *, url: str, key: str) -> None:
    """Write the file, which nobody but its owner reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_bytes(msgspec.json.encode(ExternalFile(url, key)))
    os.replace(beside, path)
