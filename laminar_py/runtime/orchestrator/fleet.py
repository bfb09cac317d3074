"""The fleet of a running run: replicas join and leave until there are as many as the user wants.

Owned by `orchestrator.requests`, which takes the number that `laminar scale` asks for. The number is checked as a
setting, and the new fleet is recorded as `Scaled`. The scheduler's view and `Replicas.left` hold the state of a
replica:

    member  -> leaving  the fleet shrinks: the replica gets no new work
    leaving -> left     the replica has no trajectory, and its process ends; or it never started

A change of size loses no work (law 1). With `rollout.on_new_weights=drain`, trajectories of a leaving replica
finish there; else they continue on other replicas. Other replicas neither stop nor reload.
"""

import shutil
from collections.abc import Callable

from laminar_py.config.changes import scaled
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.dispatcher import Throttle
from laminar_py.control.live_settings import LiveSettings
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.events import Scaled
from laminar_py.runtime.orchestrator.scoring import Scoring, max_scored
from laminar_py.runtime.preflight.inputs import version_bytes
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.replicas import SCALED, Replicas


class ElasticFleet:
    """Changes the size of the fleet on request, and empties and ends leaving replicas."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        settings: LiveSettings,
        scheduler: TrajectoryScheduler,
        replicas: Replicas,
        scoring: Scoring,
        dispatch_loop: Throttle,
        show_line: Callable[[str], None],
    ) -> None:
        self._incarnation = incarnation
        self._settings = settings
        self._placement = incarnation.placement
        self._scheduler = scheduler
        self._views = scheduler.views
        self._replicas = replicas
        self._scoring = scoring
        self._dispatch_loop = dispatch_loop
        self._show_line = show_line

    @property
    def _members(self) -> list[int]:
        """Numbers of the replicas that stay."""
        return [index for index, view in self._views.by_index.items() if not view.leaving]

    async def resize(self, wanted: int) -> str:
        """Add or remove replicas until `wanted` stay; record it, and return a line about the change.

        Replicas without a process leave first, then the least busy ones. Raises `ConfigError`, e.g. without room.
        """
        config, before = scaled(self._settings.config, wanted), self._members
        joining = max(0, wanted - len(before))
        _check_room(config, joining)
        first = len(self._views.by_index)
        for index in range(first, first + joining):
            self._scheduler.views.join(index)
        for index in sorted(before, key=self._stay_key)[wanted:]:
            self._scheduler.leave(index)
        self._incarnation.ledger.append(Scaled(tuple(self._members)))
        self._settings.adopt(config)
        self._scoring.grow(max_scored(config, self._incarnation.inputs))
        await self._plan()
        self._replicas.join(self._settings.config)  # others may have changed meanwhile
        await self._incarnation.ledger.commit()
        placed = sum(self._placement.plan.replicas[index] is not None for index in self._members)
        rest = "" if placed == wanted else ", the others wait for a node that has room"
        return f"replicas {len(before)} -> {wanted}; {placed} have a place{rest}"

    def _stay_key(self, index: int) -> tuple[bool, int, int]:
        """Return a sort key: replicas with the smallest keys stay."""
        return (not self._replicas.has_process(index), -len(self._views.by_index[index].in_flight), index)

    async def _plan(self) -> None:
        """Place joined replicas, free the places of replicas that have left, and wake the dispatch loop."""
        await self._placement.scale(replicas=len(self._views.by_index), gone=frozenset(self._replicas.left))
        self._dispatch_loop.wake()

    async def end_leaving(self) -> None:
        """Show replicas that never started; take trajectories from leaving replicas, and end empty ones."""
        if left := self._replicas.left.keys() - self._placement.needs.gone:
            for index in left:
                if (reason := self._replicas.left[index]) != SCALED:
                    self._show_line(f"replica {index} did not start and is removed: {reason}")
            await self._plan()
        leaving = [
            view
            for index, view in self._views.by_index.items()
            if view.leaving and not self._replicas.is_ending(index)
        ]
        if leaving:
            self._dispatch_loop.run_now()  # assigns partial responses that only a leaving replica can continue
        drains = self._settings.config.rollout.on_new_weights is OnNewWeights.DRAIN
        for view in leaving:
            if view.in_flight and not drains:
                self._replicas.give_up(view.index, list(view.in_flight))
            elif not view.in_flight and not self._scheduler.moves.expected(view.index):
                self._replicas.remove(view.index)


def _check_room(config: RunConfig, joining: int) -> None:
    """Raise `ConfigError` if shared memory has no room for the versions of `joining` more replicas."""
    if config.cluster.address is not None:
        return
    shm, needed = config.relay.shm, joining * version_bytes(config)
    free = shutil.disk_usage(shm).free
    if needed > free:
        raise ConfigError(
            f"rollout.replicas={config.rollout.replicas}: the versions of {joining} further replicas need"
            f" {needed / 2**30:.2f} GiB, and relay.shm={shm} has {free / 2**30:.2f} GiB free; ask for fewer,"
            " or free memory with laminar clean"
        )
