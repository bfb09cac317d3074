"""Processes of a run: each is a Ray actor, called with a limit.

Calls go to actors as bytes; whatever goes wrong with one (its process died, it hangs, it raised) becomes one
`PartDiedError`, which the supervisor handles. Called by the keepers in `workers`.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.placement import Place
from laminar_py.config.section import ConfigError
from laminar_py.relay.store.version import NoRoomError

log = logging.getLogger(__name__)

T = TypeVar("T")
ANYWHERE = Place()


class Part:
    """A running actor, e.g. `Part("replica-1", ReplicaActor, concurrency=64, timeout_s=30)` on any node."""

    def __init__(
        self, name: str, kind: type, *, concurrency: int, timeout_s: float, place: Place = ANYWHERE
    ) -> None:
        self.name = name
        self.place = place
        self._timeout_s = timeout_s
        self._handle = remote(kind, concurrency=concurrency, place=place).remote()

    async def call(self, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """The result of an actor method.

        Raises PartDiedError if there is none in `timeout_s` or it raised; ConfigError where that was bad input.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        reference = getattr(self._handle, method).remote(*arguments)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.wrap_future(reference.future())
        except TimeoutError:
            self.kill()
            raise PartDiedError(self.name, f"no answer to {method} in {limit:g} s") from None
        except RayTaskError as error:
            self.kill()
            cause = _first(error.cause)
            log.error("%s.%s raised", self.name, method, exc_info=cause)
            # bad input that only the part could see: a model it cannot run, a port or memory it does not get
            if isinstance(cause, NoRoomError) or (isinstance(cause, ValueError) and method == "start"):
                raise ConfigError(str(cause)) from None
            raise PartDiedError(self.name, f"{type(cause).__name__}: {cause}") from error
        except RayError as error:
            self.kill()
            raise PartDiedError(self.name, _reason(error)) from error

    def send(self, method: str, *arguments: object) -> None:
        """Call without waiting; a death shows at the next `call`, what the method raised in the log."""
        future = getattr(self._handle, method).remote(*arguments).future()
        future.add_done_callback(lambda done: self._log_failure(method, done.exception()))

    def _log_failure(self, method: str, error: BaseException | None) -> None:
        if isinstance(error, RayTaskError):
            log.error("%s.%s raised", self.name, method, exc_info=error)

    def kill(self) -> None:
        """End its process."""
        with contextlib.suppress(RayError):
            ray.kill(self._handle)


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


def remote(kind: type, *, concurrency: int, place: Place) -> "ray.actor.ActorClass":
    """The Ray class of a shell: no restarts by Ray (the supervisor restarts), no CPU reservation.

    On a named node it runs there or nowhere, and sees of its GPUs those that are its own.
    """
    where = NodeAffinitySchedulingStrategy(place.node, soft=False) if place.node else "DEFAULT"
    return ray.remote(
        num_cpus=0,
        num_gpus=place.gpus,
        max_restarts=0,
        max_concurrency=concurrency,
        scheduling_strategy=where,
    )(kind)


def _first(error: BaseException) -> BaseException:
    """The first error inside a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: RayError) -> str:
    """The first sentence of what Ray says last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split(". ")[0] if lines else type(error).__name__
