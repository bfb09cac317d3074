"""Calls between the controller and the processes of a run: frames on a stream, and the failures in answers.

A frame is a length (four bytes, little-endian) and a MessagePack record. A connection carries `Call` one way and
`Returned` or `Raised` the other way, in any order; numbers match answers to calls. Ray carries the same answers.
Law 7: arguments and answers are bytes or scalars, and nothing is pickled.
"""

import asyncio
import importlib
import inspect
import struct
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.engine import StoreFullError
from laminar_py.runtime.cluster.errors import ProcessLostError, RemoteCallError, bug_in, errors_in, unwritable

HEAD = struct.Struct("<I")
MAX_FRAME = 1 << 30  # bytes; the largest frames are a learner's requests of some megabytes

Scalar: TypeAlias = bytes | str | int | float | bool | None


class FailureKind(StrEnum):
    """What a failure means for the run."""

    BUG = "bug"  # a mistake in this package: the run ends
    USER = "user"  # the user has to mend a setting or the machine: the run ends
    UNWRITABLE = "unwritable"  # a disk is full or read-only: the run ends
    CRASH = "crash"  # the process is of no use: another takes its place


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An error in another process, e.g. `Failure(kind=FailureKind.BUG, reason="TypeError: x", traceback="")`."""

    kind: FailureKind
    reason: str
    traceback: str


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A method to call, e.g. `Call(7, "ping", [b"..."])`."""

    number: int
    method: str
    arguments: list[Any]  # scalars; MessagePack itself tells bytes from text


class Returned(msgspec.Struct, frozen=True, tag="returned"):
    """What a method returned."""

    number: int
    value: Any  # a scalar


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A method raised."""

    number: int
    failure: Failure


Answer: TypeAlias = Returned | Raised


def failure_of(error: BaseException) -> Failure:
    """The failure that an error, or a group of errors, is for the run."""
    text = "".join(traceback.format_exception(error))
    if (bug := bug_in(error)) is not None:
        return Failure(kind=FailureKind.BUG, reason=f"{type(bug).__name__}: {bug}", traceback=text)
    causes = list(errors_in(error))
    for cause in causes:
        if isinstance(cause, ConfigError):
            return Failure(kind=FailureKind.USER, reason=str(cause), traceback=text)
        if not isinstance(cause, StoreFullError) and (reason := unwritable(cause)) is not None:
            return Failure(kind=FailureKind.UNWRITABLE, reason=reason, traceback=text)
    first = causes[0]
    return Failure(kind=FailureKind.CRASH, reason=f"{type(first).__name__}: {first}", traceback=text)


def answer_of(function: Callable[..., Scalar], *arguments: Scalar) -> Answer:
    """Call a function; the answer says what it returned or raised."""
    try:
        return Returned(0, function(*arguments))
    except Exception as error:  # noqa: BLE001 - the caller judges it
        return Raised(0, failure_of(error))


def encode_answer(answer: Answer) -> bytes:
    """MessagePack bytes of an answer; of a value that is no scalar, or too large, those of a failure."""
    try:
        data = encode(answer)
        assert len(data) <= MAX_FRAME, f"an answer of {len(data)} bytes"
    except (TypeError, AssertionError) as error:
        return encode(Raised(answer.number, failure_of(error)))
    return data


def read_answer(data: bytes) -> Answer:
    """Decode an answer."""
    return decode(Answer, data)  # type: ignore[arg-type]


def value_of(answer: Answer) -> Scalar:
    """What a function on a node returned. Raises `RemoteCallError` where it raised."""
    if isinstance(answer, Raised):
        failure = answer.failure
        raise RemoteCallError(failure.reason, is_bug=failure.kind is FailureKind.BUG)
    value: Scalar = answer.value
    return value


def is_async(kind: type) -> bool:
    """True where a class has a coroutine method: all its methods then run on an event loop."""
    return any(inspect.iscoroutinefunction(method) for _, method in inspect.getmembers(kind, inspect.isfunction))


class Shell:
    """Hosts an object in its process: `await shell.answer("ping", b"...")`.

    Methods of a class with coroutines run on the event loop, those of another class on `concurrency` threads.
    """

    def __init__(self, kind: type, *, concurrency: int) -> None:
        self._part = kind()
        self._threads = None if is_async(kind) else ThreadPoolExecutor(concurrency, thread_name_prefix="calls")

    async def answer(self, number: int, method: str, *arguments: Scalar) -> Answer:
        """Call a method; the answer says what it returned or raised."""
        try:
            bound = getattr(self._part, method)
            if self._threads is None:
                value = bound(*arguments)
                value = await value if inspect.isawaitable(value) else value
            else:
                value = await asyncio.get_running_loop().run_in_executor(self._threads, bound, *arguments)
            answer = Returned(number, value)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller judges it
            return Raised(number, failure_of(error))
        return answer


class Refusal:
    """Stands for the shell of an object that could not be made: each call raises what its constructor raised."""

    def __init__(self, error: Exception) -> None:
        self._failure = failure_of(error)

    async def answer(self, number: int, method: str, *arguments: Scalar) -> Answer:
        """The failure."""
        return Raised(number, self._failure)


def set_title(title: str) -> None:
    """Name this process for `ps` and `top`, which show 15 characters."""
    Path("/proc/self/comm").write_text(title)


def load_class(module: str, name: str) -> type:
    """The class of that name."""
    found: object = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert isinstance(found, type), f"{module}.{name} is a class"
    return found


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame. Raises `asyncio.IncompleteReadError` or `OSError` where the connection ends."""
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    assert size <= MAX_FRAME, f"a frame of {size} bytes"
    return await reader.readexactly(size)


def write_frame(writer: asyncio.StreamWriter, record: object) -> None:
    """Queue a record; the transport sends it."""
    write_data(writer, encode(record))


def write_data(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Queue an encoded record."""
    assert len(data) <= MAX_FRAME, f"a frame of {len(data)} bytes"
    writer.write(HEAD.pack(len(data)) + data)


async def serve(shell: Shell | Refusal, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the calls of a connection until it ends."""
    calls = set[asyncio.Task[None]]()

    async def answer(call: Call) -> None:
        write_data(writer, encode_answer(await shell.answer(call.number, call.method, *call.arguments)))

    try:
        while True:
            task = asyncio.create_task(answer(decode(Call, await read_frame(reader))), name="call")
            calls.add(task)
            task.add_done_callback(calls.discard)
    except (asyncio.IncompleteReadError, OSError):
        writer.close()


class Caller:
    """The calling end of a connection: `await caller.ask("ping", b"...")`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = count()
        self._waiting = dict[int, asyncio.Future[Answer]]()
        self._end: ProcessLostError | None = None

    @property
    def is_closed(self) -> bool:
        """True once the connection has ended."""
        return self._end is not None

    async def run(self) -> None:
        """Take answers until the connection ends."""
        try:
            while True:
                answer = read_answer(await read_frame(self._reader))
                waiting = self._waiting.pop(answer.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, OSError):
            return

    def ask(self, method: str, *arguments: Scalar) -> asyncio.Future[Answer]:
        """Make a call; its answer. The future raises `ProcessLostError` where the process ends first."""
        answer = asyncio.get_running_loop().create_future()
        if self._end is not None:
            answer.set_exception(self._end)
        else:
            number = next(self._numbers)
            self._waiting[number] = answer
            write_frame(self._writer, Call(number, method, list(arguments)))
        return answer

    def close(self, error: ProcessLostError) -> None:
        """Close the connection; calls without an answer, and later ones, raise `error`."""
        self._end = error
        self._writer.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()
