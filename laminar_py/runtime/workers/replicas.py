"""The replicas' processes: their start, their connections to the controller, and their restart.

Owned by the controller: its loop `issue` sends commands through here, and its loop `process_reports` gets the
reports. The trajectories of a crashed replica continue on others (law 1). A replica whose weights differ from
another's under the same version counts as crashed (law 3). Replicas join and leave while others run; a number is
never used again. A replica that joins and does not start leaves again, and does not end the run.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import msgspec

from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.dispatcher import Tick
from laminar_py.control.reports import HOST_LOST, REPLICA_CRASHED
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.engine import StoreFullError
from laminar_py.records.events import PartCrashed, ReplicaLeft, VersionLoaded
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.relay.sockets import PeerServer
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.outbox import GATHER_S
from laminar_py.runtime.cluster.backend import LOOPBACK
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.cluster.placement import Place, Plan
from laminar_py.runtime.link.hub import ReplicaConnection, ReplicaHub
from laminar_py.runtime.link.messages import Command, Follow, GiveUp, Stop, Submit
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import RETRY_S, Keeper, PartSpec, back_off
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.specs import ReplicaSpec, ReportPace

log = logging.getLogger(__name__)

START_S = 120.0  # for a replica to start, without the time of its engine
SPEED_S = 600.0  # to measure the speed of an engine, which waits for the first weights
ANSWER_S = 2.0  # least time for an answer: a busy controller takes reports in with delay
SCALED = "scaled"  # reason for leaving, in `ReplicaLeft`
FIRST_STARTS = 2  # failed first starts after which the run ends, or a joined replica leaves
FORGIVES_S = 3600.0  # a later crash for want of memory counts as a first one
REPORTS_PER_S, QUIET_PER_S = 2000.0, 200.0  # of all replicas together, within the limits below
MOST_GATHER_S, MOST_QUIET_S = 0.25, 5.0
CHECKSUMS_KEPT = 64


def pace_of(replicas: int, patience_s: float) -> ReportPace:
    """Return how often each of so many replicas reports.

    All together report at most 2,000 times a second, and 200 times without news. News waits for a quarter of a
    second at most, so more than 500 replicas may report more often. No replica is quiet for so long that it counts
    as silent after `patience_s`.
    """
    return ReportPace(
        gather_s=min(MOST_GATHER_S, max(GATHER_S, replicas / REPORTS_PER_S)),
        quiet_s=min(MOST_QUIET_S, patience_s / 4, max(1.0, replicas / QUIET_PER_S)),
    )


class _LeftError(Exception):
    """A replica has left the fleet and gets no other process."""


class Replicas:
    """Keeps the processes of all replicas alive, sends commands to them, and passes their reports on.

    `issuing` wakes the loop that sends assignments; `on_reports` is awaited with the reports that arrive together.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        relays: Relays,
        payload: PayloadHosts,
        issuing: Tick,
        on_reports: Callable[[Sequence[tuple[ReplicaConnection, ReplicaReport]]], Awaitable[None]],
    ) -> None:
        self._payload = payload
        self._labels: dict[int, str] = {}  # label of the segments that each replica writes
        self._incarnation = incarnation
        self._config = incarnation.config
        self._stats = incarnation.stats
        self._scheduler = scheduler
        self._relays = relays
        self._restarting: set[int] = set()  # replicas that were killed on purpose
        self._plan: Plan | None = None  # the plan that the scheduler knows
        self._issuing = issuing
        self._on_reports = on_reports
        self._running_hub: ReplicaHub | None = None
        self._connections: dict[int, ReplicaConnection] = {}  # to each replica from its start to its end
        self._relay_sent: dict[int, str] = {}  # endpoint of the relay that each replica was last sent
        self._checksums: dict[tuple[int, int], tuple[str, int]] = {}  # (version, GPUs) -> checksum, its replica
        self._keepers = [Keeper(self._spec(index), incarnation) for index in range(self._config.rollout.replicas)]
        self._servers = dict(enumerate(self._config.rollout.engine.servers))  # by replica: its URL
        self._unproven: set[int] = set()  # replicas that have joined and were never up
        self._ending: set[int] = set()  # replicas that leave and get no other process
        self.left: dict[int, str] = {}  # replica that has left -> reason
        self._tasks: asyncio.TaskGroup | None = None  # group of the tasks that keep them

    def spawn(self) -> None:
        """Start all processes; `keep` starts the replicas in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Keep every replica alive until cancelled. Raises RunFailedError, ConfigError."""
        placement = self._incarnation.placement
        here = placement.here.node if self._config.cluster.address is not None else None
        hub = self._running_hub = ReplicaHub(
            PeerServer(self._relays.keys, LOOPBACK if here is None else placement.ip(here)),
            on_reports=self._on_reports,
            patience_s=self._config.supervisor.heartbeat_timeout_s,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for index in range(len(self._keepers)):
                    tasks.create_task(self._keep(index), name=f"keep-replica-{index}")
                tasks.create_task(hub.run(), name="link")
        finally:
            hub.end()

    # ---- what the loops of the controller call

    def send_command(self, index: int, command: Command) -> None:
        """Send a command to a replica that runs or starts; for any other replica the command has no meaning."""
        connection = self._connections.get(index)
        if connection is not None:
            connection.send_command(command)

    def assign(self, index: int, assignments: Sequence[Assignment]) -> None:
        """Send assignments to a replica, with the stores of tokens that are on other hosts."""
        for located in self._with_stores(index, assignments):
            self.send_command(index, Submit([located]))

    def is_killed(self, index: int) -> bool:
        """Return True if a replica was killed on purpose: others continue its work from its segments."""
        return index in self._restarting

    def check_weights(self, connection: ReplicaConnection, report: ReplicaReport) -> None:
        """Lose a replica whose weights differ from another's, and send it the present address of its relay.

        A replica whose relay moved to another host is lost, too.
        """
        self._compare_weights(connection, report.loads)
        try:
            relay = self._relays.endpoint_for(connection.replica)
        except PartCrashedError as error:
            connection.lose(error.reason)
            return
        if relay != self._relay_sent[connection.replica]:
            self._relay_sent[connection.replica] = relay
            connection.send_command(Follow(relay))

    def _compare_weights(self, connection: ReplicaConnection, loads: Sequence[VersionLoaded]) -> None:
        """Lose a replica whose checksum of a version differs from the first one in the same layout."""
        for load in loads:
            if load.checksum is None:
                continue
            layout = load.checksum.count("-") + 1
            agreed, first = self._checksums.setdefault((load.version, layout), (load.checksum, connection.replica))
            if agreed != load.checksum:
                connection.lose(f"its weights of version {load.version} differ from those of replica-{first}")
        for key in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[key]

    def update_places(self) -> None:
        """Tell the scheduler which replicas have a place in the present plan."""
        plan = self._incarnation.placement.plan
        if plan is not self._plan:
            self._plan = plan
            self._scheduler.views.planned(place is not None for place in plan.replicas)

    def _with_stores(self, index: int, assignments: Sequence[Assignment]) -> list[Assignment]:
        """Return assignments with the stores of tokens that are on other hosts."""
        node = self._keepers[index].parts[0].place.node
        refs = [[tokens.at for tokens in assignment.tokens] for assignment in assignments]
        stores = [self._payload.stores_for(mine, node) for mine in refs]
        pairs = zip(assignments, stores, strict=True)
        return [msgspec.structs.replace(item, stores=of) if of else item for item, of in pairs]

    # ---- the fleet

    def join(self, config: RunConfig, servers: Mapping[int, str]) -> None:
        """Start to keep the replicas that are new to the scheduler, each attached to its server if it has one.

        `config` has the new size of the fleet.
        """
        assert self._tasks is not None, "replicas join while others are kept"
        self._config = config
        self._servers |= servers
        for index in range(len(self._keepers), len(self._scheduler.views.by_index)):
            self._unproven.add(index)
            self._keepers.append(Keeper(self._spec(index), self._incarnation))
            self._tasks.create_task(self._keep(index), name=f"keep-replica-{index}")

    def remove(self, index: int) -> None:
        """End a leaving replica that has no work left, without counting a crash."""
        assert self._scheduler.views.by_index[index].leaving, f"replica {index} was not to leave"
        self._ending.add(index)
        if self._keepers[index].parts:
            self._end(index)

    def is_ending(self, index: int) -> bool:
        """Return True if a replica has left, or its process is about to end."""
        return index in self._ending or index in self.left

    def has_process(self, index: int) -> bool:
        """Return True if a replica has a process."""
        return bool(self._keepers[index].parts)

    async def _keep(self, index: int) -> None:
        """Keep a replica alive until it has left. Raises RunFailedError or ConfigError if it ever was up."""
        reason = SCALED
        try:
            await self._keepers[index].call_with_restarts(partial(self._serve, index))
        except _LeftError:
            pass
        except (ConfigError, RunFailedError) as error:
            if index not in self._unproven:
                raise
            log.error("replica %d is taken out again: %s", index, error)
            self._scheduler.leave(index)
            self._keepers[index].kill()
            await self._take_over(index)
            reason = str(error)
        self._stats.remove_replica(index)
        self._incarnation.ledger.append(ReplicaLeft(index, reason))
        self.left[index] = reason
        self._issuing.run_now()  # its trajectories wait for others

    # ---- repacking

    async def speed(self) -> EngineSpeed:
        """Return the speed of the engines, as the first replica that is up measures it before it has work."""
        while True:
            for replica in range(len(self._keepers)):
                speed = await self._speed_of(replica)
                if speed is not None:
                    return speed
            await asyncio.sleep(RETRY_S)  # all are starting

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.ReplicaFleet.survey`."""
        connection = self._connections.get(replica)
        return None if connection is None else await connection.request_survey(within_s=self._answer_s)

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""
        connection = self._connections.get(replica)
        return connection is not None and await connection.expect(version, trajectory_ids, within_s=self._answer_s)

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        self.send_command(replica, GiveUp(list(trajectory_ids)))

    @property
    def _answer_s(self) -> float:
        """Time for an answer: a silent replica must not delay the repacking of the others."""
        return max(ANSWER_S, self._config.repack.interval_s)

    async def _speed_of(self, replica: int) -> EngineSpeed | None:
        """Return the speed of a replica's engine; None if the replica is not up or crashes meanwhile."""
        keeper = self._keepers[replica]
        if not keeper.is_up:
            return None
        try:
            return await keeper.parts[0].call_for(EngineSpeed, "speed", timeout_s=SPEED_S)
        except PartCrashedError:
            return None

    # ---- their life

    async def stop(self, *, evaluations: bool) -> None:
        """Interrupt all training, and with `evaluations` those too; return when no trajectory runs any more.

        By then partial responses have arrived, and evaluations that were not interrupted have ended. A replica
        that is starting is killed and starts again, since it cannot report yet.
        """
        views = self._scheduler.views
        for index, keeper in enumerate(self._keepers):
            if keeper.is_up:
                self.send_command(index, Stop(evaluations))
            elif keeper.parts:
                self._end(index)
        while views.in_flight:
            self._stats.next_report.clear()
            await self._stats.next_report.wait()

    def restart(self) -> None:
        """Replace all processes by fresh ones, whose engines may serve older versions."""
        for index, keeper in enumerate(self._keepers):
            if keeper.parts:
                self._scheduler.views.retire(index)
                self._end(index)

    def _end(self, index: int) -> None:
        """Kill a process on purpose, which does not count as a crash."""
        self._restarting.add(index)
        self._keepers[index].kill()

    def _spec(self, index: int) -> PartSpec:
        """Describe the process of a replica for its keeper."""
        return PartSpec(
            names=[f"replica-{index}"],
            actor_class="laminar_py.runtime.workers.processes.replica:ReplicaActor",
            concurrency=16,
            timeout_s=self._config.supervisor.heartbeat_timeout_s,
            places=lambda: [self._place(index)],
            start=partial(self._start, index),
            settle=partial(self._settle, index),
            rest=self._rest,
            first_starts=FIRST_STARTS,
            make=self._incarnation.kinds.replica,
            spares_memory="lower rollout.kv_capacity, rollout.max_batch or rollout.replicas",
            forgives_s=FORGIVES_S,
        )

    def _place(self, index: int) -> Place | None:
        if index in self._ending:
            raise _LeftError
        planned = self._incarnation.placement.plan.replicas
        return planned[index] if index < len(planned) else None  # no plan has it yet

    async def _settle(self, index: int, error: PartCrashedError) -> PartCrashedError | None:
        """Hand the work of a crashed replica to others; return the crash if it counts against the run.

        A crash on purpose or over a full disk does not count. A leaving replica has left: raises `_LeftError`.
        """
        await self._close_connection(index)
        await self._take_over(index)
        self._stats.next_report.set()  # `stop` may wait for its trajectories
        on_purpose, leaves = index in self._restarting, self._scheduler.views.by_index[index].leaving
        self._restarting.discard(index)
        tolerated = leaves or StoreFullError.__name__ in error.reason
        if tolerated and not on_purpose:
            log.error("%s", error)
            self._incarnation.ledger.append(PartCrashed(error.part, error.reason))
        if leaves:
            raise _LeftError
        return None if on_purpose or tolerated else error

    async def _take_over(self, index: int) -> None:
        """Queue the trajectories of a crashed replica for others, with all tokens in its segments and journals."""
        label, reports = self._labels.pop(index, None), self._scheduler.reports
        self._scheduler.views.retire(index)  # it gets no work while its journals are read
        if label is None:  # it crashed before it started
            await reports.on_replica_lost(index, reason=REPLICA_CRASHED)
        elif await self._payload.is_lost(label):
            await reports.on_replica_lost(index, reason=HOST_LOST)
            await self._payload.lose_host_of(label, self._scheduler)
        else:
            answer = await self._payload.salvage(label, reports.running_on(index))
            await reports.on_replica_lost(index, answer.found, reason=REPLICA_CRASHED)
            await self._payload.salvaged(label, answer)

    async def _rest(self, failures: int) -> None:
        self._issuing.run_now()
        await back_off(failures)

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        """Attach a replica to a relay, open its connection, and start it with the trajectories it continues.

        The new life gets a new label, so reports of the life before are ignored. Raises `PartCrashedError`.
        """
        self._stats.add_replica(index)
        relay = await self._relays.attach(index, parts[0].place)
        self._labels[index] = label = await self._payload.new_label(f"replica-{index}", parts[0].place.node)
        await self._close_connection(index)  # of a failed start
        self._connections[index], self._relay_sent[index] = self._hub.open(label, index), relay
        self.update_places()
        spec = ReplicaSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            label=label,
            store_key=self._payload.key,
            index=index,
            model_dir=str(self._config.model.path),
            relay=relay,
            hub=self._hub.endpoint,
            pace=pace_of(
                len(self._incarnation.placement.plan.replicas), self._config.supervisor.heartbeat_timeout_s
            ),
            public_key=self._relays.keys.public,
            secret_key=self._relays.keys.secret,
            assignments=self._with_stores(index, self._scheduler.dispatcher.for_starting(index)),
            secret=self._config.rollout.engine.secret(),
            server=self._servers.get(index, ""),
        )
        limit = START_S + self._config.rollout.engine.start_limit_s
        await parts[0].call("start", spec, timeout_s=limit)

    async def _serve(self, index: int, parts: Sequence[Part]) -> None:
        """Wait until a replica ends or its connection is lost. Raises PartCrashedError."""
        self._unproven.discard(index)
        await watched(parts[0].call("ended", timeout_s=math.inf), self._until_lost(index))

    async def _until_lost(self, index: int) -> None:
        """Wait until the connection of a started replica is lost, and raise PartCrashedError."""
        connection = self._connections[index]
        self._hub.mark_started(connection)
        raise PartCrashedError(f"replica-{index}", await connection.lost)

    async def _close_connection(self, index: int) -> None:
        """Close the connection to a replica, if there is one."""
        connection = self._connections.pop(index, None)
        if connection is not None:
            await self._hub.close(connection)

    @property
    def _hub(self) -> ReplicaHub:
        assert self._running_hub is not None, "there is a hub from `keep` on"
        return self._running_hub
