"""A scheduler with pretend replicas that finish what they are given, on a clock that the test moves."""

import asyncio

import msgspec
import numpy as np

from laminar_py.config.algorithm import Advantage
from laminar_py.config.rollout import WithoutSignal
from laminar_py.config.staleness import Schedule
from laminar_py.control.book import ControlSettings
from laminar_py.control.closing import Credit, Stages
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.staleness import Admission, StalenessBound
from laminar_py.learner.losses.advantages import group_advantages
from laminar_py.records.ages import WeightAges
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.replica import Progress, ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import Break, FinishReason, Span
from tests.builders import make_prompt

NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


async def settle():
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def broken_off(item, *, generate_s):
    """New weights break the stream of an assignment off, after so many seconds."""
    return Progress(
        trajectory_id=item.trajectory_id,
        epoch=item.epoch,
        start=len(item.prefix_ids),
        ids=NO_IDS,
        logprobs=NO_LOGPROBS,
        spans=(),
        broken=Break.NEW_WEIGHTS,
        generate_s=generate_s,
    )


def ages_of(versions):
    """Ages of versions that were published a step after another."""
    ages = WeightAges()
    for version in versions:
        ages.published(version)
        ages.stepped(learned=True)
    return ages


class Log:
    """Keeps events in memory; `tests/orchestrator` uses the real ledger."""

    def __init__(self):
        self.events = []
        self.masks = []  # of all segments
        self.experts = []

    def append(self, event):
        self.events.append(event)

    def store_prompt(self, prompt):
        pass

    def store_segment(self, trajectory_id, start, spans, ids, logprobs, *, sampling_mask, routed_experts):
        self.masks += [] if sampling_mask is None else [sampling_mask]
        self.experts += [] if routed_experts is None else [routed_experts]

    def store_columns(self, trajectory_id, columns):
        pass


class ManualClock:
    """Time that moves when told."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


class Fleet:
    """A scheduler, replicas with `versions[i]`, and what was assigned to them."""

    def __init__(
        self,
        *,
        replicas=2,
        batch_per_replica=64,
        group_size=4,
        batch=4,
        capacity=16,
        schedule=Schedule.ASYNC,
        max_staleness=None,
        policies=(),
        recorder=None,
        refers=False,
        length_cost=lambda length: 0.0,
        **settings,
    ):
        self.clock = ManualClock()
        self.log = recorder or Log()
        self.unscored = []
        self.unreferred = []
        self.told = []  # rewards of groups, as the stream of prompts hears them
        self.versions = dict.fromkeys(range(replicas), 0)
        self.received = dict.fromkeys(range(replicas), 0)
        self.running = {index: {} for index in range(replicas)}
        options = {"without_signal": WithoutSignal.TRAIN, "one_version": True, **settings}
        self.scheduler = TrajectoryScheduler(
            ControlSettings(
                seed=0,
                replicas=replicas,
                batch_per_replica=batch_per_replica,
                group_size=group_size,
                sampling=SamplingParams(max_new_tokens=16),
                admission=Admission(
                    schedule=schedule, batch=batch, capacity=capacity, max_staleness=max_staleness
                ),
                bound=StalenessBound(max_staleness, policies),
                **options,
            ),
            prompt_at=make_prompt,
            tell=self.told.append,
            recorder=self.log,
            stages=Stages(
                submit_score=lambda trajectory, prompt: self.unscored.append(trajectory),
                submit_reference=self.unreferred.append if refers else None,
            ),
            credit=Credit(group_advantages(Advantage.GROUP_STD), length_cost),
            clock=self.clock,
        )
        self.scheduler.admit()
        self.scheduler.published(0)

    def learned(self, version):
        """The learner makes a step before each version up to this one."""
        for newer in range(self.scheduler.book.newest_version + 1, version + 1):
            self.scheduler.book.ages.stepped(learned=True)
            self.scheduler.published(newer)

    async def report(self, index, *, progress=(), admissible=64, lost=()):
        """Replica `index` speaks, then is given what there is for it."""
        status = EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=self.versions[index])
        received = self.received[index]
        report = ReplicaReport(
            replica=index,
            status=status,
            admissible=admissible,
            received=received,
            progress=tuple(progress),
            lost=lost,
        )
        await self.scheduler.reports.on_report(report)
        self.hand_out()

    def hand_out(self):
        for index, assignments in self.scheduler.dispatcher.dispatch().items():
            self.received[index] += sum(item.version is None for item in assignments)
            self.running[index].update({item.trajectory_id: item for item in assignments})

    async def refer_all(self):
        """The reference stage delivers all that it was given."""
        while self.unreferred:
            trajectory = self.unreferred.pop()
            await self.scheduler.closing.on_reference(trajectory.id, np.full_like(trajectory.logprobs, -2.0))

    async def grow(self, index, trajectory_id, *, tokens):
        """A replica reports `tokens` more of a trajectory that goes on."""
        item = self.running[index][trajectory_id]
        version = self.versions[index] if item.version is None else item.version
        start = len(item.prefix_ids)
        ids, logprobs = np.arange(tokens, dtype=np.int32), np.full(tokens, -0.5, np.float32)
        spans = (Span(version, start, start + tokens),)
        self.running[index][trajectory_id] = msgspec.structs.replace(
            item, prefix_ids=np.concatenate([item.prefix_ids, ids])
        )
        await self.report(
            index,
            progress=[
                Progress(
                    trajectory_id=trajectory_id,
                    epoch=item.epoch,
                    start=start,
                    ids=ids,
                    logprobs=logprobs,
                    spans=spans,
                )
            ],
        )

    async def finish(
        self, index, trajectory_id, *, tokens=3, reason=FinishReason.STOP, epoch=None, generate_s=0.0, **report
    ):
        """A replica generates `tokens` more and ends the trajectory."""
        item = self.running[index].pop(trajectory_id)
        version = self.versions[index] if item.version is None else item.version
        start = len(item.prefix_ids)
        progress = Progress(
            trajectory_id=trajectory_id,
            epoch=item.epoch if epoch is None else epoch,
            start=start,
            ids=np.arange(tokens, dtype=np.int32),
            logprobs=np.full(tokens, -0.5, np.float32),
            spans=(Span(version, start, start + tokens),) if tokens else (),
            finish_reason=reason,
            generate_s=generate_s,
        )
        await self.report(index, progress=[progress], **report)

    async def refuse(self, index, trajectory_id):
        """The engine does not take it."""
        item = self.running[index].pop(trajectory_id)
        start = len(item.prefix_ids)
        await self.report(
            index,
            progress=[
                Progress(
                    trajectory_id=trajectory_id,
                    epoch=item.epoch,
                    start=start,
                    ids=NO_IDS,
                    logprobs=NO_LOGPROBS,
                    spans=(),
                    refusal="too long",
                )
            ],
        )

    async def finish_all(self, index, **report):
        for trajectory_id in list(self.running[index]):
            await self.finish(index, trajectory_id, **report)

    async def score_all(self, reward=lambda index: float(index % 2)):
        """Every finished trajectory gets a reward by its place in the group."""
        waiting, self.unscored = self.unscored, []
        for trajectory in waiting:
            await self.scheduler.closing.on_score(
                Score(trajectory_id=trajectory.id, value=reward(trajectory.sample_index))
            )
