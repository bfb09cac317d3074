"""The replicas' processes: their start, their connections to the controller, and their restart.

Owned by the controller: its loop `dispatch` sends commands through here, and its loop `process_reports` gets the
reports. The trajectories of a crashed replica continue on others (law 1). A replica whose weights of a
version differ from the first replica's counts as crashed (law 3). Replicas join and leave while others run; no
number is used again. A replica that joins and does not start leaves again, and does not end the run.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.dispatcher import Throttle
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
from laminar_py.runtime.cluster.placement import NodeSlot, Plan
from laminar_py.runtime.link.hub import ReplicaConnection, ReplicaHub
from laminar_py.runtime.link.messages import Command, Follow, GiveUp, Stop, Submit
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import RETRY_S, Keeper
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.segments import RunSegments
from laminar_py.runtime.workers.shared import RankGpus, SharedReplicas
from laminar_py.runtime.workers.specs import ReplicaSpec, ReportPace

log = logging.getLogger(__name__)

START_S = 120.0  # for a replica to start, without the time of its engine
SPEED_S = 600.0  # to measure the speed of an engine, which waits for the first weights
ANSWER_S = 2.0  # shortest limit for an answer: a busy controller processes reports late
SCALED = "scaled"  # reason for leaving, in `ReplicaLeft`
REPORTS_PER_S, QUIET_PER_S = 2000.0, 200.0  # of all replicas together, within the limits below
MOST_GATHER_S, MOST_QUIET_S = 0.25, 5.0
CHECKSUMS_KEPT = 64


def pace_of(replicas: int, heartbeat_timeout_s: float) -> ReportPace:
    """Return how often each of so many replicas reports.

    All together report at most 2,000 times a second, and 200 times without news. News waits for a quarter of a
    second at most, so more than 500 replicas may report more often. No replica is quiet for so long that it counts
    as silent after `heartbeat_timeout_s`.
    """
    return ReportPace(
        gather_s=min(MOST_GATHER_S, max(GATHER_S, replicas / REPORTS_PER_S)),
        quiet_s=min(MOST_QUIET_S, heartbeat_timeout_s / 4, max(1.0, replicas / QUIET_PER_S)),
    )


class _LeftError(Exception):
    """A replica has left the fleet and gets no new process."""


class ReplicaKeeper(Keeper):
    """Keeps one replica alive: its process, and its connection to the controller.

    Each process gets a new label, for its segments and its connection, so the hub ignores late reports of an
    earlier process.
    """

    actor_class = "laminar_py.runtime.workers.processes.replica:ReplicaActor"
    concurrency = 16
    first_starts = 2  # a replica that joined a running fleet then leaves; any other ends the run
    memory_advice = "lower rollout.kv_capacity, rollout.max_batch or rollout.replicas"
    forgives_s = 3600.0

    def __init__(self, fleet: "Replicas", index: int) -> None:
        super().__init__(fleet.incarnation, f"replica-{index}")
        self.timeout_s = self._config.supervisor.heartbeat_timeout_s
        self.index = index
        self.connection: ReplicaConnection | None = None  # from the start of a process to its end
        self.relay = ""  # endpoint of the relay that the replica was last sent
        self.is_killed = False  # the process was ended on purpose, and is not replaced yet
        self.is_ending = False  # the replica leaves, and gets no other process
        self.label: str | None = None  # of the segments that the process writes
        self.shared_gpus: Sequence[RankGpus] = ()  # of learner ranks, which the started process uses
        self._fleet = fleet

    @property
    def in_flight(self) -> Collection[str]:
        """Ids of the trajectories that the scheduler has assigned to the replica."""
        return self._fleet.scheduler.views.by_index[self.index].in_flight

    def follow_gpus(self) -> None:
        """End the process on purpose if the replica's learner ranks have other GPUs than at its start."""
        if self.connection is not None and self.shared_gpus != self._fleet.shared.gpus_of(self.index):
            self.end()

    def end(self) -> None:
        """Kill the process on purpose, which does not count as a crash."""
        self.is_killed = True
        self.kill()

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the process's place; None if the plan has none yet. Raises `_LeftError` if the replica leaves."""
        if self.is_ending:
            raise _LeftError
        planned = self._placement.plan.replicas
        return [planned[self.index] if self.index < len(planned) else None]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Start the replica, on shared devices in the replicas' turn."""
        async with self._fleet.shared.starting(self.index):
            await self._start(parts)

    async def _start(self, parts: Sequence[Part]) -> None:
        """Attach the replica to a relay, open its connection, and start it with its first assignments."""
        fleet, config = self._fleet, self._fleet.config
        self._incarnation.stats.add_replica(self.index)
        self.relay = await fleet.relays.attach(self.index, parts[0].place)
        self.label = label = fleet.segments.new_label(f"replica-{self.index}")
        await self.close_connection()  # a failed start left it
        self.shared_gpus = fleet.shared.gpus_of(self.index)
        if any(rank.node != parts[0].place.node for rank in self.shared_gpus):  # a node died as it was spawned
            raise PartCrashedError(parts[0].name, "the learner has moved to other nodes")
        self.connection = fleet.hub.open(label, self.index)
        fleet.update_places()
        spec = ReplicaSpec(
            config=config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            label=label,
            index=self.index,
            model_dir=str(config.model.path),
            relay=self.relay,
            hub=fleet.hub.endpoint,
            pace=pace_of(len(self._placement.plan.replicas), config.supervisor.heartbeat_timeout_s),
            keys=fleet.relays.keys,
            assignments=fleet.scheduler.dispatcher.for_starting(self.index),
            probes=list(self._incarnation.inputs.probes),
            secret=config.rollout.engine.secret(),
            server=fleet.servers.get(self.index, ""),
            shared=self.index in fleet.shared,
            shared_gpus=",".join(rank.visible for rank in self.shared_gpus),
        )
        await parts[0].call("start", spec, timeout_s=START_S + config.rollout.engine.start_limit_s)

    async def watch(self, parts: Sequence[Part]) -> None:
        """Wait until a replica ends or its connection is lost. Raises PartCrashedError."""
        await watched(parts[0].call("ended", timeout_s=math.inf), self._watch_connection())

    async def clean_up(self, error: PartCrashedError) -> PartCrashedError | None:
        """Give the work of a crashed replica to others; return the crash if it counts against the run.

        A kill on purpose or a crash over a full disk does not count. Raises `_LeftError` if the replica leaves.
        """
        await self.close_connection()
        await self.take_over()
        self._incarnation.stats.next_report.set()  # `stop` may wait for the replica's trajectories
        on_purpose, leaves = self.is_killed, self._fleet.scheduler.views.by_index[self.index].leaving
        self.is_killed = False
        tolerated = leaves or StoreFullError.__name__ in error.reason
        if tolerated and not on_purpose:
            log.error("%s", error)
            self._incarnation.ledger.append(PartCrashed(error.part, error.reason))
        if leaves:
            raise _LeftError
        return None if on_purpose or tolerated else error

    async def wait_before_restart(self, failures: int) -> None:
        """Dispatch the replica's trajectories to others now; then wait as every part does."""
        self._fleet.dispatch_loop.run_now()
        await super().wait_before_restart(failures)

    async def take_over(self) -> None:
        """Queue the trajectories of a crashed replica for others, with all tokens in its segments and journals."""
        index, label, segments, scheduler = self.index, self.label, self._fleet.segments, self._fleet.scheduler
        self.label = None
        scheduler.views.retire(index)  # it gets no work while its journals are read
        if label is None:  # it crashed before it started
            await scheduler.incoming.on_replica_lost(index)
        else:
            salvage = await segments.salvage(label, scheduler.incoming.running_on(index))
            await scheduler.incoming.on_replica_lost(index, salvage.found)
            await segments.discard(salvage.journals)

    async def _watch_connection(self) -> None:
        """Start the hub's heartbeat check; raise PartCrashedError when the hub or a check gives the replica up."""
        assert self.connection is not None, "a started replica has a connection"
        self._fleet.hub.mark_started(self.connection)
        raise PartCrashedError(f"replica-{self.index}", await self.connection.lost)

    async def close_connection(self) -> None:
        """Close the connection, if any, after its last reports are processed."""
        connection, self.connection = self.connection, None
        if connection is not None:
            await self._fleet.hub.close(connection)


class Replicas:
    """Keeps the processes of all replicas alive, sends them commands, and passes their reports to `on_reports`.

    `dispatch_loop` sends assignments; a call of `on_reports` gets the reports that arrive together.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        relays: Relays,
        segments: RunSegments,
        dispatch_loop: Throttle,
        on_reports: Callable[[Sequence[tuple[ReplicaConnection, ReplicaReport]]], Awaitable[None]],
    ) -> None:
        self.incarnation = incarnation
        self.config = incarnation.config  # with the present size of the fleet
        self.scheduler = scheduler
        self.relays = relays
        self.segments = segments
        self.dispatch_loop = dispatch_loop
        self.servers = dict(enumerate(self.config.rollout.engine.servers))  # by replica: its URL
        self.left: dict[int, str] = {}  # replica that has left -> reason
        self._stats = incarnation.stats
        self._plan: Plan | None = None  # the plan that the scheduler knows
        self._on_reports = on_reports
        self.check: Callable[[ReplicaReport], None] = lambda report: None  # for alarms
        self._running_hub: ReplicaHub | None = None
        # (version, GPUs, whether it is quantised) -> checksum, its replica
        self._checksums: dict[tuple[int, int, bool], tuple[str, int]] = {}
        self._keepers = [ReplicaKeeper(self, index) for index in range(self.config.rollout.replicas)]
        self.shared = SharedReplicas(self._keepers, self.config, scheduler.state.live)
        self._joined: set[int] = set()  # replicas that joined the running fleet
        self._tasks: asyncio.TaskGroup | None = None  # group of the tasks that keep them

    def spawn(self) -> None:
        """Start all processes; `keep` starts the replicas in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Serve the hub and keep every replica alive until cancelled. Raises an ExceptionGroup."""
        placement = self.incarnation.placement
        here = placement.here.node if self.config.cluster.address is not None else None
        hub = self._running_hub = ReplicaHub(
            PeerServer(self.relays.keys, LOOPBACK if here is None else placement.ip(here)),
            on_reports=self._on_reports,
            heartbeat_timeout_s=self.config.supervisor.heartbeat_timeout_s,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for keeper in self._keepers:
                    tasks.create_task(self._keep(keeper), name=f"keep-replica-{keeper.index}")
                tasks.create_task(hub.run(), name="link")
        finally:
            hub.end()

    # ---- what the loops of the controller call

    def send_command(self, index: int, command: Command) -> None:
        """Send a command to a replica that runs or starts; drop a command for any other replica."""
        connection = self._keepers[index].connection
        if connection is not None:
            connection.send_command(command)

    def assign(self, index: int, assignments: Sequence[Assignment]) -> None:
        """Send assignments to a replica."""
        for assignment in assignments:
            self.send_command(index, Submit([assignment]))

    def is_killed(self, index: int) -> bool:
        """Return True if a replica's process was killed on purpose, and its keeper has not cleaned up yet."""
        return self._keepers[index].is_killed

    def check_weights(self, connection: ReplicaConnection, report: ReplicaReport) -> None:
        """Give a replica up if its weights differ from another's or its relay moved to another host.

        Otherwise send it the endpoint of its relay, if that has changed.
        """
        self.check(report)
        self._compare_weights(connection, report.loads)
        try:
            relay = self.relays.endpoint_for(connection.replica)
        except PartCrashedError as error:
            connection.lose(error.reason)
            return
        keeper = self._keepers[connection.replica]
        if relay != keeper.relay:
            keeper.relay = relay
            connection.send_command(Follow(relay))

    def _compare_weights(self, connection: ReplicaConnection, loads: Sequence[VersionLoaded]) -> None:
        """Give a replica up if a version's checksum differs from the first of equal layout and rounding."""
        for load in loads:
            if load.checksum is None:
                continue
            num_gpus = load.checksum.count("-") + 1
            key = (load.version, num_gpus, load.quantized)
            agreed, first = self._checksums.setdefault(key, (load.checksum, connection.replica))
            if agreed != load.checksum:
                connection.lose(f"its weights of version {load.version} differ from those of replica-{first}")
        for key in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[key]

    def update_places(self) -> None:
        """Send the scheduler, once for each plan, which replicas have a place."""
        plan = self.incarnation.placement.plan
        if plan is not self._plan:
            self._plan = plan
            self.scheduler.views.planned(place is not None for place in plan.replicas)

    # ---- the fleet

    def join(self, config: RunConfig) -> None:
        """Start a keeper for each replica that is new in the scheduler; `config` has the fleet's new size."""
        assert self._tasks is not None, "replicas join while others are kept"
        self.config = config
        for index in range(len(self._keepers), len(self.scheduler.views.by_index)):
            self._joined.add(index)
            self._keepers.append(ReplicaKeeper(self, index))
            self._tasks.create_task(self._keep(self._keepers[index]), name=f"keep-replica-{index}")

    def remove(self, index: int) -> None:
        """End a leaving replica that has no work left, without counting a crash."""
        assert self.scheduler.views.by_index[index].leaving, f"replica {index} is removed, but is not leaving"
        self._keepers[index].is_ending = True
        if self._keepers[index].parts:
            self._keepers[index].end()

    def is_ending(self, index: int) -> bool:
        """Return True if a replica has left, or its process is about to end."""
        return self._keepers[index].is_ending or index in self.left

    def has_process(self, index: int) -> bool:
        """Return True if a replica has a process."""
        return bool(self._keepers[index].parts)

    async def _keep(self, keeper: ReplicaKeeper) -> None:
        """Keep a replica alive until it has left, and record why it left. Raises RunFailedError, ConfigError.

        A replica that joined a running fleet and does not start leaves, instead of the error.
        """
        reason = SCALED
        try:
            await keeper.keep()
        except _LeftError:
            pass
        except (ConfigError, RunFailedError) as error:
            if keeper.has_served or keeper.index not in self._joined:
                raise
            log.error("replica %d did not start and is removed: %s", keeper.index, error)
            self.scheduler.leave(keeper.index)
            keeper.kill()
            await keeper.close_connection()
            await keeper.take_over()
            reason = str(error)
        self._stats.remove_replica(keeper.index)
        self.incarnation.ledger.append(ReplicaLeft(keeper.index, reason))
        self.left[keeper.index] = reason
        self.dispatch_loop.run_now()  # its trajectories wait for other replicas

    # ---- repacking

    async def speed(self) -> EngineSpeed:
        """Wait for a replica that is up, and return its engine's speed, which it knows or measures."""
        while True:
            for keeper in self._keepers:
                if keeper.is_up:
                    with suppress(PartCrashedError):
                        return await keeper.parts[0].call_for(EngineSpeed, "speed", timeout_s=SPEED_S)
            await asyncio.sleep(RETRY_S)  # all replicas are starting

    async def survey(self, replica: int) -> Survey | None:
        """Return a replica's trajectories and KV use; None if it ends or does not answer in `_answer_s`."""
        connection = self._keepers[replica].connection
        return None if connection is None else await connection.request_survey(within_s=self._answer_s)

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """Return True if a replica promises to keep `version` until these trajectories arrive; else False."""
        connection = self._keepers[replica].connection
        return connection is not None and await connection.expect(version, trajectory_ids, within_s=self._answer_s)

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """Have a replica abort these trajectories, which move to others, and report their tokens at once."""
        self.send_command(replica, GiveUp(list(trajectory_ids)))

    @property
    def _answer_s(self) -> float:
        """Limit in seconds for an answer: a silent replica must not delay the repacking of other replicas."""
        return max(ANSWER_S, self.config.repack.interval_s)

    # ---- their life

    async def stop(self, *, evaluations: bool) -> None:
        """Interrupt all training trajectories, and with `evaluations` also those; wait until no trajectory runs.

        By then partial responses have arrived, and evaluations without an interrupt have ended. A starting replica
        is killed and starts again, since it cannot report yet.
        """
        views = self.scheduler.views
        for keeper in self._keepers:
            if keeper.is_up:
                self.send_command(keeper.index, Stop(evaluations))
            elif keeper.parts:
                keeper.end()
        while views.in_flight:
            self._stats.next_report.clear()
            await self._stats.next_report.wait()

    def restart(self) -> None:
        """Kill all processes, so that their keepers start new ones, whose engines may serve older versions."""
        for keeper in self._keepers:
            if keeper.parts:
                self.scheduler.views.retire(keeper.index)
                keeper.end()

    @property
    def hub(self) -> ReplicaHub:
        """The controller's end of all connections, which `keep` makes."""
        assert self._running_hub is not None, "the hub does not exist before `keep`"
        return self._running_hub
