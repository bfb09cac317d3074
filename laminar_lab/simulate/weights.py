"""Weights of a simulation: versions without bytes, and when each host's relay has them.

Made by `simulate.run`; the learner publishes, replicas load. A version travels by the tree that the config would
have, in the time of the cost model that chooses such trees (`relay.tree`).
"""

import asyncio
from collections.abc import Sequence

from laminar_py.config import RunConfig
from laminar_py.records.weights import PulledVersion, VersionLostError
from laminar_py.relay import Broadcast, Links, arrivals_s, choose_tree, grow_tree

PARAMETER_BYTES = 2  # in bf16
CHUNK_OVERHEAD_S = 2e-4  # of each hop, as `laminar relay plan` assumes


def version_bytes(num_parameters: int) -> int:
    """Bytes of a version."""
    return PARAMETER_BYTES * num_parameters


def host_arrivals_s(config: RunConfig, *, num_parameters: int) -> list[float]:
    """Seconds of the GPUs that a version takes from the learner's host to each host that has replicas."""
    simulation, relay = config.simulation, config.relay
    num_hosts = -(-config.rollout.replicas // simulation.replicas_per_host)
    if simulation.link_gbit_per_s is None:
        return [0.0] * num_hosts
    zones = [""] * (1 + num_hosts)  # the learner's host is the root
    links = Links(simulation.link_gbit_per_s * 1e9 / 8, CHUNK_OVERHEAD_S)
    broadcast = Broadcast(version_bytes(num_parameters))
    choice = choose_tree(relay.topology, fanout=relay.fanout, zones=zones, broadcast=broadcast, links=links)
    return arrivals_s(grow_tree(choice.shape, zones), zones, broadcast, links, chunk_bytes=choice.chunk_bytes)[1:]


class ModelledRelay:
    """Versions in the memory of one host: the newest few, and what its replicas hold."""

    def __init__(self, *, keep_versions: int) -> None:
        self.newest = -1
        self.holders: dict[int, int] = {}  # version that each replica has pulled last
        self._keep_versions = keep_versions
        self._news = asyncio.Event()

    def has(self, version: int) -> bool:
        """True where it can still be pulled here."""
        return version > self.newest - self._keep_versions or version in self.holders.values()

    def arrive(self, version: int) -> None:
        """Have a version now."""
        self.newest = version
        self._news.set()
        self._news = asyncio.Event()

    async def wait_newer(self, version: int) -> int:
        """The newest version, once it is above that."""
        while self.newest <= version:
            await self._news.wait()
        return self.newest


class PulledWeights:
    """Weights of one replica from the relay of its host, see `records.weights.WeightSource`."""

    def __init__(self, relay: ModelledRelay, replica: int) -> None:
        self._relay, self._replica = relay, replica

    async def latest(self) -> int:
        """The newest version; waits for the first."""
        return await self._relay.wait_newer(-1)

    async def wait_newer(self, version: int) -> int:
        """The newest version, once it is above that."""
        return await self._relay.wait_newer(version)

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Hold that version until the next pull. Raises `VersionLostError`."""
        newest = await self.latest()
        number = newest if version is None else version
        await self._relay.wait_newer(number - 1)  # it may be on its way to this host
        if not self._relay.has(number):
            raise VersionLostError(f"version {number} is not kept any more")
        self._relay.holders[self._replica] = number
        return PulledVersion(number, "", weights_digest(number))


class ModelledWeights:
    """Versions on their way to the relays; `arrivals_s` is the time to each host, in seconds of the run."""

    def __init__(self, arrivals_s: Sequence[float], *, replicas_per_host: int, keep_versions: int) -> None:
        self.root = ModelledRelay(keep_versions=keep_versions)
        self._per_host = replicas_per_host
        self._relays = [ModelledRelay(keep_versions=keep_versions) for _ in arrivals_s]
        self._reached: dict[float, list[ModelledRelay]] = {0.0: [self.root]}  # relays by the time that it takes
        for relay, arrival_s in zip(self._relays, arrivals_s, strict=True):
            self._reached.setdefault(arrival_s, []).append(relay)

    def publish(self, version: int, *, after_s: float) -> None:
        """Have it on the learner's host after so long, and later on the others."""
        loop = asyncio.get_running_loop()
        for arrival_s, relays in self._reached.items():
            loop.call_later(after_s + arrival_s, self._arrive, version, relays)

    def of(self, replica: int) -> PulledWeights:
        """Weights as a replica has them that starts."""
        return PulledWeights(self._relay_of(replica), replica)

    def forget(self, replica: int) -> None:
        """Hold nothing for a replica that has died."""
        self._relay_of(replica).holders.pop(replica, None)

    def _relay_of(self, replica: int) -> ModelledRelay:
        return self._relays[replica // self._per_host]

    def _arrive(self, version: int, relays: Sequence[ModelledRelay]) -> None:
        for relay in relays:
            relay.arrive(version)


def weights_digest(version: int) -> str:
    """Name of a version in the place of the digest of its bytes, of which there are none."""
    return f"v{version}"
