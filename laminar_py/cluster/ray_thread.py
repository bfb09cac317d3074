"""Calls of Ray that may wait for its processes, in a thread: a loop that made them would stand still with them.

It is one thread, so that Ray hears of them in the order in which they are made: of a process before the calls on
it, of its end after them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="ray")


def soon(call: Callable[..., T], *arguments: object) -> Future[T]:
    """The result of a call, made after all that were asked for before."""
    return _THREAD.submit(call, *arguments)


def drain() -> None:
    """Wait until all calls that were asked for are made; one made after Ray's end would start it again."""
    soon(lambda: None).result()
