"""The process that starts agents and ends them. The standard library alone is imported here.

`python -m laminar_py.environment.agents.launcher PROGRAM`, a `Program` as JSON. Orders and news are JSON, one in a
line:

    <- {"ready": true}
    -> {"start": 7, "folder": "...", "log": "...", "variables": {...}}     <- {"left": 7, "code": 0}
    -> {"end": 7}                                                          <- {"left": 7, "code": -9}

A function is imported once; each agent that calls it is a fork of this process. Invariant: an agent leaves no
process behind in its group, and none outlives whoever gives the orders, however that ended.
"""

import asyncio
import contextlib
import gc
import inspect
import json
import math
import os
import random
import resource
import runpy
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from laminar_py.sandbox.inside import kernel

FILE_BYTES = 2**28  # of each file that an agent writes, its log among them
REWARD_TIMEOUT_S = 60.0
CHUNK = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program of agents, and bounds of each of its processes, e.g. `Program(function="a.py:run", cpu_s=60.0)`."""

    command: tuple[str, ...] = ()
    function: str = ""
    memory_mib: int | None = None
    cpu_s: float | None = None


class Launcher:
    """Agents of one program, started and ended by orders from `orders`; what they do is told to `news`."""

    def __init__(self, program: Program, *, orders: int, news: int) -> None:
        self._program = program
        self._orders, self._news = orders, news
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._numbers: dict[int, int] = {}  # of agents, by process
        self._function = _imported(program.function) if program.function else None

    def run(self) -> None:
        """Follow orders until there is nobody to give them."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.freeze()  # what was imported is never copied for a look at it
        self._tell({"ready": True})
        rest = b""
        while True:
            ready, _, _ = select.select([self._orders, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, CHUNK)
                self._reap()
            if self._orders in ready:
                read = os.read(self._orders, CHUNK)
                if not read:
                    return
                *lines, rest = (rest + read).split(b"\n")
                for line in lines:
                    self._follow(json.loads(line))

    def end_all(self) -> None:
        """End every agent."""
        for pid in self._numbers:
            _kill(pid)

    def _follow(self, order: dict[str, Any]) -> None:
        if "start" not in order:
            for pid in [pid for pid, number in self._numbers.items() if number == order["end"]]:
                _kill(pid)
            return
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # of memory or processes there are too few, and the others go on
            Path(order["log"]).write_text(f"it could not be started ({error.strerror})\n")
            self._tell({"left": order["start"], "code": 1})
            return
        if not pid:
            self._become(order, parent)
        self._numbers[pid] = order["start"]

    def _reap(self) -> None:
        """Tell of the agents that have ended, once what they left behind has."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            _kill(found.si_pid)  # its number is nobody else's until it is waited for
            _, status = os.waitpid(found.si_pid, 0)
            number = self._numbers.pop(found.si_pid, None)
            if number is not None:
                self._tell({"left": number, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, news: dict[str, Any]) -> None:
        os.write(self._news, json.dumps(news).encode() + b"\n")

    # ---- in the process of an agent

    def _become(self, order: dict[str, Any], parent: int) -> None:
        """Be the agent; does not return."""
        code = 1
        try:
            self._prepare(order, parent)
            if self._function is None:
                for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(ignored, signal.SIG_DFL)  # Python's own doing, which a command would keep
                os.execvp(self._program.command[0], self._program.command)
            _call(self._function)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
        except BaseException:  # noqa: BLE001 - whatever somebody else's code raises ends its own process
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)

    def _prepare(self, order: dict[str, Any], parent: int) -> None:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, place)
        for descriptor in (self._orders, self._news, self._woken, self._wake, log, nothing):
            os.close(descriptor)  # what the imported file has opened stays open
        os.chdir(order["folder"])
        os.environ.update(order["variables"])
        _limit(resource.RLIMIT_FSIZE, FILE_BYTES)
        _limit(resource.RLIMIT_CORE, 0)
        if self._program.memory_mib is not None:
            _limit(resource.RLIMIT_DATA, self._program.memory_mib * 2**20)
        if self._program.cpu_s is not None:
            seconds = math.ceil(self._program.cpu_s)
            _limit(resource.RLIMIT_CPU, seconds, most=seconds + 1)  # a signal with a name comes first


def main() -> None:
    """Be the launcher, whose own output is the news."""
    given = json.loads(sys.argv[1])
    orders, news, nothing = os.dup(0), os.dup(1), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)  # what the imported file prints
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    launcher = Launcher(Program(**{**given, "command": tuple(given["command"])}), orders=orders, news=news)
    try:
        launcher.run()
    finally:
        launcher.end_all()


def _imported(function: str) -> Callable[[Any], Any]:
    """The function of a file. Raises `SystemExit` where there is none."""
    path, _, name = function.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))
    found: Callable[[Any], Any] | None = runpy.run_path(path, run_name="agent").get(name)
    if not callable(found):
        sys.exit(f"{path} has no function {name}")
    return found


def _call(function: Callable[[Any], Any]) -> None:
    """Call an agent that is a function; what it returns is its reward, or one for each role, unless it is None."""
    problem = json.loads(Path(os.environ["LAMINAR_PROBLEM"]).read_bytes())
    _seed(problem["trajectory_id"])
    value = function(problem)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if value is None:
        return
    reward = {role: float(one) for role, one in value.items()} if isinstance(value, dict) else float(value)
    request = Request(f"{os.environ['OPENAI_BASE_URL']}/reward", json.dumps({"reward": reward}).encode())
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    with urlopen(request, timeout=REWARD_TIMEOUT_S):
        pass


def _seed(name: str) -> None:
    """Seed what draws numbers, else all agents would draw what this process would have."""
    random.seed(name)
    seed = random.getrandbits(32)
    for library, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if library in sys.modules:
            getattr(sys.modules[library], function)(seed)


def _kill(pid: int) -> None:
    """End a child that was not waited for, and its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it may not have its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _limit(kind: int, bound: int, *, most: int | None = None) -> None:
    """Bound what may be used, and what that may be raised to, unless both are lower already."""
    _, hard = resource.getrlimit(kind)
    highest = bound if most is None else most
    if hard != resource.RLIM_INFINITY:
        highest = min(highest, hard)
    resource.setrlimit(kind, (min(bound, highest), highest))


if __name__ == "__main__":
    main()
