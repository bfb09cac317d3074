"""Parts: the processes of a run, called with a timeout.

Calls carry typed records or scalars. A call raises `PartCrashedError` if the process crashed, hangs, or raised an
error of its machine or data; the part's keeper in `workers` then starts another. A call raises `ConfigError` if
the user has to change a setting, and `PartBugError` for a mistake in this package: both end the run.
"""

import asyncio
import logging
import math
from collections.abc import Coroutine
from typing import TypeVar

from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode
from laminar_py.runtime.cluster.backend import Process, cluster
from laminar_py.runtime.cluster.calls import ActorClass, Failure, FailureKind, Raised, Scalar, as_scalar
from laminar_py.runtime.cluster.errors import (
    NoAnswerError,
    PartBugError,
    PartCrashedError,
    UnwritableError,
    says_out_of_memory,
)
from laminar_py.runtime.cluster.placement import NodeSlot

log = logging.getLogger(__name__)

T = TypeVar("T")
ANYWHERE = NodeSlot()


class Part:
    """A process of the run, e.g. `Part("replica-1", ReplicaActor, concurrency=64, timeout_s=30)` on any node."""

    def __init__(
        self, name: str, actor_class: ActorClass, *, concurrency: int, timeout_s: float, place: NodeSlot = ANYWHERE
    ) -> None:
        self.name = name
        self.place = place
        self._timeout_s = timeout_s
        self._bug: PartBugError | None = None  # raised by a call of `send`
        self._sending = set[asyncio.Task[Scalar]]()  # calls of `send`
        self._process: Process = cluster().start(actor_class, title=name, concurrency=concurrency, place=place)

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Scalar:
        """Call a method once the process is up, and return its answer. Any error also kills the process.

        Raises PartCrashedError after `timeout_s` or a crash; ConfigError if the user has to change a setting that
        only the part could check; UnwritableError if a disk is full; PartBugError for a mistake in this package.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        try:
            await self._process.ready()
            async with asyncio.timeout(limit):
                answer = await self._process.call(method, *map(as_scalar, arguments))
        except TimeoutError:
            self.kill()
            raise PartCrashedError(self.name, f"no answer to {method} in {limit:g} s") from None
        except NoAnswerError as error:
            self.kill()
            if self._bug is not None:
                raise self._bug from error
            raise PartCrashedError(self.name, str(error)) from error
        if isinstance(answer, Raised):
            self.kill()
            raise self._error(method, answer.failure)
        if self._bug is not None:
            raise self._bug
        value: Scalar = answer.value
        return value

    async def call_for(
        self, answer_type: type[T], method: str, *arguments: object, timeout_s: float | None = None
    ) -> T:
        """Call a method whose answer is a typed record, and decode the answer; errors as in `call`."""
        answer = await self.call(method, *arguments, timeout_s=timeout_s)
        assert isinstance(answer, bytes), f"{method} of {self.name} must return bytes"
        return decode(answer_type, answer)

    def send(self, method: str, *arguments: object) -> None:
        """Call a method without a wait for its end; if it fails, a later `call` raises the bug or the crash."""
        sending = asyncio.create_task(self.call(method, *arguments, timeout_s=math.inf), name=f"send-{method}")
        self._sending.add(sending)
        sending.add_done_callback(self._note_sent)

    def _note_sent(self, sending: "asyncio.Task[Scalar]") -> None:
        """Keep the bug of a finished `send` for the next `call`."""
        self._sending.discard(sending)
        error = None if sending.cancelled() else sending.exception()
        if isinstance(error, PartBugError):
            self._bug = error

    def _error(self, method: str, failure: Failure) -> Exception:
        """Log the traceback of a method's failure, and return the error to raise for it."""
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
                message = f"out of memory in {method}: {reason}" if says_out_of_memory(reason) else reason
                return PartCrashedError(self.name, message)

    def kill(self) -> None:
        """Have the process end; waiting calls raise PartCrashedError."""
        self._process.kill()


async def watched(work: Coroutine[object, object, T], watch: Coroutine[object, object, None]) -> T:
    """Return the result of `work`; if `watch`, which never returns, raises first, raise its error."""
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
