"""Processes of a run on this host alone, forked from a process with all imports done. No Ray.

The client of `fork_server`. Calls travel over Unix sockets in a folder of the user who started the run, so no
process listens on a network. The kernel ends a process as soon as the event loop that started it ends, or
`ForkedCluster.close` is called.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import msgspec

from laminar_py.children.hosted import last_line
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.host import MAX_FOLDER, socket_folder
from laminar_py.runtime.cluster.calls import (
    HEAD,
    ActorClass,
    Answer,
    Call,
    Scalar,
    path_of,
    read_answer,
    read_frame,
    write_frame,
)
from laminar_py.runtime.cluster.errors import NoAnswerError
from laminar_py.runtime.cluster.fork_server import GUARD, STATUS, Started, StartProcess
from laminar_py.runtime.cluster.placement import Node, NodeSlot

HERE = "here"  # the only node
LOOPBACK = "127.0.0.1"
SHARED = "LAMINAR_FORK_SERVER"  # variable: the socket of a server for several runs, e.g. of a test session
START_S = 180.0  # for the server to import, and to fork
END_S = 10.0  # for the kernel to end the processes
BUFFER_BYTES = 1 << 20  # of a connection


class ForkedCluster:
    """This host: `ForkedCluster()` starts its fork server, `close()` ends all processes.

    Each GPU belongs to one process at a time.
    """

    here = HERE

    def __init__(self) -> None:
        self.processes = set[ForkedProcess]()
        try:
            self._session = Path(tempfile.mkdtemp(prefix="laminar-", dir=socket_folder()))
        except OSError as error:
            fault = f"TMPDIR={os.environ.get('TMPDIR', '')}: sockets of the run cannot be made ({error})"
            raise ConfigError(f"{fault}; name a writable folder of at most {MAX_FOLDER} characters") from None
        self._server: subprocess.Popen[bytes] | None = None
        self._starts = count()
        self._free_gpus = _visible_gpus()
        self._gpus_changed = asyncio.Event()  # set, and replaced, when GPUs come back or a process is killed
        if SHARED not in os.environ:
            self._start_server()

    def start(self, actor_class: ActorClass, *, title: str, concurrency: int, place: NodeSlot) -> "ForkedProcess":
        """Start a process that hosts an object of `actor_class`, once its GPUs are free; it sees no other GPUs."""
        start = StartProcess(
            actor_class=path_of(actor_class),
            title=title,
            concurrency=concurrency,
            environment=dict(os.environ),
            folder=os.getcwd(),
            path=sys.path,
            errors=str(self._session / f"{title}-{next(self._starts)}.err"),
        )
        process = ForkedProcess(self, start, num_gpus=place.gpus)
        self.processes.add(process)
        return process

    def nodes(self) -> list[Node]:
        """Return this host with its free GPUs."""
        cpus = len(os.sched_getaffinity(0))
        return [Node(id=HERE, ip=LOOPBACK, gpus=len(self._free_gpus), cpus=cpus, here=True)]

    def close(self) -> None:
        """End all processes and the fork server, wait until they have ended, and delete their folder."""
        processes = list(self.processes)
        for process in processes:
            process.kill()
        if self._server is not None and not any(process.is_up for process in processes):
            self._server.kill()  # it may still import modules; no child of it has to be reaped
        for process in processes:
            process.wait_ended(END_S)
        if self._server is not None:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._session, ignore_errors=True)

    # ---- what processes call

    async def take_gpus(self, process: "ForkedProcess", number: int) -> list[str]:
        """Wait for `number` free GPUs, and take them. Raises `NoAnswerError` if `process` is killed first."""
        while len(self._free_gpus) < number:
            if process.is_killed:
                raise NoAnswerError("the run ended its process before GPUs were free")
            await self._gpus_changed.wait()
        taken, self._free_gpus = self._free_gpus[:number], self._free_gpus[number:]
        return taken

    def give_back(self, gpus: list[str]) -> None:
        """Free these GPUs, and wake all processes that wait in `take_gpus`."""
        self._free_gpus += gpus
        self._gpus_changed.set()
        self._gpus_changed = asyncio.Event()

    def connect(self) -> socket.socket:
        """Return a connection to the fork server; start the server if it has ended. Raises `OSError`."""
        if SHARED not in os.environ and (self._server is None or self._server.poll() is not None):
            self._start_server()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self._server_path))
        except OSError:
            connection.close()
            raise
        return connection

    @property
    def server_errors(self) -> Path:
        """The file with the fork server's standard error."""
        return _errors_of(self._server_path)

    @property
    def _server_path(self) -> Path:
        return Path(os.environ.get(SHARED) or self._session / "server")

    def _start_server(self) -> None:
        path = self._session / "server"
        path.unlink(missing_ok=True)
        self._server = start_server(path)


def start_server(path: Path) -> "subprocess.Popen[bytes]":
    """Start a fork server; clients can connect to the socket `path` at once, and wait for the server's imports."""
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


class ForkedProcess:
    """A process of this host, seen from the event loop that started it.

    Its guard is one end of a socket pair: the kernel kills the process when the guard is shut down or closed, and
    the fork server sends the exit status over it.
    """

    def __init__(self, cluster: ForkedCluster, start: StartProcess, *, num_gpus: int) -> None:
        self.is_up = self.is_killed = False
        self._cluster = cluster
        self._start = start
        self._num_gpus = num_gpus
        self._numbers = count()
        self._waiting = dict[int, asyncio.Future[Answer]]()  # calls without an answer
        self._end: NoAnswerError | None = None  # why later calls get no answer
        self._guard, self._childs_guard = socket.socketpair()
        self._guard.setblocking(False)
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._serving = loop.create_task(self._serve(), name=start.title)

    async def ready(self) -> None:
        """Wait until the process is up. Raises `NoAnswerError` if the process does not start."""
        await asyncio.shield(self._ready)

    async def call(self, method: str, *arguments: Scalar) -> Answer:
        """Call a method of the object in the process, and return its answer. Raises `NoAnswerError`."""
        if self._end is not None:
            raise self._end
        number = next(self._numbers)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        write_frame(self._writer, Call(number, method, list(arguments)))
        try:
            return await answer
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """Have the kernel kill the process; a process that waits for GPUs does not start."""
        self.is_killed = self.is_killed or self._end is None
        self._shut_guard()
        self._cluster.give_back([])  # wakes `take_gpus`, which raises

    def wait_ended(self, timeout_s: float) -> None:
        """Block until a killed process has ended, at most `timeout_s`; works without the event loop."""
        with contextlib.suppress(OSError):  # the process has ended, or the time is over
            self._guard.settimeout(timeout_s)
            self._guard.recv(STATUS.size)

    def _shut_guard(self) -> None:
        """Shut the guard down, upon which the kernel kills the process."""
        with contextlib.suppress(OSError):  # the process has ended
            self._guard.shutdown(socket.SHUT_WR)

    async def _serve(self) -> None:
        """Start the process, pass its answers to the waiting calls until it ends, then free its GPUs."""
        gpus = list[str]()
        try:
            try:
                with self._childs_guard:
                    gpus = await self._cluster.take_gpus(self, self._num_gpus)
                    connection = self._request_process(gpus)
                reader, self._writer = await asyncio.open_unix_connection(sock=connection, limit=BUFFER_BYTES)
                async with asyncio.timeout(START_S):
                    decode(Started, await read_frame(reader))
                self.is_up = True
                self._ready.set_result(None)
                while True:
                    answer = read_answer(await read_frame(reader))
                    waiting = self._waiting.get(answer.number)
                    if waiting is not None and not waiting.done():  # its caller may have been cancelled
                        waiting.set_result(answer)
            except (asyncio.IncompleteReadError, OSError, NoAnswerError) as error:  # a timeout is an `OSError` too
                if not self.is_up:
                    self._fail_start(error)
            except Exception as error:  # noqa: BLE001 - an unreadable frame ends the process
                if self.is_up:
                    self._end = NoAnswerError(f"its process sent an unreadable frame: {error!r}")
                    self._shut_guard()
                    self._writer.close()
                else:
                    self._fail_start(error)
            await self._see_end()
        except asyncio.CancelledError:  # the event loop ends; `ForkedCluster.close` waits for the process
            self._shut_guard()
            raise
        self._guard.close()
        self._cluster.give_back(gpus)
        self._cluster.processes.discard(self)

    def _request_process(self, gpus: list[str]) -> socket.socket:
        """Request the process, with these GPUs, from the fork server; return the connection. Raises `OSError`."""
        environment = self._start.environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        request = encode(msgspec.structs.replace(self._start, environment=environment))
        connection = self._cluster.connect()
        sent = socket.send_fds(connection, [GUARD, HEAD.pack(len(request))], [self._childs_guard.fileno()])
        assert sent == len(GUARD) + HEAD.size, "a few bytes fit any socket"
        connection.sendall(request)
        return connection

    def _fail_start(self, error: Exception) -> None:
        """End the process; have `ready` and calls raise its last line of output, the fork server's, or `error`."""
        self._shut_guard()
        last = last_line(Path(self._start.errors)) or last_line(self._cluster.server_errors) or str(error)
        self._end = NoAnswerError(f"its process did not start: {last}")
        self._ready.set_exception(self._end)
        self._ready.exception()  # perhaps no caller waits for it

    async def _see_end(self) -> None:
        """Wait for the exit status, or the end of the fork server; then have all calls raise `NoAnswerError`."""
        try:
            status = await asyncio.get_running_loop().sock_recv(self._guard, STATUS.size)
        except OSError:
            status = b""
        if self._end is None:
            last = "" if self.is_killed else last_line(Path(self._start.errors))
            self._end = NoAnswerError(_exit_reason(status) + (f"; it last wrote: {last}" if last else ""))
            self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._end)


def _exit_reason(status: bytes) -> str:
    """Return how a process ended; `status` is the fork server's message, or empty if that server has ended."""
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


def _visible_gpus() -> list[str]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` names, or the indices of all GPUs if the variable is not set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(index) for index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
