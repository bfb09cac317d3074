"""A process that calls a reward function: `python -m laminar_py.reward.calls.child`, started by `calls.pool`.

It is a hosted process (`children.hosted`). The owner's first call is a `CallSpec`, answered by a `CallStarted`.
Each further call is a `ScoringRequest`, answered by a `CallAnswer`. A plain function runs in the main thread for
one response at a time, because Python delivers the timeout's signal only there. An `async` function runs for many
responses at a time.
"""

import asyncio
import inspect
import logging
import resource
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec

from laminar_py.children import kernel
from laminar_py.children.landlock import forbid_writes
from laminar_py.children.wire import CALL, call_frame, own_control, receive_call
from laminar_py.config.reward import REWARDS, TermConfig, read_term
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import Column, ColumnError
from laminar_py.records.scoring import ScoringRequest, TryAgainError
from laminar_py.reward.outcome import (
    GivenReward,
    Outcome,
    RewardFunction,
    check_reward,
    describe,
    error_place,
    failed,
    late,
    read_reward,
)

log = logging.getLogger(__name__)
GRACE_S = 3.0  # beyond the timeout that a process keeps itself
CALLS_AT_ONCE = 256  # of an `async` function in one process


class WriteFence(msgspec.Struct, frozen=True):
    """Where a function may not write, e.g. `WriteFence("runs", "/dev/shm")`: into runs and weights."""

    runs: str  # folder of runs
    shm: str  # `relay.shm`, below which hosts keep weights of runs

    def folders(self, term: TermConfig) -> list[Path]:
        """Return the closed folders. A term with `opens_shm` may write below `shm`."""
        runs = [path.parent for path in Path(self.runs).glob("*/config.yaml")]
        return runs if term.opens_shm else [*runs, Path(self.shm)]


class CallSpec(msgspec.Struct, frozen=True, kw_only=True):
    """First call to a process, with settings of its calls: `CallSpec(term=exact, timeout_s=10, folder=logs)`."""

    term: str  # settings of the term, as JSON
    timeout_s: float  # of a call, after which it fails
    folder: str  # of the process's logs
    columns: list[Column] = []  # that the algorithm needs besides a value
    env: dict[str, str] = {}  # variables it sees besides `hosted.INHERITED_VARIABLES`; not sent
    fence: WriteFence | None = None
    grace_s: float = GRACE_S  # beyond `timeout_s`, after which the owner kills a process with an unfinished call


class CallStarted(msgspec.Struct, frozen=True):
    """Answer to `CallSpec`: how many responses the function takes at a time, or a fault for the user."""

    concurrency: int = 1
    fault: str | None = None


class CallAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Answer to a `ScoringRequest`: its outcome, or the traceback of our own mistake."""

    outcome: Outcome | None
    bug: str = ""


def main() -> None:
    """Load the function that the first call names, and answer requests until the owner closes the socket."""
    kernel.end_with_parent()
    control = own_control()
    first = receive_call(control)
    if first is None:
        return
    number, body, _ = first
    spec = decode(CallSpec, body)
    try:
        function = _load(spec)
    except ConfigError as error:
        control.sendall(call_frame(number, encode(CallStarted(fault=str(error)))))
        return
    control.sendall(call_frame(number, encode(CallStarted(concurrency=function.concurrency))))
    if function.concurrency > 1:
        asyncio.run(_serve_many(function, control))
    else:
        _serve_each(function, control)


def _load(spec: CallSpec) -> "LimitedFunction":
    """Make the reward function of a term behind its fence, with the memory that it asks. Raises `ConfigError`."""
    term = read_term(spec.term)
    if spec.fence is not None and not forbid_writes(spec.fence.folders(term)):
        log.warning(
            "no Landlock on this host: %s may write into runs and read our environment variables", term.title
        )
    make = REWARDS.get(term.kind).make
    assert make is not None, f"{term.kind} is served by the scorer itself"
    with REWARDS.naming_package(term.kind):
        function = make(term)
    if term.memory_bytes is not None:
        kernel.limit(resource.RLIMIT_AS, term.memory_bytes)
    return LimitedFunction(function, timeout_s=spec.timeout_s, columns=spec.columns)


def _serve_each(function: "LimitedFunction", control: socket.socket) -> None:
    """Answer one request at a time until the owner closes the socket."""
    while (call := receive_call(control)) is not None:
        number, body, _ = call
        request = decode(ScoringRequest, body)
        try:
            answer = CallAnswer(function.call(request))
        except Exception:  # noqa: BLE001 - a mistake of ours: errors of the user's code are outcomes
            answer = CallAnswer(None, traceback.format_exc())
        control.sendall(call_frame(number, encode(answer)))


async def _serve_many(function: "LimitedFunction", control: socket.socket) -> None:
    """Answer many requests at the same time until the owner closes the socket."""
    reader, writer = await asyncio.open_connection(sock=control)

    async def answer(number: int, body: bytes) -> None:
        """Call the function for a request, and write the answer to call `number`."""
        try:
            answer = CallAnswer(await function.call_async(decode(ScoringRequest, body)))
        except Exception:  # noqa: BLE001 - a mistake of ours: what the user's code raises has an outcome
            answer = CallAnswer(None, traceback.format_exc())
        writer.write(call_frame(number, encode(answer)))

    running = set[asyncio.Task[None]]()
    while True:
        try:
            size, number = CALL.unpack(await reader.readexactly(CALL.size))
            task = asyncio.create_task(answer(number, await reader.readexactly(size)), name=f"call-{number}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        running.add(task)
        task.add_done_callback(running.discard)


class _OutOfTimeError(BaseException):
    """Raised inside a reward function at its timeout. `except Exception` in user code does not catch it."""


class LimitedFunction:
    """Calls `function` with a timeout of `timeout_s` seconds; it should give `columns` besides a value."""

    def __init__(self, function: RewardFunction, *, timeout_s: float, columns: Sequence[Column] = ()) -> None:
        called = (function, vars(type(function)).get("__call__"))
        self._function = function
        self._timeout_s = timeout_s
        self._columns = columns
        self.concurrency = CALLS_AT_ONCE if any(map(inspect.iscoroutinefunction, called)) else 1

    def call(self, request: ScoringRequest) -> Outcome:
        """Call the function for one response, and return its outcome. Only the main thread may call this."""
        start, raised = time.perf_counter(), True
        try:
            with _alarm(self._timeout_s):
                given = read_reward(self._function(request))
        except _OutOfTimeError as error:
            outcome = late(self._timeout_s, self._place(error))
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            outcome = self._failed(error)
        else:
            outcome, raised = self._checked(given, request), False
        return msgspec.structs.replace(outcome, elapsed_s=time.perf_counter() - start, raised=raised)

    async def call_async(self, request: ScoringRequest) -> Outcome:
        """Call an `async` function while other calls of it run, and return its outcome."""
        start, raised = time.perf_counter(), True
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                given = read_reward(await self._function(request))  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, a CancelledError too
            is_late = limit.expired()
            outcome = late(self._timeout_s, self._place(error.__cause__)) if is_late else self._failed(error)
        else:
            outcome, raised = self._checked(given, request), False
        return msgspec.structs.replace(outcome, elapsed_s=time.perf_counter() - start, raised=raised)

    def _checked(self, given: GivenReward, request: ScoringRequest) -> Outcome:
        """Check a reward that the function returned, and return its outcome."""
        try:
            return check_reward(given, self._columns, length=len(request.response_ids))
        except ColumnError as error:
            return failed(f"{error}{self._place(None)}")

    def _failed(self, error: BaseException) -> Outcome:
        """Return the outcome of a call that raised `error`."""
        return failed(f"{describe(error)}{self._place(error)}", transient=isinstance(error, TryAgainError))

    def _place(self, error: BaseException | None) -> str:
        """Return the place of an error in the user's code, e.g. " (at rewards.py:7)"."""
        return error_place(self._function, error, beyond=__file__)


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raise `_OutOfTimeError` in the body after `timeout_s` seconds."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    previous = signal.signal(signal.SIGALRM, ring)
    # An alarm that fires while the timer is being stopped is raised inside `finally`, so the caller sees it.
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


if __name__ == "__main__":
    main()
