"""The replicas' processes: their lines, their start, and their revival with the work they had.

Owned by the controller, whose loop `issue` sends orders through here and whose loop `generate` gets the reports.
Ray starts a process and tells of its end, and nothing in between. Invariant: what a replica had when it died goes
on elsewhere (law 1), and one whose weights differ from another's under the same version counts as dead (law 3).
Replicas join and leave while others run, each under a number that is never used again; one that joins and does not
start ends no run.
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
from laminar_py.control.reports import HOST_LOST, REPLICA_DIED
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.codec import encode
from laminar_py.records.engine import StoreFullError
from laminar_py.records.events import PartDied, ReplicaLeft
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.repack.signals import EngineSpeed
from laminar_py.runtime.cluster.errors import PartDiedError, RunFailedError
from laminar_py.runtime.cluster.part import Part, watched
from laminar_py.runtime.cluster.placement import Place, Plan
from laminar_py.runtime.link.hub import Line
from laminar_py.runtime.link.messages import GiveUp, Order, Stop, Submit
from laminar_py.runtime.workers.environments import environment_names
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import RETRY_S, Keeper, PartSpec, back_off
from laminar_py.runtime.workers.payload import PayloadHosts
from laminar_py.runtime.workers.processes.replica import ReplicaActor
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.replica_lines import ReplicaLines
from laminar_py.runtime.workers.specs import ReplicaSpec

log = logging.getLogger(__name__)

START_S = 120.0  # of a replica, its engine apart
SPEED_S = 600.0  # of its measurement, which also waits for the first weights
ANSWER_S = 2.0  # for an answer, at least: a busy controller takes reports in with delay
SCALED = "scaled"  # reason of one that was to leave
FIRST_STARTS = 2  # that may fail before the run does
FORGIVES_S = 3600.0  # one of many loses little, and other work comes to it


class _LeftError(Exception):
    """A replica has left, and needs no process any more."""


class Replicas:
    """Processes of the rollout replicas, and the lines to them.

    `issuing` is the tick of the loop that sends assignments; `take` gets the new reports of a moment.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        relays: Relays,
        payload: PayloadHosts,
        issuing: Tick,
        take: Callable[[Sequence[tuple[Line, ReplicaReport]]], Awaitable[None]],
    ) -> None:
        self._payload = payload
        self._labels: dict[int, str] = {}  # of the present segments of each replica
        self._incarnation = incarnation
        self._config = incarnation.config
        self._stats = incarnation.stats
        self._scheduler = scheduler
        self._relays = relays
        self._restarting: set[int] = set()  # killed on purpose
        self._plan: Plan | None = None  # that the scheduler has heard of
        self._issuing = issuing
        self._take = take
        self._opened: ReplicaLines | None = None
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
        self._opened = lines = ReplicaLines(self._incarnation, self._relays, take=self._take)
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for index in range(len(self._keepers)):
                    tasks.create_task(self._keep(index), name=f"keep-replica-{index}")
                tasks.create_task(lines.hub.run(), name="link")
        finally:
            lines.hub.end()

    # ---- what the loops of the controller call

    def send(self, index: int, order: Order) -> None:
        """Send an order to a replica that runs, or starts."""
        self._lines.tell(index, order)

    def assign(self, index: int, assignments: Sequence[Assignment]) -> None:
        """Send a replica its assignments, with the addresses of tokens that its host has not got."""
        for located in self._located(index, assignments):
            self._lines.tell(index, Submit([located]))

    def is_killed(self, index: int) -> bool:
        """True where a replica was killed on purpose: its work is taken over from its segments."""
        return index in self._restarting

    def check_weights(self, line: Line, report: ReplicaReport) -> None:
        """Lose a replica whose weights differ from another's, and tell it where its relay is now."""
        self._lines.compare(line, report.loads)
        self._lines.keep_attached(line)

    def heed_plan(self) -> None:
        """Let the scheduler know of a new plan; a replica without a place counts for nobody."""
        plan = self._incarnation.placement.plan
        if plan is not self._plan:
            self._plan = plan
            self._scheduler.views.planned(place is not None for place in plan.replicas)

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
        reason = SCALED
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
        self._issuing.at_once()  # what it still had

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
        return None if line is None else await line.look(within_s=self._answer_s)

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""
        line = self._lines.get(replica)
        return line is not None and await line.expect(version, trajectory_ids, within_s=self._answer_s)

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        self._lines.tell(replica, GiveUp(list(trajectory_ids)))

    @property
    def _answer_s(self) -> float:
        """The time for an answer, so that a silent replica holds up no round of the others."""
        return max(ANSWER_S, self._config.repack.interval_s)

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
                self._lines.tell(index, Stop(evaluations))
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
            make=self._incarnation.kinds.replica,
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
        await self._lines.close(index)
        if index in self._unproven and index not in self._restarting:
            self._scheduler.views.doubt(index)
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
        self._issuing.at_once()
        await back_off(failures)

    async def _start(self, index: int, parts: Sequence[Part]) -> None:
        self._stats.joined(index)
        relay = await self._relays.attach(index, parts[0].place)
        self._labels[index] = label = await self._payload.label(f"replica-{index}", parts[0].place.node)
        await self._lines.open(index, label, relay)
        self.heed_plan()
        spec = ReplicaSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            label=label,
            store_key=self._payload.key,
            index=index,
            model_dir=str(self._config.model.path),
            relay=relay,
            hub=self._lines.hub.endpoint,
            pace=self._lines.pace,
            public_key=self._relays.keys.public,
            secret_key=self._relays.keys.secret,
            assignments=self._located(index, self._scheduler.dispatcher.for_starting(index)),
            secret=self._config.rollout.engine.secret(),
            server=self._servers.get(index, ""),
            environments=environment_names(self._incarnation),
        )
        limit = START_S + self._config.rollout.engine.start_limit_s
        await parts[0].call("start", encode(spec), timeout_s=limit)

    async def _serve(self, index: int, parts: Sequence[Part]) -> None:
        """Until a replica ends, or is of no use any more. Raises PartDiedError."""
        self._unproven.discard(index)
        await watched(parts[0].call("ended", timeout_s=math.inf), self._lines.until_lost(index))

    @property
    def _lines(self) -> ReplicaLines:
        assert self._opened is not None, "there are lines from `keep` on"
        return self._opened
