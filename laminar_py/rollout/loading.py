"""Loading of new weights into a replica's engine: pull from the relay, load, verify, report.

`rollout.replica` owns the `WeightLoader`. No request enters the engine during a load, and each load is in one
report (`tests/rollout/test_replica.py`).
"""

import logging
from collections.abc import Callable
from pathlib import Path

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import InferenceEngine, PauseMode
from laminar_py.records.replica import WeightLoad
from laminar_py.records.weights import PulledVersion, VersionLostError, WeightSource
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.streams import Streams

log = logging.getLogger(__name__)

PAUSES = {OnNewWeights.RETRACT: PauseMode.RETRACT, OnNewWeights.IN_PLACE: PauseMode.IN_PLACE}


class WeightLoader:
    """Loads versions from `weights` into `engine`, and hashes every `verify_every`-th there (0: none)."""

    def __init__(
        self, engine: InferenceEngine, weights: WeightSource, streams: Streams, out: Outbox, *, verify_every: int
    ) -> None:
        self.version = -1  # in use
        self._engine = engine
        self._weights = weights
        self._streams = streams
        self._out = out
        self._verify_every = verify_every
        self._next_verified = 0  # the first version from here on is hashed

    async def load(self, version: int | None) -> None:
        """Pull and load a version, or the newest for None, while nothing runs. Raises `VersionLostError`."""
        began = self._out.clock.now()
        self._streams.serving.clear()
        try:
            pulled = await self._weights.pull(version)
        except VersionLostError:
            if self.version >= 0:
                self._streams.serving.set()
            raise
        await self._install(pulled, began)

    async def swap(self, policy: OnNewWeights, *, may_swap: Callable[[], bool]) -> None:
        """Pull the newest version while trajectories generate, then load it and let them continue under it.

        After the pull it loads nothing if `may_swap()` is false.
        """
        began = self._out.clock.now()
        pulled = await self._weights.pull()
        if not may_swap():
            return  # a trajectory that arrived during the pull must end first
        self._streams.serving.clear()
        interrupted = await self._streams.interrupt() if policy is OnNewWeights.RESUME else []
        if policy is not OnNewWeights.RESUME:
            await self._engine.pause(PAUSES[policy])
        await self._install(pulled, began)
        await self._engine.resume()
        self._streams.resume_interrupted(interrupted)
        self._out.urgent.set()

    async def _install(self, pulled: PulledVersion, began: float) -> None:
        await self._engine.load_weights(Path(pulled.path), pulled.version)
        checksum = None
        if self._verify_every and pulled.version >= self._next_verified:
            checksum = await self._engine.checksum()
            self._next_verified = (pulled.version // self._verify_every + 1) * self._verify_every
        self.version = pulled.version
        self._streams.serving.set()
        elapsed = self._out.clock.now() - began
        self._out.loads.append(WeightLoad(pulled.version, pulled.digest, elapsed, checksum))
        log.info("replica %d serves version %d after %.3f s", self._out.index, pulled.version, elapsed)
