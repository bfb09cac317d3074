"""Calls of environments, which are user code: each has a timeout, and its answer has a bounded size.

`environment.host` calls it. A method that is not `async` runs in a thread. Python cannot stop a thread whose call
overran its timeout. Once half of `at_once` threads hang, `watch` raises, and the run replaces the process.
"""

import asyncio
import inspect
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

from pydantic import ValidationError

from laminar_py.config.environment import EnvironmentConfig
from laminar_py.environment.protocol import Answer, Observation, Rewrite
from laminar_py.records.trajectory import DropReason

log = logging.getLogger(__name__)

WATCH_S = 0.5
DETAIL_CHARS = 400


class CallFailedError(Exception):
    """A call gave no usable answer; `reason` goes into the ledger. The message is cut to one line."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(" ".join(detail.split())[:DETAIL_CHARS])
        self.reason = reason


class ProcessSpentError(Exception):
    """The process must be replaced: its threads hang, or it uses more memory than allowed."""


class EnvironmentCalls:
    """Calls environments within the limits of a config, e.g. `await calls.answer(environment.step, "4")`."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.at_once)
        self.threads = ThreadPoolExecutor(2 * settings.at_once, thread_name_prefix="environment")
        self._hung = set[Future[Any]]()  # calls that overran their time and still hold a thread

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in one of `at_once` slots. Raises `CallFailedError` if it raises or times out."""
        async with self._slots:
            return await self._limited(function, *arguments)

    async def _limited(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the user, in a thread unless it is `async`, and return its result.

        Raises `CallFailedError` if it raises anything, or takes longer than `environment.timeout_s`.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s) as limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                return await self._in_thread(function, *arguments)
        except CallFailedError:  # one of our own environments gives the reason itself
            raise
        except (Exception, SystemExit) as error:  # user code may raise anything
            if isinstance(error, TimeoutError) and limit.expired():
                detail = f"{_name(function)} took longer than environment.timeout_s={self._settings.timeout_s:g}"
                raise CallFailedError(DropReason.ENVIRONMENT_TIMEOUT, detail) from None
            log.info("%s raised", _name(function), exc_info=True)
            detail = f"{_name(function)} raised {_describe(error)}"
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, detail) from error

    async def answer(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """Call a function that returns an `Answer`. Raises `CallFailedError`, also if the answer is too large."""
        answer = await self.call(function, *arguments)
        fault, most = "", self._settings.max_observation_bytes
        if not isinstance(answer, Answer):
            fault = f"a {type(answer).__name__}; return an Observation, a Rewrite, a TokenPrompt or End"
        try:
            if not fault and (size := _num_bytes(answer)) > most:
                fault = f"{size:,} bytes, above environment.max_observation_bytes={most:,}"
        except UnicodeEncodeError:
            fault = "a text that is no Unicode; decode bytes with errors='replace'"
        if fault:
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, f"{_name(function)} returned {fault}")
        return cast(Answer, answer)

    def close_environment(self, environment: object) -> None:
        """Start the `close` of an environment, if it has one, and log its errors.

        It does not wait for one of the `at_once` slots: calls in the slots may wait for resources that this
        environment releases.
        """
        close = getattr(environment, "close", None)
        if close is not None:
            task = asyncio.get_running_loop().create_task(self._limited(close), name="close-environment")
            task.add_done_callback(_log_failed_close)

    async def watch(self, seconds: float) -> None:
        """Check hung calls and memory of this process for `seconds`. Raises `ProcessSpentError` above a limit."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if len(self._hung) >= max(1, self._settings.at_once // 2):
                limit_s = f"environment.timeout_s={self._settings.timeout_s:g}"
                raise ProcessSpentError(f"{len(self._hung)} calls have not returned within {limit_s}")
            most = self._settings.memory_bytes
            if most is not None and (held := _resident_bytes()) > most:
                raise ProcessSpentError(f"the process has {held:,} bytes, above environment.memory_bytes={most:,}")
            await asyncio.sleep(WATCH_S)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function in a thread; if the caller gives up, count the thread as hung until it returns."""
        future = self.threads.submit(call_in_thread, function, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._hung.add(future)
                future.add_done_callback(self._hung.discard)
            raise


def call_in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function and return its result; in a thread, raise its `StopIteration` as `RuntimeError`."""
    try:
        return function(*arguments, **named)
    except StopIteration as error:  # asyncio futures cannot carry it, so the call would never return
        raise RuntimeError(f"StopIteration: {error}") from error


def _num_bytes(answer: Answer) -> int:
    """Count the bytes of an answer's texts; 0 without texts. Raises `UnicodeEncodeError` for invalid Unicode."""
    if isinstance(answer, Observation):
        return sum(len(text.encode()) for text in answer.messages)
    if isinstance(answer, Rewrite):
        return len(json.dumps([answer.turns, answer.tools], ensure_ascii=False).encode())
    return 0


def _describe(error: BaseException) -> str:
    """Return an error's type and message; of a pydantic error each field and fault, without its link to a page."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    return f"{error.title}: " + "; ".join(
        f"{'.'.join(map(str, fault['loc'][:1]))}: {fault['msg']}" for fault in faults
    )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _log_failed_close(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("close of an environment failed: %s", task.exception())


def _resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
