"""Calls of Ray that may wait for its processes, made in a thread: an event loop would stand still with them.

It is one thread, so that Ray hears of calls in the order in which they were asked for: of a process, of calls on
it, of its end. It ends with this process, also where Ray has not answered it.
"""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from laminar_py.runtime.cluster.errors import RunFailedError

log = logging.getLogger(__name__)

T = TypeVar("T")
PATIENCE_S = 300.0  # for Ray to take a call, which takes it 0.3 ms

# bounded by what the run asks for: some calls for each of its processes
_asked: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
_beginning = threading.Lock()


def soon(call: Callable[..., T], *arguments: object) -> Future[T]:
    """The result of a call, made after all that were asked for before."""
    _begin()
    made: Future[T] = Future()
    _asked.put((made, functools.partial(call, *arguments)))
    return made


def tell(call: Callable[..., object], *arguments: object) -> None:
    """Make a call soon that nobody waits for; what it raises goes into the log."""
    soon(call, *arguments).add_done_callback(_log_failure)


async def made(call: Callable[..., T], *arguments: object) -> T:
    """The result of a call, made soon. Raises RunFailedError where Ray takes no calls any more."""
    try:
        async with asyncio.timeout(PATIENCE_S) as limit:
            return await asyncio.wrap_future(soon(call, *arguments))
    except TimeoutError:
        if not limit.expired():
            raise  # the call's own
        raise RunFailedError(f"Ray has taken no call in {PATIENCE_S:g} s; see its logs, and --resume") from None


def drain() -> None:
    """Wait until all calls are made, or forget them: one that is made after Ray's end would start it again."""
    try:
        soon(lambda: None).result(PATIENCE_S)
    except TimeoutError:
        log.error("Ray has taken no call in %g s; it is ended all the same", PATIENCE_S)
        while not _asked.empty():
            _asked.get()[0].cancel()


def _begin() -> None:
    with _beginning:
        _start_thread()


@functools.cache
def _start_thread() -> None:
    threading.Thread(target=_make_calls, name="ray", daemon=True).start()


def _make_calls() -> None:
    while True:
        future, call = _asked.get()
        if not future.set_running_or_notify_cancel():
            continue  # nobody waits for it any more
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - it is the future's
            future.set_exception(error)
        else:
            future.set_result(result)


def _log_failure(done: "Future[object]") -> None:
    if (error := done.exception()) is not None:
        log.error("a call of Ray failed: %s", error, exc_info=error)
