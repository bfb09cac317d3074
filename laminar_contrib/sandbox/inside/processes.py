"""Threads that stand for the processes of `multiprocessing` and `concurrent.futures`: a program is one process."""

import concurrent.futures
import concurrent.futures.process
import multiprocessing
import multiprocessing.dummy as threads
import multiprocessing.pool
import multiprocessing.queues as queues
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

AS_THEY_ARE = (
    *("Queue", "JoinableQueue", "Pipe"),
    *("Lock", "RLock", "Semaphore", "BoundedSemaphore", "Condition", "Event", "Barrier"),
)


class Process(threads.DummyProcess):
    """A thread with the constructor of `multiprocessing.Process`. Nothing ends it before its function returns."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        super().__init__(group, target, name, args, dict(kwargs or {}))
        self.daemon = bool(daemon)

    @property
    def pid(self) -> int | None:
        """Id of the thread, once it has started."""
        return self.native_id

    def terminate(self) -> None:
        """Let the thread run: no thread can be ended from outside."""

    kill = close = terminate


class Value(threads.Value):
    """A number that threads share."""

    def __init__(self, typecode: Any, value: Any = 0, lock: Any = True) -> None:
        super().__init__(typecode, value, lock)
        self._guard = threading.RLock()

    def get_lock(self) -> threading.RLock:
        """Return the lock with which a program changes the value."""
        return self._guard


class Array(list[Any]):
    """Numbers that threads share, from their values or their number."""

    def __init__(self, typecode: Any, values: int | Iterable[Any], *, lock: Any = True) -> None:
        super().__init__([0] * values if isinstance(values, int) else values)
        self._guard = threading.RLock()

    get_lock = Value.get_lock


class Manager:
    """Gives dicts, lists and locks of this process."""

    def __getattr__(self, name: str) -> Any:
        return Value if name == "Value" else Array if name == "Array" else getattr(threads, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Keep the objects."""


class Pool(multiprocessing.pool.ThreadPool):
    """A pool of threads with the constructor of `multiprocessing.Pool`."""

    def __init__(
        self,
        processes: int | None = None,
        initializer: Any = None,
        initargs: Any = (),
        maxtasksperchild: int | None = None,
        context: object = None,
    ) -> None:
        super().__init__(processes, initializer, initargs)


class ProcessPoolExecutor(concurrent.futures.ThreadPoolExecutor):
    """A thread pool with the constructor of the class that it replaces."""

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: object = None,
        initializer: Any = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
    ) -> None:
        super().__init__(max_workers, "", initializer, initargs)


def use_threads() -> None:
    """Replace the processes of the standard library by these threads, in this interpreter."""
    replaced = vars(multiprocessing)
    replaced.update({name: getattr(threads, name) for name in AS_THEY_ARE})
    replaced.update(Process=Process, Value=Value, Array=Array, Manager=Manager, Pool=Pool)
    replaced["SimpleQueue"] = lambda: queues.SimpleQueue(ctx=multiprocessing)
    for module in (multiprocessing, multiprocessing.pool):
        vars(module)["get_context"] = lambda method=None: multiprocessing
    for module in (concurrent.futures, concurrent.futures.process):
        vars(module)["ProcessPoolExecutor"] = ProcessPoolExecutor
