"""Parts: the processes of a run, called with a limit.

Calls carry bytes or scalars. A process that died, hangs, or raised what the world did to it becomes a
`PartDiedError`, after which its keeper in `workers` starts another. What the user has to mend crosses as
`ConfigError`, and a mistake in our own code as `PartBugError`: both end the run.
"""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Protocol, TypeVar

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.backend import Process, cluster
from laminar_py.runtime.cluster.calls import Answer, Failure, FailureKind, Raised, Scalar
from laminar_py.runtime.cluster.errors import (
    PartBugError,
    PartDiedError,
    ProcessLostError,
    UnwritableError,
    for_memory,
)
from laminar_py.runtime.cluster.placement import Place

log = logging.getLogger(__name__)

T = TypeVar("T")
ANYWHERE = Place()
ENGINE_KILLED = "ended with code 137"  # as a shell says SIGKILL; `engines.sglang.server` says it of its server


class Part:
    """A process of the run, e.g. `Part("replica-1", ReplicaActor, concurrency=64, timeout_s=30)` on any node.

    Others of the run find one that is `known_as` something by that name (`backend.NamedPart`).
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
        self._bug: PartBugError | None = None  # in a call that nobody waits for
        self._process: Process = cluster().start(
            kind, title=name, concurrency=concurrency, place=place, known_as=known_as
        )

    async def call(self, method: str, *arguments: Scalar, timeout_s: float | None = None) -> Scalar:
        """The result of a method. Raises PartDiedError if there is none in `timeout_s`, or it raised.

        Raises ConfigError where the user has to mend something: a model, a port, memory that only the part could
        see. Raises UnwritableError where a disk is full that the run needs, PartBugError for a mistake
        in our own code.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            asked = await asyncio.wrap_future(self._process.ask(method, *arguments))
            async with asyncio.timeout(limit):
                answer = await asyncio.wrap_future(asked)
        except TimeoutError:
            self.kill()
            raise PartDiedError(self.name, f"no answer to {method} in {limit:g} s") from None
        except ProcessLostError as error:
            self.kill()
            raise PartDiedError(self.name, str(error), vanished=not error.ended_by_run) from error
        if isinstance(answer, Raised):
            self.kill()
            raise self._error(method, answer.failure)
        if self._bug is not None:
            raise self._bug
        value: Scalar = answer.value
        return value

    async def ask(self, kind: type[T], method: str, *arguments: Scalar, timeout_s: float | None = None) -> T:
        """`call` of a method that answers with the bytes of a typed record."""
        answer = await self.call(method, *arguments, timeout_s=timeout_s)
        assert isinstance(answer, bytes), f"{method} answers bytes"
        return decode(kind, answer)

    def send(self, method: str, *arguments: Scalar) -> None:
        """Call without waiting; a death or a bug shows at the next `call`, another error in the log."""

        def answered(done: "Future[Answer]") -> None:
            if not done.cancelled() and done.exception() is None and isinstance(answer := done.result(), Raised):
                error = self._error(method, answer.failure)
                self._bug = error if isinstance(error, PartBugError) else self._bug

        def asked(done: "Future[Future[Answer]]") -> None:
            if not done.cancelled() and done.exception() is None:
                done.result().add_done_callback(answered)

        self._process.ask(method, *arguments).add_done_callback(asked)

    def _error(self, method: str, failure: Failure) -> Exception:
        """Meaning of a method's failure for the run; its traceback goes into the log."""
        log.error("%s.%s raised %s", self.name, method, failure.traceback)
        reason = failure.reason
        match failure.kind:
            case FailureKind.BUG:
                return PartBugError(f"{self.name}: {reason}")
            case FailureKind.USER:
                return ConfigError(reason)
            case FailureKind.UNWRITABLE:
                return UnwritableError(f"{self.name}: {reason}")
            case FailureKind.CRASH:
                told = f"out of memory in {method}: {reason}" if for_memory(reason) else reason
                return PartDiedError(self.name, told, vanished=ENGINE_KILLED in reason)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


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
