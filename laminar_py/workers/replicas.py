"""The replicas' processes: reports in, assignments out, revival with what they had. Owned by the controller.

Reports come in over the link at any rate. One that may leave its replica without work is answered at once, all
others of `DISPATCH_S` together. Ray starts a process and tells of its end, and nothing in between.
Invariant: what a replica had when it died goes on elsewhere (law 1), and one whose weights differ from another's
under the same version counts as dead (law 3).
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial

import msgspec

from laminar_py.cluster.errors import PartDiedError
from laminar_py.cluster.part import Part, watched
from laminar_py.cluster.placement import Plan
from laminar_py.cluster.ray_cluster import LOOPBACK
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.link.hub import Line, ReplicaHub
from laminar_py.link.messages import Abort, CallOff, Follow, GiveUp, Order, Stop, Submit
from laminar_py.records.codec import encode
from laminar_py.records.events import PartDied
from laminar_py.records.replica import Assignment, ReplicaReport, Survey, WeightLoad
from laminar_py.relay.wire.post import Post
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.outbox import GATHER_S
from laminar_py.rollout.storing import StoreFullError
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.keeper import RETRY_S, Keeper, MakePart, PartSpec, back_off
from laminar_py.workers.payload import PayloadHosts
from laminar_py.workers.processes.replica import ReplicaActor
from laminar_py.workers.relays import Relays
from laminar_py.workers.specs import ReplicaSpec, ReportPace
from laminar_py.workers.tick import Tick

log = logging.getLogger(__name__)

DISPATCH_S = 0.02  # in which reports are answered together; a fifth of what a replica lets its news gather
REPORTS_PER_S, QUIET_PER_S = 2000.0, 200.0  # of all replicas together, as far as a replica may be kept waiting
MOST_GATHER_S, MOST_QUIET_S = 0.25, 5.0
START_S = 120.0  # of a replica, its engine apart
SPEED_S = 600.0  # of its measurement, which also waits for the first weights
CHECKSUMS_KEPT = 64
REPLICA_DIED, HOST_LOST = "replica_died", "host_lost"  # reasons of an interruption
FIRST_STARTS = 2  # that may fail before the run does
FORGIVES_S = 3600.0  # one of many loses little, and other work comes to it


class Replicas:
    """Processes of the rollout replicas, and what goes between them and the scheduler."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        relays: Relays,
        payload: PayloadHosts,
        make: MakePart | None = None,
    ) -> None:
        self._payload = payload
        self._make = make
        self._labels: dict[int, str] = {}  # of the present segments of each replica
        self._incarnation = incarnation
        self._config = incarnation.config
        self._stats = incarnation.stats
        self._scheduler = scheduler
        self._relays = relays
        self._restarting: set[int] = set()  # killed on purpose
        self._checksums: dict[tuple[int, int], tuple[str, int]] = {}  # (version, GPUs) -> checksum and whose it is
        self._plan: Plan | None = None  # that the scheduler has heard of
        self._tick = Tick(self._hand_out, every_s=DISPATCH_S)
        self._hub: ReplicaHub | None = None
        self._lines: dict[int, Line] = {}  # of the replicas that run, or start
        self._relay_told: dict[Line, str] = {}  # endpoint that each pulls from, as far as it was told
        self._keepers = [Keeper(self._spec(index), incarnation) for index in range(self._config.rollout.replicas)]

    def spawn(self) -> None:
        """Start all processes; `keep` starts what runs in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Serve every replica until cancelled. Raises RunFailedError, ConfigError."""
        self._hub = hub = self._make_hub()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, keeper in enumerate(self._keepers):
                    tasks.create_task(keeper.calling(partial(self._serve, index)), name=f"keep-replica-{index}")
                tasks.create_task(self._tick.run(), name="dispatch")
                tasks.create_task(hub.run(), name="link")
        finally:
            hub.end()

    def _make_hub(self) -> ReplicaHub:
        placement = self._incarnation.placement
        here = placement.here.node
        return ReplicaHub(
            Post(self._relays.keys, placement.ip(here) if here and placement.spread else LOOPBACK),
            take=self._take_in,
            patience_s=self._config.supervisor.heartbeat_timeout_s,
        )

    def wake(self) -> None:
        """Have what the scheduler has for replicas handed out soon, when the caller is done with what it does."""
        self._tick.wake()

    def dispatch(self) -> None:
        """Hand out what the scheduler has for replicas now."""
        self._tick.at_once()

    def _hand_out(self) -> None:
        self._heed_plan()
        for index, trajectory_ids in self._scheduler.book.take_aborts().items():
            self._tell(index, Abort(list(trajectory_ids)))
        for index, assignments in self._scheduler.dispatcher.dispatch().items():
            for located in self._located(index, assignments):
                self._tell(index, Submit([located]))
        for index, trajectory_ids in self._scheduler.moves.take_called_off().items():
            self._tell(index, CallOff(list(trajectory_ids)))
        self._note_work()

    def _heed_plan(self) -> None:
        """Let the scheduler know of a new plan; a replica without a place counts for nobody."""
        plan = self._incarnation.placement.plan
        if plan is not self._plan:
            self._plan = plan
            self._scheduler.views.planned(place is not None for place in plan.replicas)

    def _note_work(self) -> None:
        self._stats.generating(self._scheduler.views.in_flight > 0)

    def _located(self, index: int, assignments: Sequence[Assignment]) -> list[Assignment]:
        """With addresses of what a replica's host has not got itself."""
        node = self._keepers[index].parts[0].place.node
        refs = [[one.at for one in assignment.tokens] for assignment in assignments]
        stores = [self._payload.stores_for(mine, node) for mine in refs]
        pairs = zip(assignments, stores, strict=True)
        return [msgspec.structs.replace(item, stores=of) if of else item for item, of in pairs]

    # ---- repacking

    async def speed(self) -> EngineSpeed:
        """Speed of the engines, by the first replica that is up; it has nothing to do yet."""
        while True:
            for replica in range(len(self._keepers)):
                speed = await self._speed_of(replica)
                if speed is not None:
                    return speed
            await asyncio.sleep(RETRY_S)  # all are starting

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.ReplicaFleet.survey`."""
        line = self._lines.get(replica)
        return None if line is None else await line.look()

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""
        line = self._lines.get(replica)
        return line is not None and await line.expect(version, trajectory_ids)

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        self._tell(replica, GiveUp(list(trajectory_ids)))

    def _tell(self, replica: int, order: Order) -> None:
        """Tell a replica that runs, or starts; another has nothing that an order could be about."""
        line = self._lines.get(replica)
        if line is not None:
            line.put(order)

    async def _speed_of(self, replica: int) -> EngineSpeed | None:
        """None of one that is dying, which its keeper notices as well."""
        keeper = self._keepers[replica]
        if not keeper.is_up:
            return None
        try:
            return await keeper.parts[0].ask(EngineSpeed, "speed", timeout_s=SPEED_S)
        except PartDiedError:
            return None

    # ---- their life

    async def stop(self, *, evaluations: bool) -> None:
        """Interrupt all training, and evaluations too, and wait until nothing runs any more.

        Partial responses are in then, and evaluations that were not interrupted have ended.
        One that is starting has nothing to tell: it starts once more, without what is interrupted.
        """
        views = self._scheduler.views
        for index, keeper in enumerate(self._keepers):
            if keeper.is_up:
                self._tell(index, Stop(evaluations))
            elif keeper.parts:
                self._end(index)
        while views.in_flight:
            self._stats.next_report.clear()
            await self._stats.next_report.wait()

    def restart(self) -> None:
        """End all processes for fresh ones, whose engines may serve versions older than theirs."""
        for index, keeper in enumerate(self._keepers):
            if keeper.parts:
                self._scheduler.views.retire(index)
                self._end(index)

    def _end(self, index: int) -> None:
        """Kill a process, which does not count as a death."""
        self._restarting.add(index)
        self._keepers[index].kill()

    def _spec(self, index: int) -> PartSpec:
        return PartSpec(
            names=[f"replica-{index}"],
            actor=ReplicaActor,
            concurrency=16,
            timeout_s=self._config.supervisor.heartbeat_timeout_s,
            places=lambda: [self._incarnation.placement.plan.replicas[index]],
            start=partial(self._start, index),
            settle=partial(self._settle, index),
            rest=self._rest,
            first_starts=FIRST_STARTS,
            make=self._make,
            spares_memory="lower rollout.kv_capacity, rollout.max_batch or rollout.replicas",
            forgives_s=FORGIVES_S,
        )

    async def _settle(self, index: int, error: PartDiedError) -> PartDiedError | None:
        """Have what it had go on elsewhere; None if it was ended on purpose, or if its disk is full.

        That ends no run: it is tried again, ever more rarely, while others go on.
        """
        await self._close_line(index)
        await self._take_over(index)
        self._stats.next_report.set()  # `stop` may wait for what it had
        if index not in self._restarting and StoreFullError.__name__ in error.reason:
            log.error("%s", error)
            self._incarnation.ledger.append(PartDied(error.part, error.reason))
            return None
        if index not in self._restarting:
            return error
        self._restarting.discard(index)
        return None

    async def _take_over(self, index: int) -> None:
        """Have what a dead replica had wait for others, from where its segments and journals end."""
        label, reports = self._labels.pop(index, None), self._scheduler.reports
        self._scheduler.views.retire(index)  # it gets nothing while its journals are read
        if label is None:  # it died over its start
            await reports.on_replica_lost(index, reason=REPLICA_DIED)
        elif await self._payload.is_lost(label):
            await reports.on_replica_lost(index, reason=HOST_LOST)
            await self._payload.lose_host_of(label, self._scheduler)
        else:
            answer = await self._payload.salvage(label, reports.running_on(index))
            await reports.on_replica_lost(index, answer.found, reason=REPLICA_DIED)
            await self._payload.salvaged(label, answer)

    async def _rest(self, failures: int) -> None:
        self.dispatch()
        await back_off(failures)

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        relay = await self._relays.attach(index, parts[0].place)
        self._labels[index] = label = await self._payload.label(f"replica-{index}", parts[0].place.node)
        await self._close_line(index)  # of a start that failed
        self._lines[index] = line = self._open_hub.open(label, index)
        self._relay_told[line] = relay
        self._heed_plan()
        spec = ReplicaSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            label=label,
            store_key=self._payload.key,
            index=index,
            model_dir=str(self._config.model.path),
            relay=relay,
            hub=self._open_hub.endpoint,
            pace=_pace(self._config.rollout.replicas, self._config.supervisor.heartbeat_timeout_s),
            public_key=self._relays.keys.public,
            secret_key=self._relays.keys.secret,
            assignments=self._located(index, self._scheduler.dispatcher.for_starting(index)),
            secret=self._config.rollout.engine.secret(),
        )
        limit = START_S + self._config.rollout.engine.start_limit_s
        await parts[0].call("start", encode(spec), timeout_s=limit)

    async def _serve(self, index: int, parts: Sequence[Part]) -> None:
        """Until a replica ends, or is of no use any more. Raises PartDiedError."""
        (part,), line = parts, self._lines[index]
        self._open_hub.begin(line)
        await watched(part.call("ended", timeout_s=math.inf), _until_lost(part.name, line))

    async def _take_in(self, reports: Sequence[tuple[Line, ReplicaReport]]) -> None:
        """Take the reports of a moment in, and answer those at once who may have nothing to do."""
        is_urgent = False
        for line, report in reports:
            views, index = self._scheduler.views, line.replica
            version = views.by_index[index].version
            if index in self._restarting:
                continue  # what it had is taken over from where it lies
            await self._scheduler.reports.on_report(report)
            self._stats.on_report(report)
            self._compare(line, report.loads)
            self._keep_attached(line)
            is_urgent |= views.by_index[index].idle or report.status.version != version
        self._note_work()
        if is_urgent:
            self.dispatch()
        else:
            self.wake()

    def _keep_attached(self, line: Line) -> None:
        """Tell a replica where its relay is now; one whose relay has gone to another host cannot go on."""
        try:
            relay = self._relays.endpoint_for(line.replica)
        except PartDiedError as error:
            line.lose(error.reason)
            return
        if relay != self._relay_told[line]:
            self._relay_told[line] = relay
            line.put(Follow(relay))

    async def _close_line(self, index: int) -> None:
        line = self._lines.pop(index, None)
        if line is not None:
            await self._open_hub.close(line)
            del self._relay_told[line]

    @property
    def _open_hub(self) -> ReplicaHub:
        assert self._hub is not None, "there is a link from `keep` on"
        return self._hub

    def _compare(self, line: Line, loads: Sequence[WeightLoad]) -> None:
        """Engines that verified one version in one layout hold the same tensors; one that does not is lost."""
        for load in loads:
            if load.checksum is None:
                continue
            layout = load.checksum.count("-") + 1
            agreed, first = self._checksums.setdefault((load.version, layout), (load.checksum, line.replica))
            if agreed != load.checksum:
                line.lose(f"its weights of version {load.version} differ from those of replica-{first}")
        for key in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[key]


async def _until_lost(name: str, line: Line) -> None:
    raise PartDiedError(name, await line.lost)


def _pace(replicas: int, patience_s: float) -> ReportPace:
    """Pace of each of so many, so that all together report 2,000 times a second at most, 200 in peace.

    None is quiet for so long that it is taken for dead.
    """
    return ReportPace(
        gather_s=min(MOST_GATHER_S, max(GATHER_S, replicas / REPORTS_PER_S)),
        quiet_s=min(MOST_QUIET_S, patience_s / 4, max(1.0, replicas / QUIET_PER_S)),
    )
