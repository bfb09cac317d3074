"""Calls between the controller and the processes of a run: frames on a stream, and the failures in answers.

A frame is a length (four bytes, little-endian) and a MessagePack record. A connection carries `Call` one way and
`Returned` or `Raised` the other way, in any order; numbers match answers to calls. Ray carries the same answers.

Arguments and answers travel as scalars or as the bytes of a typed record, and nothing is pickled (law 7). The
annotations of a method say which records it takes: `Shell` decodes the arguments before the call, and encodes the
answer after it.
"""

import asyncio
import functools
import importlib
import inspect
import os
import struct
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, get_args, get_type_hints

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.engine import StoreFullError
from laminar_py.runtime.cluster.errors import bug_in, errors_in, why_unwritable

HEAD = struct.Struct("<I")
LOW_PRIORITY = 10  # niceness
MAX_FRAME = 1 << 30  # bytes; the largest frames are a learner's requests of some megabytes

Scalar: TypeAlias = bytes | str | int | float | bool | None
SCALARS = (bytes, str, int, float, bool, type(None))
ActorClass: TypeAlias = type | str
"""A class, or "module:Class" where the caller should not import the module, e.g. because it imports torch."""


class FailureKind(StrEnum):
    """Consequence of a failure for the run."""

    BUG = "bug"  # a mistake in this package: the run ends
    USER = "user"  # the user has to change a setting or the machine: the run ends
    UNWRITABLE = "unwritable"  # a disk is full or read-only: the run ends
    CRASH = "crash"  # the process is lost: another takes its place


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
    """A method returned a value."""

    number: int
    value: Any  # a scalar


class Raised(msgspec.Struct, frozen=True, tag="raised"):
    """A method raised."""

    number: int
    failure: Failure


Answer: TypeAlias = Returned | Raised


def failure_of(error: BaseException) -> Failure:
    """Return the failure that an error, or a group of errors, means for the run; a bug in a group comes first."""
    text = "".join(traceback.format_exception(error))
    if (bug := bug_in(error)) is not None:
        return Failure(kind=FailureKind.BUG, reason=f"{type(bug).__name__}: {bug}", traceback=text)
    causes = list(errors_in(error))
    for cause in causes:
        if isinstance(cause, ConfigError):
            return Failure(kind=FailureKind.USER, reason=str(cause), traceback=text)
        if not isinstance(cause, StoreFullError) and (reason := why_unwritable(cause)) is not None:
            return Failure(kind=FailureKind.UNWRITABLE, reason=reason, traceback=text)
    first = causes[0]
    return Failure(kind=FailureKind.CRASH, reason=f"{type(first).__name__}: {first}", traceback=text)


def encode_answer(answer: Answer) -> bytes:
    """Encode an answer; if its value is no scalar, or too large, encode a failure instead."""
    try:
        data = encode(answer)
        assert len(data) <= MAX_FRAME, f"an answer of {len(data)} bytes: above {MAX_FRAME}"
    except (TypeError, AssertionError) as error:
        return encode(Raised(answer.number, failure_of(error)))
    return data


def read_answer(data: bytes) -> Answer:
    """Decode an answer that `encode_answer` made."""
    return decode(Answer, data)  # type: ignore[arg-type]


def as_scalar(value: object) -> Scalar:
    """Return a scalar unchanged, and a record as MessagePack bytes."""
    return value if isinstance(value, SCALARS) else encode(value)


def decode_arguments(method: Callable[..., object], arguments: Sequence[Scalar]) -> list[object]:
    """Decode the arguments of a method: bytes become records where the annotation names a record type."""
    if not any(isinstance(argument, bytes) for argument in arguments):
        return list(arguments)
    kinds = _record_types(method)
    return [
        decode(kinds[place], argument) if isinstance(argument, bytes) and place in kinds else argument
        for place, argument in enumerate(arguments)
    ]


@functools.cache
def _record_types(method: Callable[..., object]) -> dict[int, type]:
    """Return the record type of each of a method's arguments, by place; omit those annotated as scalar."""
    hints = get_type_hints(method)
    names = enumerate(inspect.signature(method).parameters)
    kinds = {place: hints[name] for place, name in names if name in hints}
    return {place: kind for place, kind in kinds.items() if kind not in SCALARS and bytes not in get_args(kind)}


class Shell:
    """Makes an object of a class and calls it: `await Shell("module:Class").answer(7, "ping", b"...")`.

    If the class has coroutine methods, all methods run on the event loop; otherwise on `concurrency` threads.
    If the class cannot be imported, or its constructor raises, each call answers with that error.
    """

    def __init__(self, path: str, *, concurrency: int) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._object: object = None
        self._error: Exception | None = None
        try:
            actor_class = import_path(path)
            assert isinstance(actor_class, type), f"{path} is no class"
            methods = inspect.getmembers(actor_class, inspect.isfunction)
            if not any(inspect.iscoroutinefunction(method) for _, method in methods):
                self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="calls")
            self._object = actor_class()
        except Exception as error:  # noqa: BLE001 - each `answer` reports it
            self._error = error

    async def answer(self, number: int, method: str, *arguments: Scalar) -> Answer:
        """Call a method of the object; return its value or its error as the answer to call `number`."""
        try:
            if self._error is not None:
                raise self._error
            bound = getattr(self._object, method)
            if self._threads is None:
                value = bound(*decode_arguments(bound, arguments))
                value = as_scalar(await value if inspect.isawaitable(value) else value)
            else:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(self._threads, _call_method, bound, arguments)
            return Returned(number, value)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - the caller judges it
            return Raised(number, failure_of(error))


def _call_method(bound: Callable[..., object], arguments: Sequence[Scalar]) -> Scalar:
    return as_scalar(bound(*decode_arguments(bound, arguments)))


class FunctionCalls:
    """The object of a process that calls functions of this package, at a low priority."""

    def __init__(self) -> None:
        os.nice(LOW_PRIORITY)

    def call(self, path: str, *arguments: Scalar) -> object:
        """Call the function at "module:function"."""
        return import_path(path)(*arguments)


def path_of(target: Callable[..., object] | str) -> str:
    """Return the path of a class or function, e.g. "tests.cluster.test_part:Faulty"; return a path unchanged."""
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def import_path(path: str) -> Callable[..., object]:
    """Import and return the class or function at "module:name"."""
    module, _, name = path.partition(":")
    target: object = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    assert isinstance(target, type | FunctionType), f"{path} is no class or function"
    return target


def set_title(title: str) -> None:
    """Name this process for `ps` and `top`, which show 15 characters."""
    Path("/proc/self/comm").write_text(title)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame's record, encoded. Raises `IncompleteReadError`, `OSError` if the connection ends."""
    (size,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    assert size <= MAX_FRAME, f"a frame of {size} bytes: above {MAX_FRAME}"
    return await reader.readexactly(size)


def write_frame(writer: asyncio.StreamWriter, record: object) -> None:
    """Queue a record as a frame, which the transport sends."""
    write_data(writer, encode(record))


def write_data(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Queue an encoded record as a frame, which the transport sends."""
    assert len(data) <= MAX_FRAME, f"a frame of {len(data)} bytes: above {MAX_FRAME}"
    writer.write(HEAD.pack(len(data)) + data)


async def serve(shell: Shell, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer the calls that arrive over a connection, many at once, until the connection ends."""
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
