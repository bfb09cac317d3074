"""Weights of a simulation: versions without bytes, and when each host's relay has them.

Made by `simulate.run`. The learner publishes versions, and replicas load them. `step_time.host_arrivals_s`
computes how long a version travels to each host.
"""

import asyncio
from collections.abc import Sequence

from laminar_py.records.weights import PulledVersion, VersionLostError


class ModelledRelay:
    """Versions in the memory of one host: the newest versions, and versions that replicas of the host hold."""

    def __init__(self, *, keep_versions: int) -> None:
        self.newest = -1
        self.holders: dict[int, int] = {}  # version by replica: its last pull
        self._keep_versions = keep_versions
        self._news = asyncio.Event()

    def has_version(self, version: int) -> bool:
        """Return whether a replica can still pull a version here."""
        return version > self.newest - self._keep_versions or version in self.holders.values()

    def receive_version(self, version: int) -> None:
        """Store a version as the newest, and wake all waiters."""
        self.newest = version
        self._news.set()
        self._news = asyncio.Event()

    async def wait_newer(self, version: int) -> int:
        """Wait for a version above `version`; return the newest."""
        while self.newest <= version:
            await self._news.wait()
        return self.newest


class PulledWeights:
    """One replica's access to the relay of its host, see `records.weights.WeightSource`."""

    def __init__(self, relay: ModelledRelay, replica: int) -> None:
        self._relay, self._replica = relay, replica

    async def wait_newer(self, version: int) -> int:
        """Wait for a version above `version`; return the newest."""
        return await self._relay.wait_newer(version)

    async def pull(self, version: int | None = None, *, base: int = -1) -> PulledVersion:
        """Hold a version, by default the newest, until the next pull. Raises `VersionLostError`."""
        newest = await self.wait_newer(-1)
        number = newest if version is None else version
        await self._relay.wait_newer(number - 1)  # wait if the version is on its way to this host
        if not self._relay.has_version(number):
            raise VersionLostError(f"version {number} is not kept any more")
        self._relay.holders[self._replica] = number
        return PulledVersion(number, "", weights_digest(number))


class ModelledWeights:
    """Versions on their way to the relays, in seconds of the run.

    A version reaches the learner's host `publish_s` after its publish, and each host [H] `arrivals_s` later.
    """

    def __init__(
        self, arrivals_s: Sequence[float], *, publish_s: float, replicas_per_host: int, keep_versions: int
    ) -> None:
        self._publish_s = publish_s
        self.root = ModelledRelay(keep_versions=keep_versions)
        self._per_host = replicas_per_host
        self._relays = [ModelledRelay(keep_versions=keep_versions) for _ in arrivals_s]
        self._reached: dict[float, list[ModelledRelay]] = {0.0: [self.root]}  # relays by arrival time
        for relay, arrival_s in zip(self._relays, arrivals_s, strict=True):
            self._reached.setdefault(arrival_s, []).append(relay)

    def publish_version(self, version: int) -> None:
        """Deliver a version to the learner's host, and later to the other hosts."""
        loop = asyncio.get_running_loop()
        for arrival_s, relays in self._reached.items():
            loop.call_later(self._publish_s + arrival_s, self._arrive, version, relays)

    def weights_for(self, replica: int) -> PulledWeights:
        """Return the weight source of a starting replica."""
        return PulledWeights(self._relay_of(replica), replica)

    def forget_replica(self, replica: int) -> None:
        """Release the version of a crashed replica."""
        self._relay_of(replica).holders.pop(replica, None)

    def _relay_of(self, replica: int) -> ModelledRelay:
        return self._relays[replica // self._per_host]

    def _arrive(self, version: int, relays: Sequence[ModelledRelay]) -> None:
        for relay in relays:
            relay.receive_version(version)


def weights_digest(version: int) -> str:
    """Return a version's name in place of a digest, since a simulated version has no bytes."""
    return f"v{version}"
