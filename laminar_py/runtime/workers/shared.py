"""Replicas on devices that they share with the learner: their turns, from the controller's side.

In the learner's turn no shared replica computes, and none starts. `control.lease` decides whose turn it is.
Shared GPUs belong to the learner's ranks: the cluster gives each rank its own, and the ranks say which. A learner
that restarts may get others; its replicas then get new processes, before the learner's turn ends.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from laminar_py.config.cluster import LeaseCache
from laminar_py.config.run import RunConfig
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.engine import PauseMode


class HeldConnection(Protocol):
    """A way to a replica; both calls return at once if its process ends."""

    async def hold(self, mode: PauseMode) -> None:
        """Return once the replica computes nothing."""
        ...

    async def unhold(self) -> None:
        """Return once the replica computes again."""
        ...


class RankGpus(NamedTuple):
    """The GPUs of a learner rank, e.g. `RankGpus("5a97e58a", "3")`."""

    node: str | None
    visible: str  # as CUDA_VISIBLE_DEVICES names them


class SharedKeeper(Protocol):
    """The part of a replica's keeper that `SharedReplicas` uses."""

    @property
    def connection(self) -> HeldConnection | None:
        """None: the replica has no process, or none that has connected."""
        ...

    @property
    def in_flight(self) -> Collection[str]:
        """Ids of the trajectories that the replica has."""
        ...

    def follow_gpus(self) -> None:
        """End the process on purpose if the replica's learner ranks have other GPUs than at its start."""
        ...


class SharedReplicas:
    """The replicas among `keepers` that share devices with the learner; see `control.lease.SharedFleet`."""

    def __init__(
        self, keepers: Sequence[SharedKeeper], config: RunConfig, live: Mapping[str, LiveTrajectory]
    ) -> None:
        on_cpus = config.cluster.share and not config.rollout.engine.devices
        self._keepers = keepers if on_cpus else keepers[: config.shared_replicas]  # cores: also replicas that join
        self._mode = PauseMode.IN_PLACE if config.lease_cache is LeaseCache.KEEP else PauseMode.RELEASE
        self._live = live
        self._num_gpus = config.rollout.engine.gpus  # of a replica
        self._rank_gpus: Callable[[], Sequence[RankGpus]] = tuple
        self._replicas_turn = asyncio.Event()  # set in the replicas' turn
        self._replicas_turn.set()
        self._num_starting = 0
        self._started = asyncio.Event()  # set, and replaced, after each start

    def await_learner(self, rank_gpus: Callable[[], Sequence[RankGpus]]) -> None:
        """Begin with the learner's turn: shared replicas start after it, on the GPUs of its ranks."""
        self._rank_gpus = rank_gpus
        self._replicas_turn.clear()

    def __contains__(self, index: int) -> bool:
        """Whether a replica shares devices."""
        return index < len(self._keepers)

    def gpus_of(self, index: int) -> Sequence[RankGpus]:
        """Return the present GPUs of the learner ranks that a replica uses; none if it shares no GPU."""
        if index not in self:
            return ()
        return self._rank_gpus()[index * self._num_gpus : (index + 1) * self._num_gpus]

    @asynccontextmanager
    async def starting(self, index: int) -> AsyncIterator[None]:
        """Start a replica in the body, once it is the replicas' turn, which does not end meanwhile."""
        if index not in self:  # on devices of its own
            yield
            return
        while not self._replicas_turn.is_set():
            await self._replicas_turn.wait()
        self._num_starting += 1
        try:
            yield
        finally:
            self._num_starting -= 1
            self._started.set()
            self._started = asyncio.Event()

    async def hold(self) -> None:
        """Stop all shared replicas, after a start that is under way; return once none computes."""
        self._replicas_turn.clear()
        while self._num_starting:
            await self._started.wait()
        await asyncio.gather(*(one.hold(self._mode) for one in self._connections()))

    async def release(self) -> None:
        """Let shared replicas compute and start; return once most released caches are complete.

        A replica whose learner ranks have other GPUs now gets a new process.
        """
        for keeper in self._keepers:
            keeper.follow_gpus()
        self._replicas_turn.set()
        await asyncio.gather(*(one.unhold() for one in self._connections()))

    def load(self) -> tuple[int, int]:
        """Return the trajectories on shared replicas, and the tokens of these so far."""
        names = [name for keeper in self._keepers for name in keeper.in_flight]
        return len(names), sum(self._live[name].length for name in names if name in self._live)

    def _connections(self) -> list[HeldConnection]:
        return [keeper.connection for keeper in self._keepers if keeper.connection is not None]
