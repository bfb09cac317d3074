"""The process that starts and ends agents. It imports only the standard library.

`python -m laminar_contrib.agents.launcher` is a hosted process whose calls are JSON. The first call names
the program of all agents, and is answered once its function is imported. Each further call starts an agent and is
answered by the agent's exit code. A cancelled call kills its agent:

    -> 0 {"command": [], "function": "agent.py:run"}             <- 0 0
    -> 7 {"folder": "...", "log": "...", "variables": {...}}     <- 7 0
    -> 7                                                         <- 7 -9

A function is imported once; each agent is a fork of this process, below a guard of its own:

    launcher -> guard -> agent -> processes of the agent

Orphans below a guard become its children, also in a session of their own (a subreaper). A guard ends on SIGTERM,
which it also gets when the launcher ends, or with its agent: it kills its children until none is left, and ends as
the agent did. If a guard is killed, the launcher adopts and kills these processes. No process of an agent outlives
the agent or the launcher's owner, however they end (`tests/environment/agents/test_launcher.py`).
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
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from laminar_py.children import call_frame, kernel, own_control, receive_call

FILE_BYTES = 2**28  # of each file that an agent writes, its log included
REWARD_TIMEOUT_S = 60.0
CHUNK = 2**16
GUARD_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)


class AgentLauncher:
    """Starts and ends the agents of a command or a function, by calls from the socket `control`."""

    def __init__(self, *, command: list[str], function: str, control: socket.socket) -> None:
        self._command = command
        self._control = control
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._numbers: dict[int, int] = {}  # of agents, by the process of their guard
        self._ended: set[int] = set()  # guards that got SIGTERM
        self._function = _import_function(function) if function else None
        self._imported = set(_children())  # processes that the import of the function started

    def run(self) -> None:
        """Serve calls until the owner closes the socket."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)  # for processes whose guard is killed
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
        """End every agent, and wait until none of its processes is left."""
        for pid in self._numbers:
            self._end_guard(pid)
        for pid in self._numbers:
            os.waitpid(pid, 0)
        _kill_children(spared=())

    def _start_or_kill(self, number: int, body: bytes) -> None:
        """Start the agent that `body` describes, under this number; an empty body kills the number's agent.

        If no process can be forked, only this agent fails, with the reason in its log.
        """
        if not body:
            for pid in [pid for pid, known in self._numbers.items() if known == number]:
                self._end_guard(pid)
            return
        order = json.loads(body)
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, GUARD_SIGNALS)  # the guard waits for them
        try:
            pid = os.fork()
        except OSError as error:  # out of memory or processes: only this agent fails
            Path(order["log"]).write_text(f"it could not be started ({error.strerror})\n")
            self._control.sendall(call_frame(number, b"1"))
            return
        finally:
            if os.getpid() == parent:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARD_SIGNALS)
        if not pid:
            self._guard_agent(order, parent)
        self._numbers[pid] = number

    def _end_guard(self, pid: int) -> None:
        """Tell a guard, which was not reaped yet, to end its agent and itself."""
        self._ended.add(pid)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)  # its agent may have stopped it

    def _reap(self) -> None:
        """Report the exit codes of agents whose guards have ended, after killing the processes that they left."""
        while (ended := _reap_child()) is not None:
            pid, status = ended
            number = self._numbers.pop(pid, None)
            if number is None:  # an orphan of a killed guard
                continue
            code = os.waitstatus_to_exitcode(status)
            if code < 0 and pid not in self._ended:  # perhaps a signal killed the guard before its children
                _kill_children(spared=self._numbers.keys() | self._imported)
            self._ended.discard(pid)
            with contextlib.suppress(OSError):  # the owner is gone; `run` notices it next
                self._control.sendall(call_frame(number, str(code).encode()))

    # ---- in the process of a guard

    def _guard_agent(self, order: dict[str, Any], parent: int) -> None:
        """Guard an agent in this forked process until it ends or SIGTERM comes, then end as the agent did."""
        try:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            kernel.end_with_parent(signal.SIGTERM, parent=parent)
            os.setsid()  # else the owner kills it with the launcher's group, before its children
            kernel.limit(resource.RLIMIT_CORE, 0)
            guard, agent = os.getpid(), os.fork()
            if not agent:
                self._run_agent(order, guard)
            os.close(self._control.detach())  # else the owner would not notice the launcher's end
            statuses: dict[int, int] = {}
            while agent not in statuses and signal.sigwait(GUARD_SIGNALS) != signal.SIGTERM:
                statuses.update(iter(_reap_child, None))
            statuses |= _kill_children(spared=())
            _end_as(statuses[agent])
        except BaseException:  # noqa: BLE001 - this process must not return into the launcher's code
            traceback.print_exc()
        finally:
            os._exit(1)

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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, GUARD_SIGNALS)
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
    launcher = AgentLauncher(**json.loads(body), control=control)
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


def _reap_child() -> tuple[int, int] | None:
    """Reap a child that has ended, and return its id and status; None if there is none."""
    with contextlib.suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, status) if pid else None
    return None


def _kill_children(*, spared: Container[int]) -> dict[int, int]:
    """Kill and reap all children but the `spared`, and the orphans that they leave; return statuses by id.

    A process that changed its user may refuse the signal, and is left alone.
    """
    statuses: dict[int, int] = {}
    refused = set[int]()
    while children := [pid for pid in _children() if pid not in spared and pid not in refused]:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except PermissionError:
                refused.add(pid)
        for pid in set(children) - refused:
            statuses[pid] = os.waitpid(pid, 0)[1]
    return statuses


def _children() -> list[int]:
    """Return the ids of this process's children, those included that have ended and were not reaped."""
    listed = list(Path("/proc/self/task").glob("*/children"))
    if listed:
        return [int(pid) for path in listed for pid in path.read_text().split()]
    found = []  # a kernel without these files: look at all processes
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            _, _, fields = path.read_text().rpartition(")")  # a program's name may contain anything
            if int(fields.split()[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


def _end_as(status: int) -> None:
    """End this process with the exit code or the signal of a wait status."""
    if os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
