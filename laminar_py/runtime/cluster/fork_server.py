"""Fork server: a process with all imports done that forks the processes of a run on this host.

`python -m laminar_py.runtime.cluster.fork_server FD PARENT` accepts connections on the listening Unix socket FD.
When its parent, the process PARENT, ends, it deletes the folder of the socket and ends. Each connection starts one
process:

    client -> server   `StartProcess`, and one end of a socket pair, the guard
    child  -> client   `Started`, then the answers to the calls that come over this connection
    server -> guard    the exit status of the child (four bytes)

The kernel sends SIGKILL to the child as soon as the client shuts down or closes the other end of the guard. So a
child ends with its client, also while it computes, hangs or is stopped.
"""

import asyncio
import contextlib
import fcntl
import gc
import importlib
import os
import random
import select
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import msgspec

from laminar_py.children import kernel
from laminar_py.children.hosted import trim_log
from laminar_py.children.wire import exactly
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.calls import HEAD, Shell, serve, set_title, write_frame

GUARD = b"g"  # the byte with which a client sends the guard
STATUS = struct.Struct("<i")
REQUEST_S = 10.0  # for a client to send its request
PAUSE_S = 0.1  # before the server accepts again, after it had no file descriptors left
TRIM_EVERY_S = 1.0
OOM_SCORE = "500"  # of 1000; the kernel first ends processes with a high score
PRELOADED = (  # modules that the processes need; the server skips modules that are not installed
    "transformers.modeling_utils",
    "laminar_py.engines.local.engine",
    "laminar_py.runtime.workers.processes.learner",
    "laminar_py.runtime.workers.processes.replica",
    "laminar_py.runtime.workers.processes.relay",
    "laminar_py.runtime.workers.processes.scorer",
    "laminar_py.runtime.workers.processes.environment",
)


class StartProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a process that hosts an object of a class."""

    actor_class: str  # "module:Class"
    title: str  # that `ps` shows
    concurrency: int
    environment: dict[str, str]
    folder: str  # working directory
    path: list[str]  # where Python looks for modules
    errors: str  # file for its standard output and standard error


class Started(msgspec.Struct, frozen=True):
    """Reply that the process is up."""

    pid: int


def main() -> None:
    """Import the preloaded modules, then fork a process for each connection, until the server is killed."""
    listener, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    signal.signal(signal.SIGTERM, lambda number, frame: _end(Path(listener.getsockname()).parent, parent))
    kernel.end_with_parent(signal.SIGTERM, parent=parent)
    for module in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    assert threading.active_count() == 1, "a fork copies no other thread"
    gc.collect()
    gc.freeze()  # so that a child's collector does not copy the pages of all these objects
    wake, woken = socket.socketpair()
    wake.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # it only wakes
    guards = dict[int, socket.socket]()
    while True:
        ready, _, _ = select.select([listener, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _reap(guards)
        if listener in ready:
            try:
                connection, _ = listener.accept()
            except OSError as error:  # no file descriptors are left; clients wait
                _report(f"cannot accept a connection: {error}")
                time.sleep(PAUSE_S)
                continue
            _fork(connection, guards, inherited=(listener, wake, woken))


def _end(folder: Path, parent: int) -> NoReturn:
    """End the server; also delete its folder if its parent is dead."""
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _report(message: str) -> None:
    """Write a line to standard error; clients quote its last line when a process does not start."""
    print("fork server:", message, file=sys.stderr, flush=True)  # noqa: T201 (the server has no log)


def _reap(guards: dict[int, socket.socket]) -> None:
    """Wait for all children that have ended; send each exit status over the child's guard, and close the guard."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with guards.pop(pid) as guard, contextlib.suppress(OSError):  # the client may be gone
                guard.sendall(STATUS.pack(status))


def _fork(
    connection: socket.socket, guards: dict[int, socket.socket], *, inherited: tuple[socket.socket, ...]
) -> None:
    """Fork the process that a connection requests; its guard socket goes into `guards` by process id.

    The child closes the server's sockets and never returns. A bad request closes the connection.
    """
    guard: socket.socket | None = None
    try:
        guard = _guard(connection)
        start = _request(connection)
        pid = os.fork()
    except (OSError, ValueError, msgspec.MsgspecError) as error:  # the client sees both sockets close
        _report(f"the process is not forked: {error}")
        connection.close()
        if guard is not None:
            guard.close()
        return
    if pid:
        connection.close()
        guards[pid] = guard
        return
    try:
        for held in (*inherited, *guards.values()):
            held.close()
        _become(start, connection, guard)
    except BaseException:  # noqa: BLE001 - the child must not return into the server's loop
        traceback.print_exc()
    finally:
        os._exit(1)


def _guard(connection: socket.socket) -> socket.socket:
    """Return the guard socket that a client sends with its first byte, within `REQUEST_S`. Raises `ValueError`."""
    connection.settimeout(REQUEST_S)
    _, descriptors, _, _ = socket.recv_fds(connection, len(GUARD), 1)
    if not descriptors:
        raise ValueError("the request to start a process has no guard socket")
    os.set_inheritable(descriptors[0], False)  # programs that the process starts must not hold the guard
    return socket.socket(fileno=descriptors[0])


def _request(connection: socket.socket) -> StartProcess:
    """Read the request that follows the guard. Raises `ValueError` if the connection ends first."""
    head = exactly(connection, HEAD.size)
    body = None if head is None else exactly(connection, *HEAD.unpack(head))
    if body is None:
        raise ValueError("the request to start a process ends early")
    return decode(StartProcess, body)


def _become(start: StartProcess, connection: socket.socket, guard: socket.socket) -> NoReturn:
    """Turn this forked child into the requested process, which the kernel kills when the client closes `guard`."""
    fcntl.fcntl(guard, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(guard, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(guard, fcntl.F_SETFL, fcntl.fcntl(guard, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    if select.select([guard], [], [], 0)[0]:
        os._exit(0)  # the client is gone already
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    errors = os.open(start.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.close(errors)
    with contextlib.suppress(OSError):  # the kernel then ends a part before the controller and this server
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    os.environ.clear()
    os.environ.update(start.environment)
    set_title(start.title)
    os.chdir(start.folder)
    sys.path[:] = start.path
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    connection.setblocking(False)
    asyncio.run(_serve(start, connection))
    os._exit(0)


async def _serve(start: StartProcess, connection: socket.socket) -> None:
    """Report the start, then host the requested object until the client is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    write_frame(writer, Started(os.getpid()))
    trimming = asyncio.create_task(_keep_trimming(Path(start.errors)), name="trim-output")
    await serve(Shell(start.actor_class, concurrency=start.concurrency), reader, writer)
    trimming.cancel()


async def _keep_trimming(output: Path) -> None:
    """Delete old lines of this process's output, in which an environment may print much, until cancelled."""
    while True:
        trim_log(output)
        await asyncio.sleep(TRIM_EVERY_S)


if __name__ == "__main__":
    main()
