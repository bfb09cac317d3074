"""Processes of a run: each is a Ray actor, called with a limit.

Calls go to actors as bytes. A process that died, hangs, or raised what the world did to it becomes a
`PartDiedError`, after which its keeper in `workers` starts another. What the user has to mend crosses as
`ConfigError`, and a mistake in our own code as `PartBugError`: both end the run.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Protocol, TypeVar

import ray
from ray.exceptions import OutOfMemoryError
from ray.exceptions import RayError as RayError  # also for others, who get it only after its variables are set
from ray.exceptions import RayTaskError as RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode
from laminar_py.records.protocols import StoreFullError
from laminar_py.runtime.cluster.errors import (
    PartBugError,
    PartDiedError,
    UnwritableError,
    bug_in,
    errors_in,
    for_memory,
    unwritable,
)
from laminar_py.runtime.cluster.placement import Place
from laminar_py.runtime.cluster.ray_thread import made, soon, tell

log = logging.getLogger(__name__)

T = TypeVar("T")
ANYWHERE = Place()
ENGINE_KILLED = "ended with code 137"  # as a shell says SIGKILL; `engines.sglang.server` says it of its server


class Part:
    """A running actor, e.g. `Part("replica-1", ReplicaActor, concurrency=64, timeout_s=30)` on any node.

    Others of the run find one that is `known_as` something by that name (`named`).
    """

    def __init__(
        self,
        name: str,
        kind: type,
        *,
        concurrency: int,
        timeout_s: float,
        place: Place = ANYWHERE,
        known_as: str = "",
    ) -> None:
        self.name = name
        self.place = place
        self._timeout_s = timeout_s
        self._bug: PartBugError | None = None  # in what was sent without waiting
        self._actor = start_actor(kind, concurrency=concurrency, place=place, known_as=known_as)

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """The result of an actor method. Raises PartDiedError if there is none in `timeout_s`, or it raised.

        Raises ConfigError where the user has to mend something: a model, a port, memory that only the part could
        see. Raises UnwritableError where a disk is full that the run needs, PartBugError for a mistake
        in our own code.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            reference = await made(self._ask_for, method, *arguments)
            async with asyncio.timeout(limit):
                answer = await asyncio.wrap_future(reference.future())
        except TimeoutError:
            self.kill()
            raise PartDiedError(self.name, f"no answer to {method} in {limit:g} s") from None
        except RayTaskError as error:
            self.kill()
            raise self._failure(method, error) from error
        except RayError as error:
            self.kill()
            raise PartDiedError(self.name, _reason(error), vanished="ray.kill" not in str(error)) from error
        if self._bug is not None:
            raise self._bug
        return answer

    async def ask(self, kind: type[T], method: str, *arguments: object, timeout_s: float | None = None) -> T:
        """`call` of a method that answers with the bytes of a typed record."""
        answer = await self.call(method, *arguments, timeout_s=timeout_s)
        assert isinstance(answer, bytes), f"{method} answers bytes"
        return decode(kind, answer)

    def send(self, method: str, *arguments: object) -> None:
        """Call without waiting; a death or a bug shows at the next `call`, what else it raised in the log."""
        tell(self._send, method, *arguments)

    def _send(self, method: str, *arguments: object) -> None:
        try:
            future = self._ask_for(method, *arguments).future()
        except RayError:
            return  # its creation failed, which the next `call` tells
        except Exception as error:
            self._bug = PartBugError(f"{self.name}: {type(error).__name__}: {error}")
            raise
        future.add_done_callback(lambda done: self._note_failure(method, done.exception()))

    def _ask_for(self, method: str, *arguments: object) -> "ray.ObjectRef":
        return getattr(self._actor.result(), method).remote(*arguments)

    def _note_failure(self, method: str, error: BaseException | None) -> None:
        if isinstance(error, RayTaskError) and isinstance(failure := self._failure(method, error), PartBugError):
            self._bug = failure

    def _failure(self, method: str, error: RayTaskError) -> Exception:
        """Meaning of a method's error for the run; its traceback goes into the log."""
        log.error("%s.%s raised %s", self.name, method, error)
        bug, causes = bug_in(error.cause), list(errors_in(error.cause))
        if bug is not None:
            return PartBugError(f"{self.name}: {type(bug).__name__}: {bug}")
        for cause in causes:
            if isinstance(cause, ConfigError):
                return ConfigError(str(cause))
            if not isinstance(cause, StoreFullError) and (reason := unwritable(cause)) is not None:
                return UnwritableError(f"{self.name}: {reason}")
        reason = f"{type(causes[0]).__name__}: {causes[0]}"
        told = f"out of memory in {method}: {reason}" if for_memory(reason) else reason
        return PartDiedError(self.name, told, vanished=ENGINE_KILLED in reason)

    def kill(self) -> None:
        """Have Ray end the process, after what it was asked for before."""
        tell(self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(RayError):
            ray.kill(self._actor.result())


class MakePart(Protocol):
    """Maker of a process; `Part` itself is one."""

    def __call__(self, name: str, kind: type, *, concurrency: int, timeout_s: float, place: Place) -> Part:
        """The running process."""
        ...


async def watched(work: Coroutine[object, object, T], watch: Coroutine[object, object, None]) -> T:
    """The result of `work`, which has no limit of its own; `watch` beside it never ends but by an error."""
    working, watching = asyncio.create_task(work, name="work"), asyncio.create_task(watch, name="watch")
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            watching.result()
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def start_actor(
    kind: type, *, concurrency: int, place: Place, known_as: str = ""
) -> "Future[ray.actor.ActorHandle]":
    """A process of a shell: no restarts by Ray (the supervisor restarts), no CPU reservation.

    On a named node it runs there or nowhere, and sees of its GPUs those that are its own.
    """

    def start() -> "ray.actor.ActorHandle":
        return (
            _ray_class(kind)
            .options(
                num_cpus=0,
                num_gpus=place.gpus,
                max_restarts=0,
                max_concurrency=concurrency,
                name=known_as or None,
                scheduling_strategy=(
                    NodeAffinitySchedulingStrategy(place.node, soft=False) if place.node else "DEFAULT"
                ),
            )
            .remote()
        )

    return soon(start)


@functools.cache
def _ray_class(kind: type) -> "ray.actor.ActorClass":
    """Ray's class of a shell, made once, since Ray sends every class that it is given to its nodes."""
    return ray.remote(kind)


def _reason(error: RayError) -> str:
    """The first sentence of what Ray says last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, OutOfMemoryError) or any("running low on memory" in line for line in lines):
        return "out of memory: Ray ended it as its node ran low"
    return lines[-1].split(". ")[0] if lines else type(error).__name__
