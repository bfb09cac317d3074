"""The process that starts and ends agents. It imports only the standard library.

`python -m laminar_contrib.agents.launcher` is a hosted process whose calls are JSON. The first call names
the program of all agents, and is answered once its function is imported. Each further call starts an agent and is
answered by the agent's exit code. A cancelled call kills its agent:

    -> 0 {"command": [], "function": "agent.py:run"}             <- 0 0
    -> 7 {"folder": "...", "log": "...", "variables": {...}}     <- 7 0
    -> 7                                                         <- 7 -9

A function is imported once; each agent is a fork of this process. The launcher kills the process group of an agent
that has ended. No agent outlives the launcher's owner, however that process ends
(`tests/environment/agents/test_agents.py`).
"""

import asyncio
import contextlib
import gc
import inspect
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from laminar_py.children import call_frame, kernel, own_control, receive_call

FILE_BYTES = 2**28  # of each file that an agent writes, its log included
REWARD_TIMEOUT_S = 60.0
CHUNK = 2**16


class Launcher:
    """Starts and ends the agents of a command or a function, by calls from the socket `control`."""

    def __init__(self, *, command: list[str], function: str, control: socket.socket) -> None:
        self._command = command
        self._control = control
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._numbers: dict[int, int] = {}  # of agents, by process
        self._function = _import_function(function) if function else None

    def run(self) -> None:
        """Serve calls until the owner closes the socket."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        gc.freeze()  # else garbage collection in each fork would copy all imported modules
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, CHUNK)
                self._reap()
            if self._control.fileno() in ready:
                call = receive_call(self._control)
                if call is None:
                    return
                number, body, _ = call
                self._start_or_kill(number, body)

    def end_all(self) -> None:
        """End every agent."""
        for pid in self._numbers:
            _kill_group(pid)

    def _start_or_kill(self, number: int, body: bytes) -> None:
        """Start the agent that `body` describes, under this number; an empty body kills the number's agent.

        If no process can be forked, only this agent fails, with the reason in its log.
        """
        if not body:
            for pid in [pid for pid, known in self._numbers.items() if known == number]:
                _kill_group(pid)
            return
        order = json.loads(body)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # out of memory or processes: only this agent fails
            Path(order["log"]).write_text(f"it could not be started ({error.strerror})\n")
            self._control.sendall(call_frame(number, b"1"))
            return
        if not pid:
            self._run_agent(order, parent)
        self._numbers[pid] = number

    def _reap(self) -> None:
        """Report the exit codes of agents that have ended, after killing the processes that they left."""
        while True:
            try:
                exited = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if exited is None:
                return
            _kill_group(exited.si_pid)  # no other process can have its id before we reap it
            _, status = os.waitpid(exited.si_pid, 0)
            number = self._numbers.pop(exited.si_pid, None)
            if number is not None:
                code = os.waitstatus_to_exitcode(status)
                with contextlib.suppress(OSError):  # the owner is gone; `run` notices it next
                    self._control.sendall(call_frame(number, str(code).encode()))

    # ---- in the process of an agent

    def _run_agent(self, order: dict[str, Any], parent: int) -> None:
        """Run the agent in this forked process, then exit."""
        code = 1
        try:
            self._prepare_agent(order, parent)
            if self._function is None:
                for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(ignored, signal.SIG_DFL)  # Python ignores them, and a command would inherit that
                os.execvp(self._command[0], self._command)
            _call_function(self._function)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
        except BaseException:  # noqa: BLE001 - user code may raise anything; it ends only its own process
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code & 0xFF)

    def _prepare_agent(self, order: dict[str, Any], parent: int) -> None:
        """Make a forked process ready for its agent: group, signals, output, folder, variables and limits."""
        kernel.end_with_parent(parent=parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for descriptor, place in ((nothing, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, place)
        for descriptor in (self._control.detach(), self._woken, self._wake, log, nothing):
            os.close(descriptor)  # files that the user's module opened stay open
        os.chdir(order["folder"])
        os.environ.update(order["variables"])
        kernel.limit(resource.RLIMIT_FSIZE, FILE_BYTES)
        kernel.limit(resource.RLIMIT_CORE, 0)


def main() -> None:
    """Run the launcher process."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    control = own_control()
    first = receive_call(control)
    if first is None:
        return
    number, body, _ = first
    launcher = Launcher(**json.loads(body), control=control)
    try:
        control.sendall(call_frame(number, b"0"))
        launcher.run()
    finally:
        launcher.end_all()


def _import_function(function: str) -> Callable[[Any], Any]:
    """Import the function of a file. Raises `SystemExit` if there is none."""
    path, _, name = function.rpartition(":")
    sys.path.insert(0, str(Path(path).parent))
    imported: Callable[[Any], Any] | None = runpy.run_path(path, run_name="agent").get(name)
    if not callable(imported):
        sys.exit(f"{path} has no function {name}")
    return imported


def _call_function(function: Callable[[Any], Any]) -> None:
    """Call an agent function. Post its return value as the reward, or as one for each role, unless it is None."""
    problem = json.loads(Path(os.environ["LAMINAR_PROBLEM"]).read_bytes())
    _seed_generators(problem["trajectory_id"])
    value = function(problem)
    if inspect.iscoroutine(value):
        value = asyncio.run(value)
    if value is None:
        return
    reward = {role: float(number) for role, number in value.items()} if isinstance(value, dict) else float(value)
    request = Request(f"{os.environ['OPENAI_BASE_URL']}/reward", json.dumps({"reward": reward}).encode())
    request.add_header("Authorization", f"Bearer {os.environ['OPENAI_API_KEY']}")
    with urlopen(request, timeout=REWARD_TIMEOUT_S):
        pass


def _seed_generators(name: str) -> None:
    """Seed random generators by the trajectory's name; else all forks would draw the same numbers."""
    random.seed(name)
    seed = random.getrandbits(32)
    for library, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if library in sys.modules:
            getattr(sys.modules[library], function)(seed)


def _kill_group(pid: int) -> None:
    """Kill a child that was not reaped yet, and its process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # directly too: it may not lead its group yet
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
