"""The replicas of a simulation, and what goes between them and the scheduler.

Each is a `rollout.replica.Replica` on an emulated engine, in this process and on its virtual clock; what it says
and hears takes the time of the link. Invariant: reports and orders come in the order in which they were sent, also
those of one moment, of which the event loop's timers keep no order; surveys and promises go beside them.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import msgspec

from laminar_py.config.emulated_profile import EngineTimes
from laminar_py.config.emulation import EmulationConfig
from laminar_py.config.run import RunConfig
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.tick import DISPATCH_S, Tick
from laminar_py.engines.emulated.engine import EmulatedEngine
from laminar_py.engines.emulated.responses import Responses
from laminar_py.records.protocols import Clock
from laminar_py.records.replica import Held, ReplicaReport, Survey
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.replica import Replica
from laminar_py.simulate.figures import FleetSample
from laminar_py.simulate.parts import CountedTokens, ModelledWeights
from laminar_py.telemetry.stats import Stats

SAMPLE_S = 5.0  # emulated, between looks at all engines
VOCAB, END = 256, 1  # tokens that nobody reads, and the one that ends a response
NEVER_S = 1e12


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
    ) -> None:
        assert config.emulation is not None, "a simulation has emulated engines"
        self._config, self._emulation, self._times = config, config.emulation, times
        self._hop_s, self._order_s = config.simulation.hop_s, config.simulation.order_s
        self._scheduler = scheduler
        self._weights = weights
        self._stats = stats
        self._clock = clock
        self._tick = Tick(self._hand_out, every_s=DISPATCH_S)
        self._replicas: list[Replica] = []
        self._engines: list[EmulatedEngine] = []
        self.samples: list[FleetSample] = []
        self._responses = responses(config, config.emulation)
        # on their way, until the moment beside each; what was said in `hop_s`, and ordered in `order_s`
        self._reports: asyncio.Queue[tuple[float, ReplicaReport]] = asyncio.Queue()
        self._orders: asyncio.Queue[tuple[float, Callable[[], object]]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._opened = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for index in range(self._config.rollout.replicas):
                replica = await self._open(index)
                self._replicas.append(replica)
                tasks.create_task(replica.run(), name=f"replica-{index}")
                tasks.create_task(self._report(replica), name=f"reports-{index}")
            tasks.create_task(self._take_in(), name="take-in")
            tasks.create_task(self._carry_out(), name="carry-out")
            tasks.create_task(self._tick.run(), name="dispatch")
            tasks.create_task(self._keep_sampling(), name="sample")
            self._tasks = tasks
            self._opened.set()

    def wake(self) -> None:
        """Have what the scheduler has for replicas handed out soon."""
        self._tick.wake()

    async def speed(self) -> EngineSpeed:
        """Speed of the engines, measured on the first one before it has anything to do."""
        await self._opened.wait()
        rollout = self._config.rollout
        sampling = rollout.sampling.params(stop_ids=(END,))
        speed, _ = await self._replicas[0].measure_speed(vocab=VOCAB, max_len=rollout.max_len, sampling=sampling)
        return speed.keeping_to(self._config.repack.roofline_batch)

    # ---- `migration.ReplicaFleet`

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.ReplicaFleet.survey`."""
        await asyncio.sleep(self._order_s)
        survey = await self._replicas[replica].survey()
        lengths = self._engines[replica].lengths()  # of which nothing was delivered after the first token
        await asyncio.sleep(self._hop_s)
        running = tuple(_grown(held, lengths.get(held.trajectory_id, held.length)) for held in survey.running)
        return msgspec.structs.replace(survey, running=running)

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""
        await asyncio.sleep(self._order_s)
        promised = self._replicas[replica].expect(version, trajectory_ids)
        await asyncio.sleep(self._hop_s)
        return promised

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        self._order(partial(self._begin, self._replicas[replica].give_up, list(trajectory_ids)))

    # ---- reports and orders

    async def _open(self, index: int) -> Replica:
        rollout, emulation = self._config.rollout, self._emulation
        engine = EmulatedEngine(
            self._times,
            self._responses,
            vocab=VOCAB,
            max_batch=rollout.max_batch,
            max_len=rollout.max_len,
            kv_capacity=rollout.kv_tokens,
            compression=emulation.compression,
            late_s=emulation.start_spread_s * index / rollout.replicas,
            delta_interval_s=NEVER_S,
            checksum=lambda folder: "",
        )
        await engine.start()
        self._engines.append(engine)
        return Replica(
            index,
            engine=engine,
            weights=self._weights,
            store=CountedTokens(),
            clock=self._clock,
            on_new_weights=rollout.on_new_weights,
            batch=rollout.batch_per_replica,
            max_batch=rollout.max_batch,
            partial_interval_s=NEVER_S,
        )

    async def _report(self, replica: Replica) -> None:
        while True:
            report = await replica.collect(NEVER_S)
            self._reports.put_nowait((self._loop.time() + self._hop_s, report))

    async def _take_in(self) -> None:
        while True:
            due_s, report = await self._reports.get()
            await asyncio.sleep(due_s - self._loop.time())
            views = self._scheduler.views
            version = views.by_index[report.replica].version
            await self._scheduler.reports.on_report(report)
            self._stats.on_report(report)
            self._stats.generating(views.in_flight > 0)
            if views.by_index[report.replica].idle or report.status.version != version:
                self._tick.at_once()
            else:
                self._tick.wake()

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S / self._emulation.compression)
            self.sample()

    def sample(self) -> None:
        """Note what the engines are at now."""
        states = [engine.status() for engine in self._engines]
        self.samples.append(
            FleetSample(
                at_s=self._stats.rl_s,
                generated_tokens=sum(engine.num_tokens for engine in self._engines),
                kv_use=sum(state.kv_used / state.kv_capacity for state in states) / len(states),
            )
        )

    def _hand_out(self) -> None:
        scheduler = self._scheduler
        for index, names in scheduler.book.take_aborts().items():
            self._order(partial(self._begin, self._replicas[index].abort, list(names)))
        for index, assignments in scheduler.dispatcher.dispatch().items():
            self._order(partial(self._replicas[index].submit, assignments))
        for index, names in scheduler.moves.take_called_off().items():
            self._order(partial(self._replicas[index].call_off, list(names)))
        self._stats.generating(scheduler.views.in_flight > 0)
        if scheduler.dispatcher.has_more:
            self._tick.wake()

    def _order(self, obey: Callable[[], object]) -> None:
        """Have a replica obey once the order has come there."""
        self._orders.put_nowait((self._loop.time() + self._order_s, obey))

    async def _carry_out(self) -> None:
        while True:
            due_s, obey = await self._orders.get()
            await asyncio.sleep(due_s - self._loop.time())
            obey()

    def _begin(self, obey: Callable[[list[str]], Coroutine[object, object, None]], names: list[str]) -> None:
        self._tasks.create_task(obey(names), name="order")


def _grown(held: Held, length: int) -> Held:
    return Held(held.trajectory_id, held.context + length - held.length, length)


def responses(config: RunConfig, emulation: EmulationConfig) -> Responses:
    """Lengths of the responses."""
    return Responses(VOCAB, max_len=config.rollout.max_len, median=emulation.median_tokens, sigma=emulation.sigma)
