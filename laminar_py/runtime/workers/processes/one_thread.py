"""A thread on which a process computes. Used by the actors whose calls come on several.

Invariant: at most one piece of work runs at a time, and every one on the same thread. The allocator gives each
thread memory of its own and keeps it there, so a process that computes on six holds six times
what a step takes.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class OneThread:
    """E.g. `OneThread().run(lambda: part.step(request))`, from any thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute")

    def begin(self, work: Callable[[], None]) -> None:
        """Do work in the background, before all that is given later, which meets its error too."""
        self._executor.submit(work)

    def run(self, work: Callable[[], T]) -> T:
        """Do work after all that was given before, and return its result or raise its error."""
        return self._executor.submit(work).result()
