"""A whole run in one process: real scheduler, ledger, replicas and migration; engines as the test has them.

Only processes, sockets and the learner are missing; a replica is killed by ending its task. With emulated engines
it runs in virtual time.
"""

import asyncio
import random
from pathlib import Path

import numpy as np

from laminar_lab.emulation.engine import EmulatedEngine
from laminar_lab.emulation.responses import Responses
from laminar_lab.emulation.settings import EngineTimes
from laminar_py.config.algorithm import Advantage
from laminar_py.config.rollout import OnNewWeights, Schedule, WithoutSignal
from laminar_py.control.groups import Credit
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import Admission, ControlSettings, StalenessBound
from laminar_py.learner.losses.advantages import group_advantages
from laminar_py.ledger.database import LEDGER_NAME, segments_path
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.salvage import salvage
from laminar_py.records.engine import SamplingParams
from laminar_py.records.events import (
    Interrupted,
    PartCrashed,
    PartStarted,
    Repacked,
)
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import Prompt
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.replica import Replica
from laminar_py.rollout.storing import SegmentStore
from tests.events import run_started, stepped, version_published
from tests.rollout.folders import Folders

TIMES = EngineTimes(step_s=0.02, kv_token_s=8e-8, prefill_tokens_per_s=25_000.0, load_s=0.5, reserve_tokens=60)
SPEED = EngineSpeed(step_s=0.02, step_s_per_sequence=0.0, step_s_per_token=8e-8, prefill_tokens_per_s=25_000.0)
VOCAB, MAX_LEN, CAP, KV, SLOTS = 99, 1700, 1640, 12_000, 16
LONG_TAIL = SamplingParams(max_new_tokens=CAP, stop_ids=(1,))
GROUP, BATCH = 4, 24  # trajectories of a group, and of a replica under one version


class LoopClock:
    def now(self):
        return asyncio.get_running_loop().time()


async def emulated():
    """A started engine without weights."""
    responses = Responses(VOCAB, max_len=MAX_LEN, median=150, sigma=0.99)
    room = {"max_batch": SLOTS, "max_len": MAX_LEN, "kv_capacity": KV}
    engine = EmulatedEngine(TIMES, responses, vocab=VOCAB, delta_interval_s=0.5, **room)
    await engine.start()
    return engine


class House:
    """`async with House(...) as house`, then `house.run_until(...)`; `house.kill(index)` at any time.

    `folder` has the weights of every version, `open_engine()` gives a started engine.
    """

    def __init__(
        self,
        run: Path,
        folder: Path,
        *,
        replicas=6,
        seed=0,
        planner="predictive",
        open_engine=emulated,
        sampling=LONG_TAIL,
        interval_s=2.0,
        pace=1.0,
        publishes=True,
    ):
        self.random = random.Random(seed)
        self.clock = LoopClock()
        self.ledger = Ledger(run / LEDGER_NAME, host="host-1", clock=self.clock)
        self.segments = segments_path(run)
        self.reader = PayloadReader(self.segments)
        self._labels: dict[int, str] = {}  # of the replicas, as their segments have them
        self.weights = Folders([folder], keep=3)
        self.replicas: dict[int, Replica] = {}
        self.kills = self.moved = self.num_salvaged = 0
        self.trajectories = {}  # that finished
        self._moved_running = set()
        self._open_engine = open_engine
        self._pace = pace  # factor on how long everything but the engines takes
        self._publishes = publishes  # else all replicas serve version 0 for good
        self._owner: dict[int, asyncio.Task] = {}
        self._num_replicas = replicas
        step = replicas * BATCH // GROUP
        self.scheduler = TrajectoryScheduler(
            ControlSettings(
                seed=seed,
                replicas=replicas,
                batch_per_replica=BATCH,
                group_size=GROUP,
                sampling=sampling,
                without_signal=WithoutSignal.TRAIN,
                one_version=True,
                admission=Admission(schedule=Schedule.ASYNC, batch=step, capacity=3 * step),
                bound=StalenessBound(None),
            ),
            prompt_at=_prompt,
            recorder=self,
            submit_for_scoring=self._submit_score,
            credit=Credit(group_advantages(Advantage.GROUP_STD)),
            clock=self.clock,
        )
        self._step_groups = step
        self.migration = Migration(
            MigrationSettings(
                planner=planner, interval_s=interval_s, max_stall_s=0.7, max_new_tokens=sampling.max_new_tokens
            ),
            scheduler=self.scheduler,
            fleet=self,
            published=self._next_version,
            clock=self.clock,
        )

    # ---- the recorder of the scheduler

    def append(self, event):
        if isinstance(event, Repacked):
            self.moved += event.num_running
        elif isinstance(event, Interrupted) and event.reason == "repacked" and event.length:
            self._moved_running.add(event.trajectory_id)
        self.ledger.append(event)

    def __getattr__(self, name):
        return getattr(self.ledger, name)  # store_prompt, store_tokens, ...

    # ---- life

    async def __aenter__(self):
        await self.ledger.start()
        self.append(run_started(drain=True))
        self._publish_event(0, None)
        self.scheduler.published(0)
        self.scheduler.admit()
        self._tasks = [asyncio.create_task(self._learn()), asyncio.create_task(self.migration.run(SPEED))]
        for index in range(self._num_replicas):
            self._owner[index] = asyncio.create_task(self._keep(index))
        return self

    async def __aexit__(self, *error):
        for task in [*self._tasks, *self._owner.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._owner.values(), return_exceptions=True)
        await self.ledger.close()
        self.reader.close()

    async def run_until(self, condition, *, kill_every_s=None):
        """Until then, with a random replica killed now and then."""
        next_kill = self.clock.now() + (kill_every_s or 0)
        while not condition():
            for task in [*self._tasks, *self._owner.values()]:
                if task.done():
                    task.result()
            await asyncio.sleep(0.25 * self._pace)
            if kill_every_s is not None and self.clock.now() > next_kill:
                next_kill = self.clock.now() + self.random.expovariate(1 / kill_every_s)
                self.kill(self.random.randrange(self._num_replicas))

    async def quiet(self):
        """No more rounds; what was moving arrives."""
        self._tasks.pop(1).cancel()
        await asyncio.sleep(2.0 * self._pace)

    @property
    def finished_after_a_move(self):
        """Trajectories that moved with tokens of theirs, and finished."""
        return [self.trajectories[name] for name in sorted(self._moved_running & self.trajectories.keys())]

    @property
    def promises(self):
        """Trajectories that replicas still expect."""
        return sum(len(replica._expected) for replica in self.replicas.values())

    def kill(self, index):
        """Its process is gone, with all that is not in its journal."""
        self.kills += 1
        self.append(PartCrashed(f"replica-{index}", "killed"))
        self.replicas.pop(index, None)
        self._owner[index].cancel()
        self._owner[index] = asyncio.create_task(self._keep(index, after_death=True))

    async def _keep(self, index, *, after_death=False):
        if after_death:
            await self.scheduler.incoming.on_replica_lost(index, self._salvage(index))
            self._hand_out()
            await asyncio.sleep(self.random.uniform(0.5, 5.0))
        engine = await self._open_engine()
        self._labels[index] = label = f"replica-{index}-1-{self.kills}"
        replica = Replica(
            index,
            engine=engine,
            weights=self.weights,
            store=SegmentStore(self.segments, label, self.reader),
            clock=self.clock,
            on_new_weights=OnNewWeights.DRAIN,
            batch=BATCH,
            max_batch=SLOTS,
            partial_interval_s=1.0,
            initial=self.scheduler.dispatcher.for_starting(index),
        )
        running = asyncio.create_task(replica.run())
        self.replicas[index] = replica
        self.append(PartStarted(f"replica-{index}", 7))
        try:
            while True:
                report = await replica.next_report(1.0)
                await self.scheduler.incoming.on_report(report)
                self._hand_out()
        finally:
            running.cancel()
            await engine.close()

    def _salvage(self, index):
        """What a dead replica had of its trajectories and told nobody."""
        running, label = self.scheduler.incoming.running_on(index), self._labels.get(index)
        if label is None:
            return []
        found = salvage(self.segments, label, running).found
        self.num_salvaged += len(found)
        return found

    def _hand_out(self):
        for index, assignments in self.scheduler.dispatcher.dispatch().items():
            self.replicas[index].start_assignments(assignments)
        for index, names in self.scheduler.moves.take_called_off().items():
            if index in self.replicas:
                self.replicas[index].call_off(names)

    # ---- `migration.ReplicaFleet`

    async def survey(self, replica):
        await self._delay()
        return await self.replicas[replica].survey() if replica in self.replicas else None

    async def expect(self, replica, version, names):
        await self._delay()
        return replica in self.replicas and self.replicas[replica].expect(version, names)

    def give_up(self, replica, trajectory_ids):
        if replica in self.replicas:
            self._tasks.append(asyncio.create_task(self._give_up(self.replicas[replica], trajectory_ids)))

    async def _give_up(self, replica, trajectory_ids):
        await self._delay()
        await replica.give_up(trajectory_ids)

    async def _delay(self):
        await asyncio.sleep(self._pace * self.random.choice([0.0, 0.01, 0.3]))

    # ---- reward and learner

    def _submit_score(self, trajectory, prompt):
        self.trajectories[trajectory.id] = trajectory
        self.migration.finished(trajectory)
        self._tasks.append(asyncio.create_task(self._score(trajectory.id)))
        self._tasks[2:] = [task for task in self._tasks[2:] if not task.done() or task.exception()]

    async def _score(self, trajectory_id):
        await asyncio.sleep(0.05 * self._pace)
        await self.scheduler.incoming.on_score(
            Score(trajectory_id=trajectory_id, value=float(self.random.random() < 0.5))
        )

    async def _learn(self):
        step = 0
        while True:
            batch = await self.scheduler.next_batch(
                groups=self._step_groups, version=step if self._publishes else 0
            )
            await asyncio.sleep(self._pace)
            step += 1
            await self.scheduler.consumption.commit(batch, step)
            self.append(stepped(step, num_trajectories=len(batch.trajectories), num_tokens=1))
            if self._publishes:
                self._publish_event(step, step - 1)
                self.scheduler.published(step)
                await self.weights.publish(step)

    def _publish_event(self, version, parent):
        self.append(version_published(version, parent=parent))

    async def _next_version(self, known):
        return await self.weights.wait_newer(known)


def _prompt(index):
    ids = np.random.default_rng(index).integers(10, 60, 40).astype(np.int32)
    return Prompt(id=f"p{index}", index=index, text=f"prompt {index}", ids=ids, answer="4")
