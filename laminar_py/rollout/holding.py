"""A stop of a replica while the learner computes on its device (`cluster.share`). Its requests wait meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable

from laminar_py.records.engine import InferenceEngine, PauseMode
from laminar_py.records.host import Clock
from laminar_py.rollout.running import StreamState
from laminar_py.rollout.streams import Streams

CONTINUE_S, LOOK_S = 60.0, 0.02  # longest wait until responses continue after a hold, and time between two looks


class Holding:
    """Holds and releases one replica; it keeps `weights_lock` in between, so that no weights are loaded."""

    def __init__(
        self,
        engine: InferenceEngine,
        streams: Streams,
        *,
        weights_lock: asyncio.Lock,
        load_due: Callable[[], Awaitable[None]],  # called with the lock
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._streams = streams
        self._lock, self._load_due = weights_lock, load_due
        self._clock = clock
        self._number = 0  # of calls so far; a hold that waits is void once there is a later one
        self._mode = PauseMode.IN_PLACE
        self._served_before = False
        self._since_s: float | None = None

    @property
    def is_held(self) -> bool:
        """Whether the replica stands."""
        return self._since_s is not None

    async def hold(self, mode: PauseMode) -> None:
        """Pause running requests by `mode`, and let none enter; wait first while weights are loaded.

        Raises `EngineLostError`; a lost engine computes nothing, and counts as held.
        """
        self._number += 1
        number = self._number
        await self._lock.acquire()
        if number != self._number:
            self._lock.release()
            return
        self._mode, self._since_s, self._served_before = mode, self._clock.now(), self._streams.serving.is_set()
        self._streams.serving.clear()
        await self._engine.pause(mode)

    async def release(self) -> None:
        """Load weights that are due, before caches are computed again, and compute.

        After a pause that gave up the caches return once half of the responses have new tokens.

        Raises `EngineLostError`.
        """
        self._number += 1
        since_s, self._since_s = self._since_s, None
        if since_s is None:
            return
        running = self._streams.running
        begun = {name: one for name, one in running.items() if one.first_token_s is not None}
        before = {name: one.length for name, one in begun.items() if one.state is StreamState.IN_ENGINE}
        try:
            self._streams.excuse(self._clock.now() - since_s)
            await self._load_due()
            await self._engine.resume()
            if self._served_before:
                self._streams.serving.set()
        finally:
            self._lock.release()
        if self._mode is PauseMode.IN_PLACE:
            return
        deadline = self._clock.now() + CONTINUE_S
        while not self.is_held and self._clock.now() < deadline:
            standing = sum(name in running and running[name].length == length for name, length in before.items())
            if 2 * standing <= len(before):
                return
            await asyncio.sleep(LOOK_S)
