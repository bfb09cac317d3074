"""Processes of a run on this host alone, forked from a process with all imports done. No Ray.

The client of `fork_server`. Calls travel over Unix sockets in a folder of the run's owner, so nothing listens on a
network. All I/O runs on one event loop in a thread of its own, so a part can be called from any loop.
"""

import asyncio
import contextlib
import functools
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from itertools import count
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_py.records.codec import decode, encode
from laminar_py.runtime.cluster.calls import (
    HEAD,
    ActorClass,
    Answer,
    Caller,
    Scalar,
    class_path,
    read_frame,
    value_of,
)
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.fork_server import GUARD, STATUS, Started, StartProcess
from laminar_py.runtime.cluster.placement import Node, Place

T = TypeVar("T")
HERE = "here"  # the only node
LOOPBACK = "127.0.0.1"
SHARED = "LAMINAR_FORK_SERVER"  # variable: the socket of a server for several runs, e.g. of a test session
LOW = 10  # priority, as `nice` has it
START_S = 180.0  # for the server to import, and to fork
END_S = 10.0  # for the kernel to end the processes
LAST_BYTES = 4096  # of a file, among which its last line is searched
BUFFER_BYTES = 1 << 20  # of a connection
MAX_FOLDER = 60  # characters of a temporary folder: a socket's path has 107 at most


class ForkedCluster:
    """This host: `ForkedCluster()` starts its fork server, `close()` ends all processes."""

    here = HERE

    def __init__(self) -> None:
        short = None if len(tempfile.gettempdir()) <= MAX_FOLDER else "/tmp"  # paths of sockets are short
        self._session = Path(tempfile.mkdtemp(prefix="laminar-", dir=short))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="processes", daemon=True)
        self._thread.start()
        self._server: subprocess.Popen[bytes] | None = None
        self._processes = set[ForkedProcess]()
        self._starts = count()
        self._gpus = GpuPool(_visible_gpus())
        if SHARED not in os.environ:
            self._start_server()

    def start(self, actor_class: ActorClass, *, title: str, concurrency: int, place: Place) -> "ForkedProcess":
        """Start a process that hosts an object of `actor_class`, once its GPUs are free; it sees no other GPUs."""
        start = StartProcess(
            actor_class=class_path(actor_class),
            title=title,
            concurrency=concurrency,
            environment=dict(os.environ),
            folder=os.getcwd(),
            path=sys.path,
            errors=str(self._session / f"{title}-{next(self._starts)}.err"),
        )
        process = ForkedProcess(
            start,
            self._loop,
            gpus=self._gpus,
            num_gpus=place.gpus,
            connect=self._connect,
            server=self._server_path,
        )
        self._processes.add(process)
        process.ended.add_done_callback(lambda _: self._processes.discard(process))
        return process

    def nodes(self) -> list[Node]:
        """Return this host with its free GPUs."""
        return [
            Node(id=HERE, ip=LOOPBACK, gpus=len(self._gpus.free), cpus=len(os.sched_getaffinity(0)), here=True)
        ]

    async def on_node(self, node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
        """Run a function in a process of low priority, which ends with the call; return its answer."""
        process = self.start(_LowPriority, title=function.__name__, concurrency=1, place=Place())
        try:
            asked = process.call_method("call", function.__module__, function.__qualname__, *arguments)
            answer = await asyncio.wrap_future(asked)
            found = value_of(await asyncio.wrap_future(answer))
        finally:
            process.kill()
        assert isinstance(found, bytes), f"{function.__name__} answers bytes"
        return found

    def close(self) -> None:
        """End all processes, and wait until they are gone."""
        processes = list(self._processes)
        for process in processes:
            process.kill()
        if self._server is not None and not any(process.is_up for process in processes):
            self._server.kill()  # it may still import, and has nothing to reap
        wait([process.ended for process in processes], END_S)
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_settle(), self._loop).result(END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._session, ignore_errors=True)

    @property
    def _server_path(self) -> Path:
        return Path(os.environ.get(SHARED) or self._session / "server")

    def _connect(self) -> socket.socket:
        """Connect to the server, which is started again if it has ended."""
        if SHARED not in os.environ and (self._server is None or self._server.poll() is not None):
            self._start_server()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._server_path))
        except OSError:
            connection.close()
            raise
        return connection

    def _start_server(self) -> None:
        path = self._session / "server"
        path.unlink(missing_ok=True)
        self._server = start_server(path)


def start_server(path: Path) -> "subprocess.Popen[bytes]":
    """Start a fork server that listens at `path` at once, and answers when its imports are done."""
    with socket.socket(socket.AF_UNIX) as listener, _errors_of(path).open("ab") as errors:
        listener.bind(str(path))
        listener.listen(1024)
        command = [sys.executable, "-m", "laminar_py.runtime.cluster.fork_server"]
        return subprocess.Popen(
            [*command, str(listener.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches the controller alone
        )


class GpuPool:
    """The GPUs of this host, each of one process at a time. Changed on one event loop alone."""

    def __init__(self, names: Sequence[str]) -> None:
        self.free = tuple(names)
        self._changed = asyncio.Event()  # set, and replaced, when GPUs come back or a process is killed

    async def take_gpus(self, number: int, *, unless: Callable[[], bool]) -> tuple[str, ...]:
        """Wait for free GPUs and take them. Raises `NoAnswerError` if `unless` becomes true first."""
        while len(self.free) < number:
            if unless():
                raise NoAnswerError("the run ended it before it had its GPUs")
            await self._changed.wait()
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def give_back(self, gpus: Sequence[str]) -> None:
        """Free these GPUs, and wake all processes that wait."""
        self.free += tuple(gpus)
        self._changed.set()
        self._changed = asyncio.Event()


class ForkedProcess:
    """A process of this host, seen from the process that started it. Each method may be called on any thread."""

    def __init__(
        self,
        start: StartProcess,
        loop: asyncio.AbstractEventLoop,
        *,
        gpus: GpuPool,
        num_gpus: int,
        connect: Callable[[], socket.socket],
        server: Path,
    ) -> None:
        self.ended = Future[str]()  # reason
        self.is_up = False
        self._start = start
        self._loop = loop
        self._gpus, self._num_gpus, self._taken = gpus, num_gpus, tuple[str, ...]()
        self._connect, self._server = connect, server
        self._killed = False
        self._guard, self._theirs = socket.socketpair()
        self._guard.setblocking(False)
        self._caller = self._soon(self._open())
        self._soon(self._watch())

    def call_method(self, method: str, *arguments: Scalar) -> "Future[Future[Answer]]":
        """Call a method once the process is up; the inner future is its answer, or raises `NoAnswerError`."""
        return self._soon(self._begin_call(method, *arguments))

    def kill(self) -> None:
        """End the process, by a signal of the kernel."""
        with contextlib.suppress(RuntimeError):  # the cluster is closed
            self._loop.call_soon_threadsafe(self._kill)

    def _kill(self) -> None:
        self._killed = self._killed or not self.ended.done()
        with contextlib.suppress(OSError):  # it has ended
            self._guard.shutdown(socket.SHUT_WR)
        self._gpus.give_back(())

    def _soon(self, work: Coroutine[object, object, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self) -> Caller:
        """Request the process from the server, and wait until it is up. Raises `NoAnswerError`."""
        try:
            with self._theirs:
                self._taken = await self._gpus.take_gpus(self._num_gpus, unless=lambda: self._killed)
                visible = {"CUDA_VISIBLE_DEVICES": ",".join(self._taken)}
                environment = self._start.environment | visible
                request = encode(msgspec.structs.replace(self._start, environment=environment))
                connection = self._connect()
                sent = socket.send_fds(connection, [GUARD, HEAD.pack(len(request))], [self._theirs.fileno()])
            assert sent == len(GUARD) + HEAD.size, "a few bytes fit any socket"
            connection.sendall(request)
            reader, writer = await asyncio.open_unix_connection(sock=connection, limit=BUFFER_BYTES)
            async with asyncio.timeout(START_S):
                decode(Started, await read_frame(reader))
        except (asyncio.IncompleteReadError, OSError) as error:  # a timeout is one too
            self._kill_unstarted()
            last = _last_line(Path(self._start.errors)) or _last_line(_errors_of(self._server)) or str(error)
            raise NoAnswerError(f"its process did not start: {last}") from None
        self.is_up = True
        caller = Caller(reader, writer)
        self._loop.create_task(self._take_answers(caller), name="answers")
        return caller

    def _kill_unstarted(self) -> None:
        with contextlib.suppress(OSError):
            self._guard.shutdown(socket.SHUT_WR)

    async def _take_answers(self, caller: Caller) -> None:
        reason = "its answers cannot be read"
        try:
            await caller.run()
            reason = await asyncio.wrap_future(self.ended)
        finally:
            caller.close(NoAnswerError(reason))

    async def _watch(self) -> None:
        """Wait for the exit status of the process; there is none if the server crashed or could not fork."""
        try:
            status = await self._loop.sock_recv(self._guard, STATUS.size)
        except OSError:
            status = b""
        self._guard.close()
        self._gpus.give_back(self._taken)
        self._taken = ()
        last = "" if self._killed else _last_line(Path(self._start.errors))
        self.ended.set_result(_exit_reason(status) + (f"; it last wrote: {last}" if last else ""))

    async def _begin_call(self, method: str, *arguments: Scalar) -> "Future[Answer]":
        answer = Future[Answer]()
        caller = await asyncio.shield(asyncio.wrap_future(self._caller))  # other calls wait for it, too
        asked = caller.call_method(method, *arguments)
        asked.add_done_callback(functools.partial(_pass_on, answer))
        return answer


class _LowPriority:
    """Calls one function in a process of low priority."""

    def call(self, module: str, name: str, *arguments: Scalar) -> bytes:
        """Call the function, and return its answer."""
        os.nice(LOW)
        answer = getattr(importlib.import_module(module), name)(*arguments)
        assert isinstance(answer, bytes), f"{name} answers bytes"
        return answer


async def _settle() -> None:
    """Wait until each call to an ended process has raised."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


def _pass_on(answer: "Future[Answer]", asked: "asyncio.Future[Answer]") -> None:
    """Copy the result of a future on the loop to a future for any thread."""
    error = asked.exception()
    if not answer.set_running_or_notify_cancel():
        return  # its caller was cancelled
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(asked.result())


def _exit_reason(status: bytes) -> str:
    """Return how a process ended, by its exit status."""
    if len(status) < STATUS.size:
        return "its process ended with the fork server"
    code = os.waitstatus_to_exitcode(STATUS.unpack(status)[0])
    if code >= 0:
        return f"its process ended with code {code}"
    known = -code in set(signal.Signals)
    cause = ", which the kernel sends when memory runs out (see dmesg)" if -code == signal.SIGKILL else ""
    return f"its process got {signal.Signals(-code).name if known else f'signal {-code}'}{cause}"


def _errors_of(server: Path) -> Path:
    """Return the file for the standard error of a fork server."""
    return server.with_suffix(".err")


def _last_line(path: Path) -> str:
    """Return the last line of a file that is not blank; "" if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _visible_gpus() -> list[str]:
    """Return the names of this host's GPUs, as in `CUDA_VISIBLE_DEVICES`."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
