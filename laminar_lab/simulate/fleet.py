"""The replicas of a simulation, and what goes between them and the scheduler.

Each is a `rollout.replica.Replica` on an emulated engine, in this process and on its virtual clock; what it says
and hears takes the time of the link (`simulate.link`), surveys and promises too. A replica passes these states:

    LIVES -> DEAD   it fails: the scheduler hears of its loss as in any run, with what its journal has
    DEAD  -> LIVES  `simulation.restart_s` later another is in its place, with what nobody else can go on with

Invariant: of one that has died nothing is heard any more, and nothing comes there.
"""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from laminar_lab.simulate.cores import SharedCores
from laminar_lab.simulate.figures import FleetSample
from laminar_lab.simulate.link import OneWay
from laminar_lab.simulate.parts import CountedTokens
from laminar_lab.simulate.weights import ModelledWeights
from laminar_py.config import RunConfig
from laminar_py.config.emulation import EngineTimes
from laminar_py.control import DISPATCH_S, REPLICA_DIED, Tick, TrajectoryScheduler
from laminar_py.engines.emulated import EmulatedEngine, Responses, environments_of
from laminar_py.observe import Stats
from laminar_py.records.events import PartDied, PartStarted
from laminar_py.records.host import Clock
from laminar_py.records.replica import ReplicaReport, Survey
from laminar_py.repack import EngineSpeed
from laminar_py.rollout import Replica

T = TypeVar("T")
SAMPLE_S = 5.0  # emulated, between looks at all engines
VOCAB, END = 256, 1  # tokens that nobody reads, and the one that ends a response
NEVER_S = 1e12
FAILED = "failed in the simulation"
NO_PROCESS = 0  # in the place of a process id


@dataclass(slots=True, eq=False)
class ReplicaLife:
    """A replica from its start to its failure."""

    replica: Replica
    engine: EmulatedEngine
    store: CountedTokens
    lives: bool = True


class SimulatedFleet:
    """Replicas on a virtual clock; `run` leads them, `repack.migration` asks them."""

    def __init__(
        self,
        config: RunConfig,
        times: EngineTimes,
        *,
        scheduler: TrajectoryScheduler,
        weights: ModelledWeights,
        stats: Stats,
        clock: Clock,
        cores: SharedCores,
    ) -> None:
        assert config.emulation is not None, "a simulation has emulated engines"
        self._config, self._emulation, self._times = config, config.emulation, times
        self._scheduler = scheduler
        self._weights = weights
        self._stats = stats
        self._clock = clock
        self._cores = cores
        self._tick = Tick(self._hand_out, every_s=DISPATCH_S)
        self._lives: list[ReplicaLife] = []
        self._ended_tokens, self._ended_s = 0, 0.0  # of engines that have died
        self.samples: list[FleetSample] = []
        self.num_reports = 0  # that came in
        self.failures: list[tuple[float, int]] = []  # seconds of RL, and which replica
        self._responses = Responses.from_config(
            config.emulation, VOCAB, max_len=config.rollout.max_len, seed=config.seed
        )
        self._environments = environments_of(config)  # outlive replicas
        self._reports = OneWay(config.simulation.hop_s)
        self._orders = OneWay(config.simulation.order_s)
        self._opened, self._rl = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for index in range(self._config.rollout.replicas):
                late_s = self._emulation.start_spread_s * index / self._config.rollout.replicas
                self._lives.append(await self._open(index, late_s=late_s))
                tasks.create_task(self._keep(index), name=f"keep-replica-{index}")
            tasks.create_task(self._reports.run(), name="reports")
            tasks.create_task(self._orders.run(), name="orders")
            tasks.create_task(self._tick.run(), name="dispatch")
            tasks.create_task(self._keep_sampling(), name="sample")
            self._opened.set()

    def wake(self) -> None:
        """Have what the scheduler has for replicas handed out soon."""
        self._tick.wake()

    def begin_rl(self) -> None:
        """Hand out training; from here on replicas fail."""
        self._rl.set()
        self._tick.wake()

    async def stop(self) -> None:
        """Interrupt all, and wait until nothing runs any more and what there is has been told."""
        for life in self._lives:
            self._order(life, partial(self._begin, partial(life.replica.stop, evaluations=True)))
        while self._scheduler.views.in_flight:
            self._stats.next_report.clear()
            await self._stats.next_report.wait()

    async def speed(self) -> EngineSpeed:
        """Speed of the engines, measured on the first one before it has anything to do."""
        await self._opened.wait()
        rollout = self._config.rollout
        sampling = rollout.sampling.params(stop_ids=(END,))
        speed, _ = await self._lives[0].replica.measure_speed(
            vocab=VOCAB, max_len=rollout.max_len, sampling=sampling
        )
        return speed.with_roofline(self._config.repack.roofline_batch)

    @property
    def generated_tokens(self) -> int:
        """Tokens of all engines, as of the last `sample`."""
        return self._ended_tokens + sum(life.engine.num_tokens for life in self._lives if life.lives)

    @property
    def _engine_s(self) -> float:
        return self._ended_s + sum(life.engine.busy_s for life in self._lives if life.lives)

    @property
    def is_short(self) -> bool:
        """True while a replica is to come back."""
        return any(not life.lives for life in self._lives)

    @property
    def restarts(self) -> dict[str, int]:
        """Failures by replica."""
        return dict(sorted(Counter(f"replica-{index}" for _, index in self.failures).items()))

    # ---- `migration.ReplicaFleet`

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.ReplicaFleet.survey`."""
        return await self._ask(replica, _survey)

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""

        async def promise(life: ReplicaLife) -> bool:
            return life.replica.expect(version, trajectory_ids)

        return bool(await self._ask(replica, promise))

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        life = self._lives[replica]
        self._order(life, partial(self._begin, partial(life.replica.give_up, list(trajectory_ids))))

    # ---- their life

    async def _open(self, index: int, *, late_s: float) -> ReplicaLife:
        rollout, store = self._config.rollout, CountedTokens(self._responses)
        engine = EmulatedEngine(
            self._times,
            self._responses,
            vocab=VOCAB,
            max_batch=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=rollout.kv_tokens,
            compression=self._emulation.compression,
            late_s=late_s,
            delta_interval_s=NEVER_S,
            checksum=lambda folder: "",
            changed=self._cores.share_out,
        )
        await engine.start()
        self._cores.add(engine)
        self._stats.add_replica(index)
        self._scheduler.book.record(PartStarted(f"replica-{index}", NO_PROCESS))
        replica = Replica(
            index,
            engine=engine,
            weights=self._weights.of(index),
            store=store,
            clock=self._clock,
            on_new_weights=rollout.on_new_weights,
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=NEVER_S,
            initial=self._scheduler.dispatcher.for_starting(index),
            environments=self._environments,
        )
        return ReplicaLife(replica, engine, store)

    async def _keep(self, index: int) -> None:
        """Have a replica, and after each failure another in its place."""
        draw = random.Random(f"{self._config.seed}/failures/{index}")
        down_s = self._config.simulation.restart_s - self._times.load_s / self._emulation.compression
        while True:
            life = self._lives[index]
            serving = self._tasks.create_task(self._serve(life), name=f"replica-{index}")
            await self._until_failure(life, draw)
            life.engine.status()  # all that it has generated counts
            life.lives = False
            self._ended_tokens += life.engine.num_tokens
            self._ended_s += life.engine.busy_s
            serving.cancel()
            await asyncio.wait([serving])
            await self._take_over(index, life)
            await asyncio.sleep(max(0.0, down_s))
            self._lives[index] = await self._open(index, late_s=0.0)

    async def _serve(self, life: ReplicaLife) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(life.replica.run(), name="run")
            while True:
                report = await life.replica.next_report(math.inf)
                self._reports.send(partial(self._take_in, life, report))

    async def _until_failure(self, life: ReplicaLife, draw: random.Random) -> None:
        """Until it fails, with a journal that was written at the last of its times before that."""
        mtbf_s, interval_s = self._config.simulation.replica_mtbf_s, self._config.rollout.partial_interval_s
        await self._rl.wait()
        lives_s = NEVER_S if mtbf_s is None else draw.expovariate(1.0 / mtbf_s)
        noted_s = math.floor(lives_s / interval_s) * interval_s
        await asyncio.sleep(noted_s)
        life.engine.deliver()
        await asyncio.sleep(0)  # what the engine has just delivered is taken first
        life.replica.journal_partials()
        await asyncio.sleep(lives_s - noted_s)

    async def _take_over(self, index: int, life: ReplicaLife) -> None:
        """Have what a dead replica had wait for others, from where its journal ends."""
        reports = self._scheduler.reports
        await life.engine.close()
        self._cores.remove(life.engine)
        self._weights.forget(index)
        self.failures.append((self._stats.rl_s, index))
        self._scheduler.views.retire(index)
        found = life.store.salvage(reports.running_on(index))
        await reports.on_replica_lost(index, found, reason=REPLICA_DIED)
        self._scheduler.book.record(PartDied(f"replica-{index}", FAILED))
        self._stats.next_report.set()  # `stop` may wait for what it had
        self._tick.at_once()

    # ---- reports and orders

    async def _take_in(self, life: ReplicaLife, report: ReplicaReport) -> None:
        if not life.lives:
            return
        self.num_reports += 1
        views = self._scheduler.views
        version = views.by_index[report.replica].version
        await self._scheduler.reports.on_report(report)
        self._stats.on_report(report)
        self._stats.set_generating(views.in_flight > 0)
        if views.by_index[report.replica].idle or report.status.version != version:
            self._tick.at_once()
        else:
            self._tick.wake()

    def _hand_out(self) -> None:
        scheduler = self._scheduler
        for index, names in scheduler.book.take_aborts().items():
            life = self._lives[index]
            self._order(life, partial(self._begin, partial(life.replica.abort, list(names))))
        for index, assignments in scheduler.dispatcher.dispatch().items():
            life = self._lives[index]
            self._order(life, partial(life.replica.start_assignments, assignments))
        for index, names in scheduler.moves.take_called_off().items():
            life = self._lives[index]
            self._order(life, partial(life.replica.call_off, list(names)))
        self._stats.set_generating(scheduler.views.in_flight > 0)
        if scheduler.dispatcher.has_more:
            self._tick.wake()

    def _order(self, life: ReplicaLife, obey: Callable[[], object]) -> None:
        """Have a replica obey once the order has come there."""

        async def arrive() -> None:
            if life.lives:
                obey()

        self._orders.send(arrive)

    def _begin(self, obey: Callable[[], Coroutine[object, object, None]]) -> None:
        self._tasks.create_task(obey(), name="order")

    async def _ask(self, replica: int, answer: Callable[[ReplicaLife], Awaitable[T]]) -> T | None:
        """Answer of a replica, after all that it was told and said before; None of a dead one."""
        life, heard = self._lives[replica], asyncio.get_running_loop().create_future()

        async def arrive() -> None:
            told = await answer(life) if life.lives else None
            self._reports.send(partial(hear, told))

        async def hear(told: T | None) -> None:
            if not heard.done():  # done: who asked has been cancelled
                heard.set_result(told if life.lives else None)

        self._orders.send(arrive)
        found: T | None = await heard
        return found

    # ---- samples

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S / self._emulation.compression)
            self.sample()

    def sample(self) -> None:
        """Note what the engines are at now; those of dead replicas hold nothing."""
        living = [life for life in self._lives if life.lives]
        states = [life.engine.status() for life in living]
        away = [(life.engine, life.replica.away) for life in living if self._environments is not None]
        self.samples.append(
            FleetSample(
                at_s=self._stats.rl_s,
                generated_tokens=self.generated_tokens,
                kv_use=sum(state.kv_used / state.kv_capacity for state in states) / len(self._lives),
                engine_s=self._engine_s,
                away=sum(len(names) for _, names in away),
                slots_held=sum(len(names & engine.lengths().keys()) for engine, names in away),
            )
        )


async def _survey(life: ReplicaLife) -> Survey:
    return await life.replica.survey(life.engine.lengths)  # nothing is delivered after the first token
