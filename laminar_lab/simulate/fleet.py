"""The replicas of a simulation, and the messages between replicas and scheduler.

Each replica is a `rollout.Replica` on an emulated engine, in this process and on its virtual clock. Reports,
orders, surveys and their answers take the time of the link (`DelayedChannel`). States of a replica:

    LIVES -> CRASHED   the replica crashes: the scheduler learns of the loss as in a run, with the journal's tokens
    CRASHED -> LIVES `rollout.engine.simulation.restart_s` later a new replica has the same index

A crashed replica sends and receives no message. On devices that it shares with the learner it starts in the
replicas' turn (`runtime.workers.shared`).
"""

import asyncio
import math
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np

from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import Responses, environments_of
from laminar_lab.emulation.settings import EngineTimes, emulation_of
from laminar_lab.simulate.figures import FleetSample
from laminar_lab.simulate.weights import ModelledWeights
from laminar_py.config import RunConfig
from laminar_py.control import DISPATCH_S, Throttle, TrajectoryScheduler
from laminar_py.ledger.segments import Payload, RecordedProgress, Salvaged, continuations, salvaged
from laminar_py.observe import Stats
from laminar_py.records import GenerateRequest, PauseMode
from laminar_py.records.engine import EarlierText
from laminar_py.records.events import PartCrashed, PartStarted
from laminar_py.records.host import Clock
from laminar_py.records.pieces import COUNTED, Piece, TokensRef
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.repack import EngineSpeed
from laminar_py.rollout import Replica
from laminar_py.runtime.workers import SharedReplicas

T = TypeVar("T")
SAMPLE_S = 5.0  # emulated, between two samples of the fleet
VOCAB, END = 256, 1  # size of the vocabulary, and the token that ends a response
NEVER_S = 1e12
FAILED = "failed in the simulation"
NO_PROCESS = 0  # in place of a process id


class CountedTokens:
    """A store that counts tokens; `responses` can make their ids again. See `rollout.storing.ResponseStore`."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._journal: dict[str, list[Piece]] = {}

    def keep(self, piece: Piece) -> TokensRef:
        """Return a reference to a number of tokens without their ids."""
        return TokensRef(piece.start, piece.end, COUNTED)

    def journal(self, pieces: Sequence[Piece]) -> None:
        """Keep the tokens of running trajectories for `salvage`."""
        for piece in pieces:
            self._journal.setdefault(piece.trajectory_id, []).append(piece)

    def forget(self, trajectory_id: str) -> None:
        """Drop the journal of a trajectory that the replica has reported whole."""
        self._journal.pop(trajectory_id, None)

    def salvage(self, running: Mapping[str, RecordedProgress]) -> list[Salvaged]:
        """Return the journal's unreported tokens of running trajectories, after a crash."""
        pieces = (piece for noted in self._journal.values() for piece in noted)
        return [salvaged(piece, COUNTED) for piece in continuations(pieces, running)]

    async def read_earlier(self, assignment: Assignment) -> tuple[EarlierText, ...]:
        """Return none: an emulated engine makes no drafts."""
        return ()

    async def read(self, assignment: Assignment) -> Payload:
        """Return the tokens from which an assignment continues."""
        request = GenerateRequest(
            rid=assignment.trajectory_id,
            group_id=assignment.group_id,
            prompt_ids=assignment.prompt_ids,
            prefix_ids=np.empty(0, np.int32),
            sampling=assignment.sampling,
        )
        ids, spans = self._responses.made(request, assignment.length)
        return Payload(ids=ids, logprobs=np.zeros(len(ids), np.float32), spans=spans)

    async def synced(self) -> None:
        """Return at once: nothing is on disk."""

    async def keep_synced(self) -> None:
        """Wait until cancelled: nothing is on disk."""
        await asyncio.Event().wait()


class DelayedChannel:
    """One direction of the link between controller and replicas: each message arrives `delay_s` after it is sent.

    Messages keep their order. The queue holds only messages of the last `delay_s` seconds, so it stays bounded.
    """

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._loop = asyncio.get_running_loop()
        self._sent: deque[tuple[float, Callable[[], Awaitable[None]]]] = deque()
        self._any = asyncio.Event()

    def send(self, arrive: Callable[[], Awaitable[None]]) -> None:
        """Call `arrive` after `delay_s`."""
        self._sent.append((self._loop.time() + self._delay_s, arrive))
        self._any.set()

    async def run(self) -> None:
        """Deliver messages until cancelled."""
        while True:
            await self._any.wait()
            self._any.clear()
            while self._sent:
                due_s, arrive = self._sent.popleft()
                if due_s > self._loop.time():
                    due = self._loop.create_future()
                    self._loop.call_at(due_s, _end_wait, due)
                    await due
                await arrive()


def _end_wait(wait: asyncio.Future[None]) -> None:
    """End a wait, unless the waiting task was cancelled."""
    if not wait.done():
        wait.set_result(None)


@dataclass(slots=True, eq=False)
class ReplicaLife:
    """A replica from its start to its crash."""

    replica: Replica
    engine: EmulatedEngine
    store: CountedTokens
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def lives(self) -> bool:
        """Whether it has not crashed."""
        return not self.ended.is_set()


class SimulatedKeeper:
    """A replica that shares devices with the learner, as `SharedReplicas` sees its keeper."""

    def __init__(self, fleet: "SimulatedFleet", index: int) -> None:
        self._fleet = fleet
        self._index = index

    @property
    def connection(self) -> "SimulatedKeeper | None":
        """None while the replica is down."""
        return self if self._fleet.is_up(self._index) else None

    @property
    def in_flight(self) -> Collection[str]:
        """See `SharedKeeper.in_flight`."""
        return self._fleet.in_flight(self._index)

    def follow_gpus(self) -> None:
        """See `SharedKeeper.follow_gpus`: the simulated learner stays on its GPUs."""

    async def hold(self, mode: PauseMode) -> None:
        """See `HeldConnection.hold`."""
        await self._fleet.have_done(self._index, lambda replica: replica.hold(mode))

    async def unhold(self) -> None:
        """See `HeldConnection.unhold`."""
        await self._fleet.have_done(self._index, lambda replica: replica.unhold())


class SimulatedFleet:
    """Replicas on a virtual clock; `repack.Migration` asks them as the `ReplicaFleet` of a run."""

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
        self._config, self._emulation, self._times = config, emulation_of(config), times
        self._scheduler = scheduler
        self._weights = weights
        self._stats = stats
        self._clock = clock
        self._tick = Throttle(self._send_orders, every_s=DISPATCH_S)
        self._lives: list[ReplicaLife] = []
        self._ended_tokens, self._ended_s, self._ended_recomputed_s = 0, 0.0, 0.0  # of crashed replicas' engines
        self.samples: list[FleetSample] = []
        self.num_reports = 0  # that the scheduler has received
        self.failures: list[tuple[float, int]] = []  # seconds of RL, and the replica
        self._responses = Responses.from_config(config, VOCAB)
        self._environments = environments_of(config)  # they keep their state when a replica crashes
        self._reports = DelayedChannel(self._emulation.simulation.hop_s)
        self._orders = DelayedChannel(self._emulation.simulation.order_s)
        self._opened, self._rl = asyncio.Event(), asyncio.Event()
        keepers = [SimulatedKeeper(self, index) for index in range(config.rollout.replicas)]
        self.shared = SharedReplicas(keepers, config, scheduler.state.live)

    async def run(self) -> None:
        """Run all replicas until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for index in range(self._config.rollout.replicas):
                late_s = self._emulation.start_spread_s * index / self._config.rollout.replicas
                self._lives.append(await self._start_replica(index, late_s=late_s))
                tasks.create_task(self._keep_replica(index), name=f"keep-replica-{index}")
            tasks.create_task(self._reports.run(), name="reports")
            tasks.create_task(self._orders.run(), name="orders")
            tasks.create_task(self._tick.run(), name="dispatch")
            tasks.create_task(self._keep_sampling(), name="sample")
            self._opened.set()

    def wake(self) -> None:
        """Send the scheduler's orders to replicas soon."""
        self._tick.wake()

    def begin_rl(self) -> None:
        """Start to send training trajectories; replicas crash only from now on."""
        self._rl.set()
        self._tick.wake()

    async def stop(self) -> None:
        """Interrupt all replicas, and wait until they have reported all of their tokens."""
        for life in self._lives:
            self._send_order(life, partial(self._start_task, partial(life.replica.stop, evaluations=True)))
        while self._scheduler.views.in_flight:
            self._stats.next_report.clear()
            await self._stats.next_report.wait()

    async def speed(self) -> EngineSpeed:
        """Measure the speed of the first replica's idle engine."""
        await self._opened.wait()
        rollout = self._config.rollout
        sampling = rollout.sampling.params(stop_ids=(END,))
        speed, _ = await self._lives[0].replica.measure_speed(
            vocab=VOCAB, max_len=rollout.max_len, sampling=sampling
        )
        return speed

    @property
    def generated_tokens(self) -> int:
        """Tokens of all engines, as of the last sample."""
        return self._ended_tokens + sum(life.engine.num_tokens for life in self._lives if life.lives)

    @property
    def _engine_s(self) -> float:
        return self._ended_s + sum(life.engine.busy_s for life in self._lives if life.lives)

    @property
    def recomputed_s(self) -> float:
        """Emulated seconds of all engines for caches that a pause dropped, as of the last sample."""
        return self._ended_recomputed_s + sum(life.engine.recomputed_s for life in self._lives if life.lives)

    @property
    def is_short(self) -> bool:
        """Whether a crashed replica will come back."""
        return any(not life.lives for life in self._lives)

    @property
    def restarts(self) -> dict[str, int]:
        """Crashes by replica."""
        return dict(sorted(Counter(f"replica-{index}" for _, index in self.failures).items()))

    # ---- `migration.ReplicaFleet`

    async def survey(self, replica: int) -> Survey | None:
        """See `migration.ReplicaFleet.survey`."""
        return await self._call_replica(replica, _survey)

    async def expect(self, replica: int, version: int, trajectory_ids: Sequence[str]) -> bool:
        """See `migration.ReplicaFleet.expect`."""

        async def promise(life: ReplicaLife) -> bool:
            return life.replica.expect(version, trajectory_ids)

        return bool(await self._call_replica(replica, promise))

    def give_up(self, replica: int, trajectory_ids: Sequence[str]) -> None:
        """See `migration.ReplicaFleet.give_up`."""
        life = self._lives[replica]
        self._send_order(life, partial(self._start_task, partial(life.replica.give_up, list(trajectory_ids))))

    # ---- turns on shared devices, called by `SimulatedKeeper`

    def is_up(self, index: int) -> bool:
        """Return whether a replica has a process."""
        return index < len(self._lives) and self._lives[index].lives

    def in_flight(self, index: int) -> Collection[str]:
        """Return the ids of the trajectories that the scheduler has assigned to a replica."""
        return self._scheduler.views.by_index[index].in_flight

    async def have_done(self, index: int, work: Callable[[Replica], Coroutine[object, object, None]]) -> None:
        """Have a replica do `work`; return when its answer is here, or the replica has crashed."""
        life, answered = self._lives[index], asyncio.Event()

        async def answer() -> None:
            answered.set()

        async def obey() -> None:
            await work(life.replica)
            if life.lives:
                self._reports.send(answer)

        self._send_order(life, partial(self._start_task, obey))
        ends = [asyncio.create_task(event.wait()) for event in (answered, life.ended)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    # ---- start and crash

    async def _start_replica(self, index: int, *, late_s: float) -> ReplicaLife:
        """Start the emulated engine, serving after `late_s`, and make the production replica around it.

        Records the start in the ledger's state.
        """
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
        )
        await engine.start()
        self._stats.add_replica(index)
        self._scheduler.state.record(PartStarted(f"replica-{index}", NO_PROCESS))
        replica = Replica(
            index,
            engine=engine,
            weights=self._weights.weights_for(index),
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

    async def _keep_replica(self, index: int) -> None:
        """Run a replica, and start a new one after each crash."""
        draw = random.Random(f"{self._config.seed}/failures/{index}")
        down_s = self._emulation.simulation.restart_s - self._times.load_s / self._emulation.compression
        while True:
            life = self._lives[index]
            serving = self._tasks.create_task(self._serve(life), name=f"replica-{index}")
            await self._until_failure(life, draw)
            life.engine.status()  # counts the tokens up to this moment
            life.ended.set()
            self._ended_tokens += life.engine.num_tokens
            self._ended_s += life.engine.busy_s
            self._ended_recomputed_s += life.engine.recomputed_s
            serving.cancel()
            await asyncio.wait([serving])
            await self._recover_trajectories(index, life)
            async with self.shared.starting(index):
                await asyncio.sleep(max(0.0, down_s))
                self._lives[index] = await self._start_replica(index, late_s=0.0)

    async def _serve(self, life: ReplicaLife) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(life.replica.run(), name="run")
            while True:
                report = await life.replica.next_report(math.inf)
                self._reports.send(partial(self._receive_report, life, report))

    async def _until_failure(self, life: ReplicaLife, draw: random.Random) -> None:
        """Wait until the replica crashes; write its journal at the last regular time before the crash."""
        mtbf_s = self._emulation.simulation.replica_mtbf_s
        interval_s = self._config.rollout.partial_interval_s
        await self._rl.wait()
        lives_s = NEVER_S if mtbf_s is None else draw.expovariate(1.0 / mtbf_s)
        noted_s = math.floor(lives_s / interval_s) * interval_s
        await asyncio.sleep(noted_s)
        life.engine.deliver()
        await asyncio.sleep(0)  # lets the replica take the tokens that the engine has just delivered
        life.replica.journal_partials()
        await asyncio.sleep(lives_s - noted_s)

    async def _recover_trajectories(self, index: int, life: ReplicaLife) -> None:
        """Return the trajectories of a crashed replica to the scheduler, as far as its journal has them."""
        reports = self._scheduler.incoming
        await life.engine.close()
        self._weights.forget_replica(index)
        self.failures.append((self._stats.rl_s, index))
        self._scheduler.views.retire(index)
        found = life.store.salvage(reports.running_on(index))
        await reports.on_replica_lost(index, found)
        self._scheduler.state.record(PartCrashed(f"replica-{index}", FAILED))
        self._stats.next_report.set()  # `stop` may wait for the trajectories of the crashed replica
        self._tick.run_now()

    # ---- reports and orders

    async def _receive_report(self, life: ReplicaLife, report: ReplicaReport) -> None:
        """Pass a report to the scheduler and wake the orders. Drops the report of a crashed replica.

        An idle replica, or a replica with new weights, gets its orders at once; others wait for the next tick.
        """
        if not life.lives:
            return
        self.num_reports += 1
        views = self._scheduler.views
        version = views.by_index[report.replica].version
        await self._scheduler.incoming.on_report(report)
        self._stats.on_report(report)
        self._stats.set_generating(views.in_flight > 0)
        if views.by_index[report.replica].idle or report.status.version != version:
            self._tick.run_now()
        else:
            self._tick.wake()

    def _send_orders(self) -> None:
        """Send aborts, new assignments and withdrawn moves over the link; ask for another tick if more is left."""
        scheduler = self._scheduler
        for index, names in scheduler.state.take_aborts().items():
            life = self._lives[index]
            self._send_order(life, partial(self._start_task, partial(life.replica.abort, list(names))))
        for index, assignments in scheduler.dispatcher.dispatch().items():
            life = self._lives[index]
            self._send_order(life, partial(life.replica.start_assignments, assignments))
        for index, names in scheduler.moves.take_called_off().items():
            life = self._lives[index]
            self._send_order(life, partial(life.replica.call_off, list(names)))
        self._stats.set_generating(scheduler.views.in_flight > 0)
        if scheduler.dispatcher.has_more:
            self._tick.wake()

    def _send_order(self, life: ReplicaLife, obey: Callable[[], object]) -> None:
        """Call `obey` when the order has reached the replica, unless the replica has crashed by then."""

        async def arrive() -> None:
            if life.lives:
                obey()

        self._orders.send(arrive)

    def _start_task(self, obey: Callable[[], Coroutine[object, object, None]]) -> None:
        self._tasks.create_task(obey(), name="order")

    async def _call_replica(self, replica: int, answer: Callable[[ReplicaLife], Awaitable[T]]) -> T | None:
        """Return a replica's answer, after all earlier messages both ways; None from a crashed replica."""
        life, answered = self._lives[replica], asyncio.get_running_loop().create_future()

        async def arrive() -> None:
            value = await answer(life) if life.lives else None
            self._reports.send(partial(receive, value))

        async def receive(value: T | None) -> None:
            if not answered.done():  # done: the asking task was cancelled
                answered.set_result(value if life.lives else None)

        self._orders.send(arrive)
        found: T | None = await answered
        return found

    # ---- samples

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S / self._emulation.compression)
            self.sample()

    def sample(self) -> None:
        """Record the state of the fleet; crashed replicas hold nothing."""
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
                recomputed_s=self.recomputed_s,
            )
        )


async def _survey(life: ReplicaLife) -> Survey:
    return await life.replica.survey(life.engine.lengths)  # the engine delivers no token during the survey
