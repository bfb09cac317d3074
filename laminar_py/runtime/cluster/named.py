"""Actors by name: processes of a run that others than the controller call, whichever process has the name now."""

import asyncio
import logging

import ray
from ray.exceptions import RayError, RayTaskError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between look-ups of an actor that is away


class NamedActor:
    """An actor that its keeper starts anew under the same name, e.g. `NamedActor("math-3.1.environment-0")`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: ray.actor.ActorHandle | None = None
        self._looking = asyncio.Lock()  # one looks for all who wait

    async def ask(self, method: str, data: bytes) -> bytes:
        """The answer of a method; one that dies over it is asked again once another is there.

        Raises what the method raised.
        """
        while True:
            handle = await self._find()
            try:
                answer = await getattr(handle, method).remote(data)
            except RayTaskError:
                raise
            except RayError as error:  # the process, its node or its memory are gone
                self._lose(handle, error)
                await asyncio.sleep(FIRST_PAUSE_S)  # the dead one may still have the name
            else:
                assert isinstance(answer, bytes), f"{method} answers bytes"
                return answer

    async def _find(self) -> "ray.actor.ActorHandle":
        """The process that has the name, once one has it."""
        pause_s = FIRST_PAUSE_S
        async with self._looking:
            while self._handle is None:
                try:
                    self._handle = await asyncio.to_thread(ray.get_actor, self._name)
                except (RayError, ValueError):  # none has it yet
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            return self._handle

    def _lose(self, handle: "ray.actor.ActorHandle", error: RayError) -> None:
        if self._handle is handle:
            log.info("%s is away: %s", self._name, type(error).__name__)
            self._handle = None
