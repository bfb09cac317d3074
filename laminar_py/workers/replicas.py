"""The replicas' processes: reports in, assignments out, revival with what they had. Owned by the controller.

Reports come in at any rate. One that may leave its replica without work is answered at once, all others of
`DISPATCH_S` together. Invariant: what a replica had when it died goes on elsewhere (law 1), and one whose weights
differ from another's under the same version counts as dead (law 3). Replicas join and leave while others run, each
under a number that is never used again; one that joins and does not start ends no run.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from laminar_py.cluster.errors import PartDiedError, RunFailedError
from laminar_py.cluster.part import Part
from laminar_py.cluster.placement import Place, Plan
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.codec import decode, encode
from laminar_py.records.events import PartDied, ReplicaLeft
from laminar_py.records.replica import Assignment, ReplicaReport, Survey, WeightLoad
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.storing import StoreFullError
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.keeper import RETRY_S, Keeper, PartSpec, back_off
from laminar_py.workers.outgoing import Outgoing
from laminar_py.workers.payload import PayloadHosts
from laminar_py.workers.processes.replica import ReplicaActor
from laminar_py.workers.relays import Relays
from laminar_py.workers.specs import ReplicaSpec
from laminar_py.workers.tick import Tick

log = logging.getLogger(__name__)

COLLECT_S = 1.0
DISPATCH_S = 0.02  # in which reports are answered together; a fifth of what a replica lets its news gather
START_S = 120.0  # of a replica, its engine apart
SPEED_S = 600.0  # of its measurement, which also waits for the first weights
CHECKSUMS_KEPT = 64
REPLICA_DIED, HOST_LOST = "replica_died", "host_lost"  # reasons of an interruption
FIRST_STARTS = 2  # that may fail before the run does
FORGIVES_S = 3600.0  # one of many loses little, and other work comes to it


class _LeftError(Exception):
    """A replica has left, and needs no process any more."""


class Replicas:
    """Processes of the rollout replicas, and what goes between them and the scheduler."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        relays: Relays,
        payload: PayloadHosts,
    ) -> None:
        self._payload = payload
        self._labels: dict[int, str] = {}  # of the present segments of each replica
        self._incarnation = incarnation
        self._config = incarnation.config
        self._stats = incarnation.stats
        self._scheduler = scheduler
        self._relays = relays
        self._restarting: set[int] = set()  # killed on purpose
        self._checksums: dict[tuple[int, int], tuple[str, int]] = {}  # (version, GPUs) -> checksum and whose it is
        self._late_aborts: dict[int, list[str]] = {}  # of what a replica that starts is started with
        self._plan: Plan | None = None  # that the scheduler has heard of
        self._tick = Tick(self._hand_out, every_s=DISPATCH_S)
        self._outgoing = Outgoing()
        self._keepers = [Keeper(self._spec(index), incarnation) for index in range(self._config.rollout.replicas)]
        self._servers = dict(enumerate(self._config.rollout.engine.servers))  # that replicas attach to
        self._unproven: set[int] = set()  # have joined, and never were up
        self._ended: set[int] = set()  # have left, or are about to, with nothing
        self._left: dict[int, str] = {}  # reasons of those that have left, until they are told
        self._failing: dict[int, str] = {}  # of those that have joined and do not start, the first of each
        self._tasks: asyncio.TaskGroup | None = None  # in which they are kept

    def spawn(self) -> None:
        """Start all processes; `keep` starts what runs in them."""
        for keeper in self._keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Serve every replica until cancelled. Raises RunFailedError, ConfigError."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for index in range(len(self._keepers)):
                tasks.create_task(self._keep(index), name=f"keep-replica-{index}")
            tasks.create_task(self._tick.run(), name="dispatch")
            tasks.create_task(self._outgoing.run(), name="send-to-replicas")

    def wake(self) -> None:
        """Have what the scheduler has for replicas handed out soon, when the caller is done with what it does."""
        self._tick.wake()

    def dispatch(self) -> None:
        """Hand out what the scheduler has for replicas now."""
        self._tick.at_once()

    def _hand_out(self) -> None:
        self._heed_plan()
        for index, trajectory_ids in self._scheduler.book.take_aborts().items():
            if self._keepers[index].is_up:
                self._tell(index, "abort", trajectory_ids)
            else:
                self._late_aborts.setdefault(index, []).extend(trajectory_ids)
        for index, assignments in self._scheduler.dispatcher.dispatch().items():
            self._outgoing.put(self._keepers[index].parts[0], "submit", self._located(index, assignments))
        for index, trajectory_ids in self._scheduler.moves.take_called_off().items():
            self._tell(index, "call_off", trajectory_ids)
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

    # ---- the fleet

    def join(self, config: RunConfig, servers: Mapping[int, str]) -> None:
        """Keep the replicas that are new to the scheduler, each attached to its server if there are `servers`.

        The config is that of the fleet as it is to be.
        """
        assert self._tasks is not None, "replicas join while others are kept"
        self._config = config
        self._servers |= servers
        for index in range(len(self._keepers), len(self._scheduler.views.by_index)):
            self._unproven.add(index)
            self._keepers.append(Keeper(self._spec(index), self._incarnation))
            self._tasks.create_task(self._keep(index), name=f"keep-replica-{index}")

    def remove(self, index: int) -> None:
        """End a replica that was to leave and has nothing any more; no death is counted."""
        assert self._scheduler.views.by_index[index].leaving, f"replica {index} was not to leave"
        self._ended.add(index)
        if self._keepers[index].parts:
            self._end(index)

    def is_ended(self, index: int) -> bool:
        """True where a replica does not come back."""
        return index in self._ended

    def has_process(self, index: int) -> bool:
        """True where a replica runs, or starts."""
        return bool(self._keepers[index].parts)

    def take_left(self) -> dict[int, str]:
        """Replicas that have left, and why; each is told once."""
        left, self._left = self._left, {}
        return left

    @property
    def failing(self) -> Mapping[int, str]:
        """Replicas that have joined and do not start, and why they did not the first time."""
        return self._failing

    async def _keep(self, index: int) -> None:
        """Keep a replica until it has left. Raises RunFailedError, ConfigError of one that ever was up."""
        reason = "scaled"
        try:
            await self._keepers[index].calling(partial(self._serve, index))
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
        self._ended.add(index)
        self._stats.left(index)
        self._incarnation.ledger.append(ReplicaLeft(index, reason))
        self._left[index] = reason
        self.dispatch()  # what it still had

    # ---- repacking

    async def speed(self) -> EngineSpeed:
        """Speed of the engines, by the first replica that is up; it has nothing to do yet."""
        while True:
            for replica in range(len(self._keepers)):
                answer = await self._ask(replica, "speed", timeout_s=SPEED_S)
                if isinstance(answer, bytes):
                    return decode(EngineSpeed, answer)
            await asyncio.sleep(RETRY_S)  # all are starting

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.ReplicaFleet.survey`."""
        answer = await self._ask(replica, "survey")
        return decode(Survey, answer) if isinstance(answer, bytes) else None

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""
        return await self._ask(replica, "expect", version, encode(list(trajectory_ids))) is True

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        self._tell(replica, "give_up", trajectory_ids)

    def _tell(self, replica: int, method: str, trajectory_ids: Sequence[str]) -> None:
        """Tell a replica that is up; one that is not has nothing to give up and expects nothing."""
        if self._keepers[replica].is_up:
            self._outgoing.put(self._keepers[replica].parts[0], method, list(trajectory_ids))

    async def _ask(self, replica: int, method: str, *arguments: object, timeout_s: float | None = None) -> object:
        """An answer of its process; None from one that is dying, which its keeper notices as well."""
        keeper = self._keepers[replica]
        if not keeper.is_up:
            return None
        try:
            return await keeper.parts[0].call(method, *arguments, timeout_s=timeout_s)
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
                self._outgoing.put(keeper.parts[0], "stop", evaluations)
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
            places=lambda: [self._place(index)],
            start=partial(self._start, index),
            settle=partial(self._settle, index),
            rest=self._rest,
            first_starts=FIRST_STARTS,
            spares_memory="lower rollout.kv_capacity, rollout.max_batch or rollout.replicas",
            forgives_s=FORGIVES_S,
        )

    def _place(self, index: int) -> Place | None:
        if index in self._ended:
            raise _LeftError
        planned = self._incarnation.placement.plan.replicas
        return planned[index] if index < len(planned) else None  # it has just joined

    async def _settle(self, index: int, error: PartDiedError) -> PartDiedError | None:
        """Have what it had go on elsewhere; None if it was ended on purpose, or if that ends no run.

        A full disk does not, nor the first start of one that joined: it is tried again, ever more rarely, while
        others go on. One that was to leave has left with that.
        """
        self._late_aborts.pop(index, None)
        await self._take_over(index)
        self._stats.next_report.set()  # `stop` may wait for what it had
        on_purpose, leaves = index in self._restarting, self._scheduler.views.by_index[index].leaving
        self._restarting.discard(index)
        tolerated = leaves or index in self._unproven or StoreFullError.__name__ in error.reason
        if tolerated and not on_purpose:
            if index in self._unproven:
                self._failing.setdefault(index, error.reason)
            log.error("%s", error)
            self._incarnation.ledger.append(PartDied(error.part, error.reason))
        if leaves:
            raise _LeftError
        return None if on_purpose or tolerated else error

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
        self._stats.joined(index)
        relay = await self._relays.attach(index, parts[0].place)
        self._labels[index] = label = await self._payload.label(f"replica-{index}", parts[0].place.node)
        self._heed_plan()
        spec = ReplicaSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            label=label,
            store_key=self._payload.key,
            index=index,
            model_dir=str(self._config.model.path),
            relay=relay,
            public_key=self._relays.keys.public,
            secret_key=self._relays.keys.secret,
            assignments=self._located(index, self._scheduler.dispatcher.for_starting(index)),
            secret=self._config.rollout.engine.secret(),
            server=self._servers.get(index, ""),
        )
        limit = START_S + self._config.rollout.engine.start_limit_s
        await parts[0].call("start", encode(spec), timeout_s=limit)

    async def _serve(self, index: int, parts: Sequence[Part]) -> None:
        """Reports of a replica until it dies."""
        (part,) = parts
        self._unproven.discard(index)
        if (aborted := self._late_aborts.pop(index, None)) is not None:
            self._outgoing.put(part, "abort", aborted)
        while True:
            report = await part.ask(ReplicaReport, "collect", COLLECT_S, self._relays.endpoint_for(index))
            if index in self._restarting:
                raise PartDiedError(f"replica-{index}", "restarted")
            await self._take_in(report)

    async def _take_in(self, report: ReplicaReport) -> None:
        views, index = self._scheduler.views, report.replica
        version = views.by_index[index].version
        await self._scheduler.reports.on_report(report)
        self._stats.on_report(report)
        self._note_work()
        self._compare(index, report.loads)
        if views.by_index[index].idle or report.status.version != version:
            self.dispatch()
        else:
            self.wake()

    def _compare(self, index: int, loads: Sequence[WeightLoad]) -> None:
        """Engines that verified one version in one layout hold the same tensors. Raises PartDiedError if not."""
        for load in loads:
            if load.checksum is None:
                continue
            layout = load.checksum.count("-") + 1
            agreed, first = self._checksums.setdefault((load.version, layout), (load.checksum, index))
            if agreed != load.checksum:
                reason = f"its weights of version {load.version} differ from those of replica-{first}"
                raise PartDiedError(f"replica-{index}", reason)
        for key in sorted(self._checksums)[:-CHECKSUMS_KEPT]:
            del self._checksums[key]
