"""Processes of a run on this host alone, forked from a process with all imports done. No Ray.

The client of `fork_server`. Calls travel over Unix sockets in a folder of the run's owner, so nothing listens on a
network. All I/O runs on one event loop in a thread of its own, so that a part can be called from any loop.
"""

import asyncio
import contextlib
import functools
import hashlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from laminar_py.records.codec import decode, encode
from laminar_py.runtime.cluster.calls import HEAD, Answer, Caller, Scalar, read_frame, value_of
from laminar_py.runtime.cluster.errors import ProcessLostError
from laminar_py.runtime.cluster.fork_server import STATUS, Started, StartProcess
from laminar_py.runtime.cluster.placement import Node, Place

T = TypeVar("T")
HERE = "here"  # the only node
LOOPBACK = "127.0.0.1"
SHARED = "LAMINAR_FORK_SERVER"  # variable: the socket of a server that several runs use, such as those of a test
SESSION = "LAMINAR_SESSION"  # variable, in processes of a run: the folder of its sockets
LOW = 10  # priority, as `nice` has it
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between looks for a process that is away
END_S = 10.0  # for the kernel to end the processes
LAST_S = 0.5  # for the calls of ended processes to raise


class ForkedCluster:
    """This host: `ForkedCluster()` starts its fork server, `close()` ends all processes."""

    here = HERE

    def __init__(self) -> None:
        self._session = Path(tempfile.mkdtemp(prefix="laminar-"))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="processes", daemon=True).start()
        self._server: subprocess.Popen[bytes] | None = None
        self._processes = set[ForkedProcess]()
        self._gpus = _visible_gpus()
        self._free_gpus = list(self._gpus)
        os.environ[SESSION] = str(self._session)
        if SHARED not in os.environ:
            self._start_server()

    def start(
        self, kind: type, *, title: str, concurrency: int, place: Place, known_as: str = ""
    ) -> "ForkedProcess":
        """A process that hosts an object of `kind`; it sees of the GPUs those that are its own."""
        gpus, self._free_gpus = self._free_gpus[: place.gpus], self._free_gpus[place.gpus :]
        start = StartProcess(
            module=kind.__module__,
            name=kind.__qualname__,
            title=title,
            concurrency=concurrency,
            environment=dict(os.environ) | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)},
            folder=os.getcwd(),
            path=sys.path,
            listen=str(_socket_of(self._session, known_as)) if known_as else "",
        )
        process = ForkedProcess(start, self._loop, connect=self._connect)
        self._processes.add(process)

        def forget(_: object) -> None:
            self._processes.discard(process)
            self._free_gpus += gpus

        process.ended.add_done_callback(forget)
        return process

    def nodes(self, *, taken: bool) -> list[Node]:
        """This host, with its free GPUs, or with `taken` with all."""
        gpus = self._gpus if taken else self._free_gpus
        return [Node(id=HERE, ip=LOOPBACK, gpus=len(gpus), cpus=len(os.sched_getaffinity(0)), here=True)]

    async def all_placed(self) -> bool:
        """True: a process has its place at once."""
        return True

    async def on_node(self, node: str, function: Callable[..., bytes], *arguments: str | bytes) -> bytes:
        """Answer of a function in a process of low priority, which ends with the call."""
        process = self.start(_LowPriority, title=function.__name__, concurrency=1, place=Place())
        try:
            asked = process.ask("call", function.__module__, function.__qualname__, *arguments)
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
        for process in processes:
            with contextlib.suppress(TimeoutError):
                process.ended.result(END_S)
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        self._loop.call_soon_threadsafe(self._loop.call_later, LAST_S, self._loop.stop)
        os.environ.pop(SESSION, None)
        shutil.rmtree(self._session, ignore_errors=True)

    def _connect(self) -> socket.socket:
        """A connection to the server, which is started again if it has ended."""
        path = os.environ.get(SHARED)
        if path is None and (self._server is None or self._server.poll() is not None):
            self._start_server()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path or str(self._session / "server"))
        return connection

    def _start_server(self) -> None:
        path = self._session / "server"
        path.unlink(missing_ok=True)
        self._server = start_server(path)


def start_server(path: Path) -> "subprocess.Popen[bytes]":
    """A fork server that listens at once at `path`, and answers when its imports are done."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1024)
        return subprocess.Popen(
            [sys.executable, "-m", "laminar_py.runtime.cluster.fork_server", str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # so that Ctrl-C reaches the controller alone
        )


class ForkedProcess:
    """A process of this host, seen from the process that started it. Each method may be called on any thread."""

    def __init__(
        self, start: StartProcess, loop: asyncio.AbstractEventLoop, *, connect: Callable[[], socket.socket]
    ) -> None:
        self._loop = loop
        self.ended = Future[str]()  # how it ended
        self._killed = False
        self._guard, theirs = socket.socketpair()
        self._guard.setblocking(False)
        self._caller = self._soon(self._open(start, theirs, connect))
        self._soon(self._watch())

    def ask(self, method: str, *arguments: Scalar) -> "Future[Future[Answer]]":
        """Make a call once the process is up; the inner future is its answer, or raises `ProcessLostError`."""
        return self._soon(self._ask(method, *arguments))

    def kill(self) -> None:
        """Have the kernel end the process."""
        self._killed = True
        with contextlib.suppress(OSError):  # it has ended
            self._guard.shutdown(socket.SHUT_WR)

    def _soon(self, work: Coroutine[object, object, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(
        self, start: StartProcess, theirs: socket.socket, connect: Callable[[], socket.socket]
    ) -> Caller:
        """Ask the server for the process, and wait until it is up."""
        with theirs:
            connection = connect()
            request = encode(start)
            socket.send_fds(connection, [HEAD.pack(len(request))], [theirs.fileno()])
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        writer.write(request)
        try:
            decode(Started, await read_frame(reader))
        except (asyncio.IncompleteReadError, OSError):
            writer.close()
            raise ProcessLostError("its process did not start", ended_by_run=self._killed) from None
        caller = Caller(reader, writer)
        self._loop.create_task(self._take_answers(caller), name="answers")
        return caller

    async def _take_answers(self, caller: Caller) -> None:
        await caller.run()
        reason = await asyncio.wrap_future(self.ended)
        caller.close(ProcessLostError(reason, ended_by_run=self._killed))

    async def _watch(self) -> None:
        """Wait for the exit status; without one the server is gone, and the kernel ends the process."""
        try:
            status = await self._loop.sock_recv(self._guard, STATUS.size)
        except OSError:
            status = b""
        self._guard.close()
        self.ended.set_result(_told(status))

    async def _ask(self, method: str, *arguments: Scalar) -> "Future[Answer]":
        answer = Future[Answer]()
        caller = await asyncio.wrap_future(self._caller)
        asked = caller.ask(method, *arguments)
        asked.add_done_callback(functools.partial(_pass_on, answer))
        return answer


class _LowPriority:
    """Calls one function in a process of low priority."""

    def call(self, module: str, name: str, *arguments: Scalar) -> bytes:
        """What the function returns."""
        os.nice(LOW)
        answer = getattr(importlib.import_module(module), name)(*arguments)
        assert isinstance(answer, bytes), f"{name} answers bytes"
        return answer


class NamedProcess:
    """A process of the run that others than the controller call, e.g. `NamedProcess("math-3.1.environment-0")`."""

    def __init__(self, name: str) -> None:
        self._path = _socket_of(Path(os.environ[SESSION]), name)
        self._caller: Caller | None = None
        self._looking = asyncio.Lock()  # one looks for all who wait
        self._tasks = set[asyncio.Task[None]]()

    async def ask(self, method: str, *arguments: Scalar) -> Answer:
        """The answer of a method. Raises `ProcessLostError` where the process ends over it."""
        return await (await self._find()).ask(method, *arguments)

    async def _find(self) -> Caller:
        async with self._looking:
            pause_s = FIRST_PAUSE_S
            while self._caller is None or self._caller.is_closed:
                try:
                    ends = await asyncio.open_unix_connection(self._path)
                except OSError:  # none has the name yet
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                else:
                    self._caller = Caller(*ends)
                    task = asyncio.create_task(self._run(self._caller), name="answers")
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            return self._caller

    async def _run(self, caller: Caller) -> None:
        await caller.run()
        caller.close(ProcessLostError("its process is gone"))


def _socket_of(session: Path, name: str) -> Path:
    """Socket of a named process; a digest, since the path of a socket has 107 characters at most."""
    return session / hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _pass_on(answer: "Future[Answer]", asked: "asyncio.Future[Answer]") -> None:
    """Settle a future of any thread with one of the loop."""
    if answer.cancelled():
        asked.exception()  # nobody waits for it
    elif (error := asked.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(asked.result())


def _told(status: bytes) -> str:
    """How a process ended, from its exit status."""
    if len(status) < STATUS.size:
        return "its process ended with the fork server"
    code = os.waitstatus_to_exitcode(STATUS.unpack(status)[0])
    return f"its process ended with code {code}" if code >= 0 else f"its process got {signal.Signals(-code).name}"


def _visible_gpus() -> list[str]:
    """Names of this host's GPUs, as `CUDA_VISIBLE_DEVICES` has them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
