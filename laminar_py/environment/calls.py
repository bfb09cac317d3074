"""Calls of environments, which are user code: each has a timeout, and each returned value is checked.

`environment.host` calls it. A method that is not `async` runs in a thread. Python cannot stop a thread whose call
overran its timeout. Once half of `at_once` threads hang, `watch` raises, and the run replaces the process.
"""

import asyncio
import inspect
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from typing import Any, TypeGuard

from laminar_py.config.environment import EnvironmentConfig
from laminar_py.environment.protocol import MOST_TOKENS, Answer, End, Observation, Rewrite, Role, TokenWords
from laminar_py.records.credit import MOST_ROLES, ROLE_CHARS
from laminar_py.records.trajectory import DropReason

log = logging.getLogger(__name__)

WATCH_S = 0.5
DETAIL_CHARS = 400
SHOWN_CHARS = 40  # of a refused value
SPEAKERS = ("system", "assistant", *Role)  # roles of messages in a `Rewrite`
LARGEST = 1e30  # reward: differences of rewards must stay finite in float32


class CallFailedError(Exception):
    """A call gave no usable answer; `reason` goes into the ledger."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(" ".join(detail.split())[:DETAIL_CHARS])
        self.reason = reason


class ProcessSpentError(Exception):
    """The process must be replaced: its threads hang, or it uses more memory than allowed."""


class EnvironmentCalls:
    """Calls environments within the limits of a config, e.g. `await calls.answer(environment.step, "4")`."""

    def __init__(self, settings: EnvironmentConfig) -> None:
        self._settings = settings
        self._room = asyncio.Semaphore(settings.at_once)
        self.threads = ThreadPoolExecutor(2 * settings.at_once, thread_name_prefix="environment")
        self._hung = 0  # threads whose call overran its time

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function and return its result. Raises `CallFailedError` if it raises or times out."""
        async with self._room:
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
            detail = f"{_name(function)} raised {type(error).__name__}: {error}"
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, detail) from error

    async def answer(self, function: Callable[..., Any], *arguments: Any) -> Answer:
        """Call a function that returns an `Answer`, and check it. Raises `CallFailedError`."""
        return self._check_answer(_name(function), await self.call(function, *arguments))

    def close_environment(self, environment: object) -> None:
        """Start the `close` of an environment, if it has one, and log its errors.

        It does not wait for a free place in `at_once`: calls that hold the places may wait for resources that this
        environment releases.
        """
        close = getattr(environment, "close", None)
        if close is not None:
            task = asyncio.get_running_loop().create_task(self._limited(close), name="close-environment")
            task.add_done_callback(_log_failed_close)

    async def watch(self, seconds: float) -> None:
        """Watch this process for `seconds`. Raises `ProcessSpentError` if it must be replaced."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._hung >= max(1, self._settings.at_once // 2):
                raise ProcessSpentError(f"{self._hung} calls hang; see environment.timeout_s")
            most = self._settings.memory_bytes
            if most is not None and (held := _resident_bytes()) > most:
                raise ProcessSpentError(f"it has {held:,} bytes, above environment.memory_bytes={most:,}")
            await asyncio.sleep(WATCH_S)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future = self.threads.submit(call_in_thread, function, *arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.running():
                self._hung += 1
                future.add_done_callback(lambda _: self._thread_returned())
            raise

    def _thread_returned(self) -> None:
        self._hung -= 1

    def _check_answer(self, name: str, returned: object) -> Answer:
        """Return an answer as one of our own types; `name` is the method that returned it.

        Raises `CallFailedError` if it is no valid answer.
        """
        fault = self._find_fault(returned)
        if fault:
            raise CallFailedError(DropReason.ENVIRONMENT_FAILED, f"{name} returned {fault}")
        if isinstance(returned, End):
            return _plain_end(returned)
        if isinstance(returned, Rewrite):
            return Rewrite(returned.messages, returned.tools, max_tokens=returned.max_tokens)
        if isinstance(returned, TokenWords):  # only our own environments return it
            return returned
        assert isinstance(returned, Observation), "what has no fault is an answer"
        role, most = Role(returned.role), returned.max_tokens
        return Observation(returned.texts, role=role, after=returned.after, max_tokens=most)

    def _find_fault(self, returned: object) -> str:
        """Describe the fault of an answer and its remedy; "" if it has none."""
        if isinstance(returned, End):
            return _fault_of_end(returned)
        if isinstance(returned, Observation | Rewrite | TokenWords) and not _is_limit(returned.max_tokens):
            most = returned.max_tokens
            shown = "(too many)" if _is_turn(most) else repr(most)[:SHOWN_CHARS]
            return (
                f"{type(returned).__name__} max_tokens={shown}; give a number from 1 to {MOST_TOKENS:,}, or None"
            )
        if isinstance(returned, Rewrite):
            return self._fault_of_rewrite(returned.messages, returned.tools)
        if isinstance(returned, TokenWords):
            return ""
        if not isinstance(returned, Observation):
            return f"a {type(returned).__name__}; return an Observation, a Rewrite or End"
        if returned.role not in tuple(Role):
            return f"an Observation of role {str(returned.role)[:SHOWN_CHARS]!r}; choose of {', '.join(Role)}"
        if returned.after is not None and not _is_turn(returned.after):
            return f"an Observation after={str(returned.after)[:SHOWN_CHARS]}; give a turn of the model, from 1 on"
        return self._fault_of_texts(returned.texts)

    def _fault_of_rewrite(self, messages: object, tools: object) -> str:
        """Say why a `Rewrite` of these is invalid, for the end of a sentence; "" if it is valid."""
        given = ((Role.USER, messages),) if isinstance(messages, str) else messages
        if not isinstance(given, tuple) or not isinstance(tools, tuple):
            return "a Rewrite whose messages or tools are no tuple; give a text, or a tuple of (role, text)"
        if not given or not all(isinstance(message, Mapping) or _is_pair(message) for message in given):
            return "a Rewrite without messages; give a text, or a tuple of (role, text)"
        turns = Rewrite(given).turns
        if unknown := [turn.get("role") for turn in turns if turn.get("role") not in SPEAKERS]:
            return f"a Rewrite of role {str(unknown[0])[:SHOWN_CHARS]!r}; choose of {', '.join(SPEAKERS)}"
        fault = self._fault_of_texts(tuple(turn.get("content") or "" for turn in turns))
        try:
            return fault or self._fault_of_texts(json.dumps([turns, tools]))
        except (TypeError, ValueError, RecursionError):
            return "a Rewrite of messages or tools that are no JSON"

    def _fault_of_texts(self, texts: object) -> str:
        """Say why an observation is no text or too large, for the end of a sentence; "" if it is valid."""
        given = (texts,) if isinstance(texts, str) else texts
        if not isinstance(given, tuple) or not all(isinstance(text, str) for text in given):
            return "texts that are no text; give a string, or a tuple of strings"
        most = self._settings.max_observation_bytes
        if sum(map(len, given)) > most:
            return f"{sum(map(len, given)):,} characters, above environment.max_observation_bytes={most:,}"
        try:
            num_bytes = sum(len(text.encode()) for text in given)
        except UnicodeEncodeError:
            return "a text that is no Unicode; decode bytes with errors='replace'"
        return f"{num_bytes:,} bytes, above environment.max_observation_bytes={most:,}" if num_bytes > most else ""


def call_in_thread(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a function and return its result, for use in a thread."""
    try:
        return function(*arguments, **named)
    except StopIteration as error:  # asyncio futures cannot carry it, so the call would never return
        raise RuntimeError(f"StopIteration: {error}") from error


def _fault_of_end(end: End) -> str:
    """Describe the fault of an end. Its reward is a number, None, or a number for each role."""
    if not isinstance(end.reward, Mapping):
        return "" if end.reward is None else _fault_of_reward(end.reward)
    if not isinstance(end.roles, tuple | list) or not all(map(_is_role, (*end.reward, *end.roles))):
        return f"End with rewards by role; name each role, and that of each turn, by up to {ROLE_CHARS} characters"
    if not 1 <= len(end.reward) <= MOST_ROLES:
        return f"End with rewards of {len(end.reward)} roles; give 1 to {MOST_ROLES}"
    return next(filter(None, map(_fault_of_reward, end.reward.values())), "")


def _fault_of_reward(reward: Any) -> str:
    if _is_number(reward) and abs(reward) <= LARGEST:
        return ""
    return f"End with reward {str(reward)[:SHOWN_CHARS]!r}; give a finite number or None"


def _plain_end(end: End) -> End:
    """Convert the numbers of a valid end to plain floats, and its roles to a tuple."""
    if isinstance(end.reward, Mapping):
        return End({role: float(one) for role, one in end.reward.items()}, roles=tuple(end.roles))
    return End(None if end.reward is None else float(end.reward))


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2


def _is_turn(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_limit(value: object) -> bool:
    return value is None or (_is_turn(value) and value <= MOST_TOKENS)


def _is_role(value: object) -> bool:
    return isinstance(value, str) and len(value) <= ROLE_CHARS and value.isprintable()


def _is_number(value: object) -> bool:
    try:
        return isinstance(value, Real) and math.isfinite(float(value))
    except OverflowError:
        return False


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _log_failed_close(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.warning("an environment did not close: %s", task.exception())


def _resident_bytes() -> int:
    """Return the resident memory of this process, shared pages included."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
