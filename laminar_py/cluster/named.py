"""Actors by name: processes of a run that others than the controller call, whichever process has the name now."""

import asyncio
import logging

import ray
from ray.exceptions import RayActorError

log = logging.getLogger(__name__)

RETRY_S = 0.2


class NamedActor:
    """An actor that its keeper starts anew under the same name, e.g. `NamedActor("math-3.1.environment-0")`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle: ray.actor.ActorHandle | None = None

    async def ask(self, method: str, data: bytes) -> bytes:
        """The answer of a method; one that dies over it is asked again once another is there."""
        while True:
            try:
                if self._handle is None:
                    self._handle = await asyncio.to_thread(ray.get_actor, self._name)
                answer = await getattr(self._handle, method).remote(data)
            except (RayActorError, ValueError) as error:  # it died, or none has the name yet
                log.info("%s is away: %s", self._name, type(error).__name__)
                self._handle = None
                await asyncio.sleep(RETRY_S)
            else:
                assert isinstance(answer, bytes), f"{method} answers bytes"
                return answer
