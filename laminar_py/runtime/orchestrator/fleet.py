"""The fleet while a run goes: which replicas join and leave, and where the work of a leaving replica moves.

Owned by the controller. `laminar scale` writes requests into the run's folder (`ledger.scaling`). Each request is
checked like a config, recorded as `Scaled`, and answered. States of a replica, which the scheduler's view and
`Replicas.left` hold:

    member  -> leaving  the fleet shrinks, or loses its server: the replica gets no new work
    leaving -> member   the fleet grows again before the replica is empty
    leaving -> left     the replica is empty: its work has ended there, or moved to others; or it never started

A change of size loses no work (law 1): trajectories of a leaving replica move to replicas of the same version with
room, by the moves of repacking, or end where they run. Other replicas neither stop nor reload.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from laminar_py.config.engine import BACKENDS
from laminar_py.config.loading import scaled
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.dispatcher import Tick
from laminar_py.control.drops import HOUSEKEEPING_S
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import max_groups
from laminar_py.ledger.scaling import ScaleAnswer, ScaleRequest, answer_request, read_request, refuse_request
from laminar_py.records.events import Scaled
from laminar_py.repack.migration import Migration
from laminar_py.repack.planner import plan_leaving
from laminar_py.runtime.orchestrator.scoring import Scoring, max_scored
from laminar_py.runtime.preflight.inputs import version_bytes
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.replicas import SCALED, Replicas

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Change of the fleet, e.g. `Change(stay=[0, 1], back=[], leave=[], join=4, servers=[])`."""

    stay: list[int]
    back: list[int]  # leaving ones that stay after all
    leave: list[int]
    join: int  # number of new ones
    servers: list[str]  # [join] URLs for the new ones; empty if the run starts its engines

    @property
    def is_none(self) -> bool:
        """True if all replicas stay and none joins."""
        return not (self.back or self.leave or self.join)


class ElasticFleet:
    """Changes the size of the fleet on request, and empties and ends leaving replicas."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        replicas: Replicas,
        migration: Migration,
        scoring: Scoring,
        issuing: Tick,
    ) -> None:
        self._incarnation = incarnation
        self._placement = incarnation.placement
        self._scheduler = scheduler
        self._views = scheduler.views
        self._replicas = replicas
        self._migration = migration
        self._scoring = scoring
        self._issuing = issuing
        self._config = incarnation.config  # with the present size of the fleet
        self._run = incarnation.run.path
        self._left: set[int] = set()  # replicas whose leave the user and the plan know
        self._servers = dict(enumerate(self._config.rollout.engine.servers))
        self._hosts = dict(enumerate(self._config.rollout.engine.hosts))
        self._planning = asyncio.Lock()
        self._repacks = self._config.repacks  # if not, it starts with the second replica

    async def run(self, *, show_line: Callable[[str], None]) -> None:
        """Serve requests until cancelled; refuse a request from before the start."""
        await asyncio.to_thread(refuse_request, self._run, "the run was started again meanwhile; ask once more")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end_leaving(tasks, show_line), name="end-leaving")
            while True:
                if (request := await asyncio.to_thread(read_request, self._run)) is not None:
                    answer = await self._serve(request)
                    show_line(answer.line)
                    await asyncio.to_thread(answer_request, self._run, request, answer)
                if self._config.repacks and not self._repacks:
                    self._repacks = True
                    tasks.create_task(self._repack(), name="repack")
                await asyncio.sleep(HOUSEKEEPING_S)

    async def close(self) -> None:
        """Refuse an open request, since the run ends."""
        await asyncio.to_thread(refuse_request, self._run, "the run ends; go on with it under --resume")

    @property
    def _members(self) -> list[int]:
        """Numbers of the replicas that stay."""
        return [index for index, view in self._views.by_index.items() if not view.leaving]

    @property
    def _leaving(self) -> list[int]:
        """Numbers of the replicas that leave and still have work, or are about to end."""
        views = self._views.by_index.items()
        return [index for index, view in views if view.leaving and index not in self._replicas.left]

    async def _repack(self) -> None:
        """Start to repack a fleet that began with one replica."""
        await self._migration.run(await self._replicas.speed())

    # ---- requests

    async def _serve(self, request: ScaleRequest) -> ScaleAnswer:
        """Check a request to change the fleet, carry it out, and return the answer for the user.

        A request that fails its checks changes nothing.
        """
        try:
            config = scaled(self._config, replicas=request.replicas, urls=request.urls)
            change = await self._checked(config)
        except ConfigError as error:
            return ScaleAnswer(False, str(error))
        except Exception:  # a failed check of a backend must not end the run
            log.exception("%s could not be checked", request)
            return ScaleAnswer(False, f"{request}: could not be checked; see logs/controller.log")
        before = len(self._members)
        if not change.is_none:
            await self._change(config, change)
        return ScaleAnswer(True, self._describe_change(before, change))

    async def _checked(self, config: RunConfig) -> Change:
        """Choose the change to the fleet of a config, and check its new replicas. Raises `ConfigError`.

        Chooses again if replicas have left during the check.
        """
        checked = self._choose(config)
        while True:
            await asyncio.to_thread(_check_new, config, checked)
            change = self._choose(config)
            if (change.join, change.servers) == (checked.join, checked.servers):
                return change
            checked = change

    def _choose(self, config: RunConfig) -> Change:
        """Choose the change to a config's fleet: replicas without a process leave first, then the least busy."""
        members = self._members
        may_return = [index for index in self._leaving if not self._replicas.is_ending(index)]
        wanted = [_plain(url) for url in config.rollout.engine.servers]
        if wanted:
            known = {index: _plain(url) for index, url in self._servers.items()}
            stay = [index for index in members if known[index] in wanted]
            back = [index for index in may_return if known[index] in wanted]
            there = {known[index] for index in (*stay, *back)}
            new = [url for url in config.rollout.engine.servers if _plain(url) not in there]
        else:
            most = config.rollout.replicas
            stay = sorted(members, key=self._worth)[:most]
            back = sorted(may_return, key=self._worth)[: most - len(stay)]
            new = []
        return Change(
            stay=sorted(stay),
            back=back,
            leave=[index for index in members if index not in stay],
            join=config.rollout.replicas - len(stay) - len(back),
            servers=new,
        )

    def _worth(self, index: int) -> tuple[bool, int, int]:
        """Return a sort key: replicas with the smallest keys stay."""
        return (not self._replicas.has_process(index), -len(self._views.by_index[index].in_flight), index)

    async def _change(self, config: RunConfig, change: Change) -> None:
        """Change the fleet, and record the change on disk before the request is answered."""
        first = len(self._views.by_index)
        joining = list(range(first, first + change.join))
        servers = dict(zip(joining, change.servers, strict=False))
        hosts = dict(zip(config.rollout.engine.servers, config.rollout.engine.hosts, strict=True))
        self._servers |= servers
        self._hosts |= {index: hosts[server] for index, server in servers.items()}
        self._config = config
        members = sorted([*change.stay, *change.back, *joining])
        urls = tuple(self._servers[index] for index in members) if self._servers else ()
        self._incarnation.ledger.append(Scaled(tuple(members), urls))
        for index in (*change.back, *joining):
            self._scheduler.join(index)
        for index in change.leave:
            self._scheduler.leave(index)
        self._scheduler.resize(capacity=max_groups(config))
        self._scoring.grow(max_scored(config, self._incarnation.inputs))
        await self._plan()
        self._replicas.join(config, servers)
        await self._incarnation.ledger.commit()

    async def _plan(self) -> None:
        """Make a plan with places for joined replicas and without places for replicas that have left."""
        async with self._planning:  # so that the last of two plans has the newest demand
            count = len(self._views.by_index)
            hosts = tuple(self._hosts[index] for index in range(count)) if self._hosts else ()
            needs = replace(
                self._placement.needs, replicas=count, gone=frozenset(self._replicas.left), hosts=hosts
            )
            await self._placement.scale(needs)
        self._issuing.wake()

    def _describe_change(self, before: int, change: Change) -> str:
        """Return a line on a change, e.g. "replicas 2 -> 6: 4 join; 6 have a place"."""
        places = self._placement.plan.replicas
        members = self._members
        placed = sum(places[index] is not None for index in members)
        words = [
            f"{count} {verb}" for count, verb in ((change.join, "join"), (len(change.back), "come back")) if count
        ]
        if change.leave:
            words.append(f"{len(change.leave)} leave as soon as what they have has moved or ended")
        more = "" if placed == len(members) else ", the others wait for a node that has room"
        done = ", ".join(words) or "nothing changes"
        return f"replicas {before} -> {len(members)}: {done}; {placed} have a place{more}"

    # ---- leaving replicas

    async def _end_leaving(self, moving: asyncio.TaskGroup, show_line: Callable[[str], None]) -> None:
        """Empty leaving replicas, end the empty ones, and report replicas that never started; until cancelled."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            if left := self._replicas.left.keys() - self._left:
                self._left |= left
                for index in left:
                    if (reason := self._replicas.left[index]) != SCALED:
                        show_line(f"replica {index} is taken out again: {reason}")
                await self._plan()
            leaving = [index for index in self._leaving if not self._replicas.is_ending(index)]
            if leaving:
                self._issuing.run_now()  # partial responses that only they can continue go to them first
            for index in leaving:
                if not self._views.by_index[index].in_flight and not self._scheduler.moves.expected(index):
                    self._replicas.remove(index)
            await self._empty(moving)

    async def _empty(self, moving: asyncio.TaskGroup) -> None:
        """Move the work of leaving replicas to others with room; one plan for each version."""
        drains = self._config.rollout.on_new_weights is OnNewWeights.DRAIN
        by_version: dict[int | None, list[int]] = {}
        for index in self._leaving:
            view = self._views.running(index)  # a replica that starts cannot answer
            if view is not None and view.in_flight and not self._replicas.is_ending(index):
                by_version.setdefault(view.version if drains else None, []).append(index)
        rooms = self._rooms(by_version)
        plans = (self._empty_all(version, by_version[version], room, moving) for version, room in rooms.items())
        await asyncio.gather(*plans)

    def _rooms(self, versions: Collection[int | None]) -> dict[int | None, dict[int, int]]:
        """Return version -> replica -> number of trajectories that it has room for, where there is any.

        None stands for any version. If versions are kept, trajectories on their way to a replica count as there.
        """
        rooms: dict[int | None, dict[int, int]] = {}
        if not versions:
            return rooms
        for view in map(self._views.by_index.__getitem__, self._members):
            if None in versions:
                version, free = None, view.admissible
            else:
                version, taken = view.version, len(view.in_flight) + self._scheduler.moves.num_expected(view.index)
                takes = view.in_flight and self._views.serves(view.index, version)
                free = self._config.rollout.max_batch - taken if takes else 0
            if version in versions and free > 0:
                rooms.setdefault(version, {})[view.index] = free
        return rooms

    async def _empty_all(
        self, version: int | None, leaving: Sequence[int], room: Mapping[int, int], moving: asyncio.TaskGroup
    ) -> None:
        """Move work of leaving replicas of one version, or of any, to the `room` of others."""
        asked = await asyncio.gather(*(self._replicas.survey(index) for index in leaving))
        surveys = [survey for survey in asked if survey is not None and version in (None, survey.version)]
        moves = plan_leaving(surveys, room=room, is_moving=self._scheduler.moves.is_open)
        if version is not None:
            await self._migration.carry_out(version, moves, moving)
            return
        sources: dict[int, list[str]] = {}
        for move in moves:
            sources.setdefault(move.source, []).append(move.trajectory_id)
        for index, trajectory_ids in sources.items():
            self._replicas.give_up(index, trajectory_ids)


def _check_new(config: RunConfig, change: Change) -> None:
    """Check new servers, and the room in shared memory for more replicas. Raises `ConfigError`."""
    rollout, shm = config.rollout, config.relay.shm
    if change.join and config.cluster.address is None:
        free, needed = shutil.disk_usage(shm).free, change.join * version_bytes(config)
        if needed > free:
            raise ConfigError(
                f"replicas={rollout.replicas}: {change.join} more may hold a weight version each,"
                f" {needed / 2**30:.2f} GiB, and relay.shm={shm} has {free / 2**30:.2f} free; ask for fewer, or"
                " free some (laminar clean)"
            )
    if change.servers:
        engine = rollout.engine.model_copy(update={"urls": tuple(change.servers)})
        new = rollout.model_copy(update={"engine": engine, "replicas": len(change.servers)})
        kind = engine.kind
        with BACKENDS.naming_package(kind):
            BACKENDS.get(kind).check_start(config.model_copy(update={"rollout": new}))


def _plain(url: str) -> str:
    return url.rstrip("/")
