"""Fork server: a process with all imports done that forks the processes of a run on this host.

`python -m laminar_py.runtime.cluster.fork_server FD` takes connections on a listening Unix socket. Each connection
starts one process:

    client -> server   `StartProcess`, and one end of a socket pair, the guard
    child  -> client   `Started`, then the answers to the calls that come over this connection
    server -> guard    the exit status of the child (four bytes)

The guard ends the child: the kernel sends SIGKILL to the child as soon as the other end is shut down or closed,
so a child that computes, hangs or is stopped ends with its client all the same. The server itself runs one thread
and ends with the process that started it.
"""

import asyncio
import contextlib
import fcntl
import gc
import importlib
import os
import random
import select
import signal
import socket
import struct
import sys
import traceback
from typing import NoReturn

import msgspec

from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.calls import HEAD, Shell, load_class, serve, set_title, write_frame
from laminar_py.sandbox.inside import kernel

STATUS = struct.Struct("<i")
REQUEST_S = 10.0  # for a client to send its request
PRELOADED = (  # what most processes of a run import; a module of a package that is not installed is left out
    "torch",
    "transformers.modeling_utils",
    "laminar_py.learner.step",
    "laminar_py.engines.local.engine",
    "laminar_py.runtime.workers.processes.learner_part",
    "laminar_py.runtime.workers.processes.replica",
    "laminar_py.runtime.workers.processes.relay",
    "laminar_py.runtime.workers.processes.scorer",
    "laminar_py.runtime.workers.processes.environment",
    "laminar_py.relay.node.relay_node",
    "laminar_py.relay.subscriber",
    "laminar_py.rollout.replica",
    "laminar_py.rollout.storing",
    "laminar_py.runtime.link.replica_link",
    "laminar_py.reward.scorer",
    "laminar_py.data.tokenizer",
    "laminar_py.environment.host",
)


class StartProcess(msgspec.Struct, frozen=True, kw_only=True):
    """Start of a process that hosts an object of a class."""

    module: str
    name: str  # of the class in it
    title: str  # that `ps` shows
    concurrency: int
    environment: dict[str, str]
    folder: str  # working directory
    path: list[str]  # where Python looks for modules
    listen: str = ""  # Unix socket at which other processes of the run call it; empty: none


class Started(msgspec.Struct, frozen=True):
    """A process is up."""

    pid: int


def main() -> None:
    """Preload, then fork as often as a client asks for it."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    listener = socket.socket(fileno=int(sys.argv[1]))
    for module in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
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
            connection, _ = listener.accept()
            _fork(connection, guards, inherited=(listener, wake, woken))


def _reap(guards: dict[int, socket.socket]) -> None:
    """Tell the exit status of each child that has ended."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with guards.pop(pid) as guard, contextlib.suppress(OSError):  # its client may be gone
                guard.sendall(STATUS.pack(status))


def _fork(
    connection: socket.socket, guards: dict[int, socket.socket], *, inherited: tuple[socket.socket, ...]
) -> None:
    try:
        start, guard = _request(connection)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        print("fork server: no request", error, file=sys.stderr)  # noqa: T201 (it has no log)
        connection.close()
        return
    pid = os.fork()
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


def _request(connection: socket.socket) -> tuple[StartProcess, socket.socket]:
    connection.settimeout(REQUEST_S)
    data, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 1)
    if not descriptors:
        raise ValueError("a request without a guard")
    guard = socket.socket(fileno=descriptors[0])
    (size,) = HEAD.unpack(data)
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ValueError("a request that ends early")
        parts += part
    return decode(StartProcess, bytes(parts)), guard


def _become(start: StartProcess, connection: socket.socket, guard: socket.socket) -> NoReturn:
    """Be the process that was asked for."""
    fcntl.fcntl(guard, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(guard, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(guard, fcntl.F_SETFL, fcntl.fcntl(guard, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
    if select.select([guard], [], [], 0)[0]:
        os._exit(0)  # the client is gone already
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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
    """Host the object until the client is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    write_frame(writer, Started(os.getpid()))
    shell = Shell(load_class(start.module, start.name), concurrency=start.concurrency)
    if start.listen:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(start.listen)  # of the process before
        await asyncio.start_unix_server(lambda *ends: serve(shell, *ends), start.listen)
    await serve(shell, reader, writer)


if __name__ == "__main__":
    main()
