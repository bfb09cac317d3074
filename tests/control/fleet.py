"""A scheduler with pretend replicas that finish what they are given, on a clock that the test moves."""

import asyncio
from functools import partial

import msgspec
import numpy as np

from laminar_py.config.algorithm import Advantage
from laminar_py.config.data import DataConfig
from laminar_py.config.rollout import Schedule, WithoutSignal
from laminar_py.control.groups import Credit
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.settings import Admission, ControlSettings, StalenessBound
from laminar_py.data.draws import Draws
from laminar_py.learner.losses.advantages import group_advantages
from laminar_py.ledger.machine import Machine
from laminar_py.ledger.segments.salvage import Salvaged
from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.ages import WeightAges
from laminar_py.records.columns import Dtype
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.pieces import ColumnRef, Piece, PieceRef, TokensRef
from laminar_py.records.replica import Progress, ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason, FinishReason, InterruptReason
from tests.builders import make_prompt, make_ref

ROWS = 1 << 20  # of the endless source


class Endless:
    """A source whose row at each place is the place, e.g. "p7"."""

    def __len__(self):
        return ROWS

    @property
    def sizes(self):
        return np.broadcast_to(np.int64(1), ROWS)

    def find(self, id):
        return int(id[1:])

    def id(self, place):
        return f"p{place}"


REFERENCE = "reference-0-1-0.1"  # segment of the reference model's columns


def segment_of(replica):
    """The segment that a pretend replica writes to."""
    return f"replica-{replica}-1-0.1"


def make_tokens(start, end, *, replica=0, routed=0):
    """Reference to response tokens that nobody wrote; no two have the same digest."""
    digest = f"{replica}/{start}/{end}/{routed}".encode().ljust(16)[:16]
    return TokensRef(start, end, PieceRef(segment_of(replica), start, 8 * (end - start), digest), routed)


async def settle():
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)


def broken_off(item, *, generate_s):
    """New weights break the stream of an assignment off, after so many seconds."""
    return Progress(
        trajectory_id=item.trajectory_id,
        epoch=item.epoch,
        start=item.length,
        broken=InterruptReason.NEW_WEIGHTS,
        generate_s=generate_s,
    )


def ages_of(versions):
    """Ages of versions that were published a step after another."""
    ages = WeightAges()
    for version in versions:
        ages.record_version(version)
        ages.record_step(learned=True)
    return ages


def make_piece(item, start, end, spans):
    """Response tokens of an assignment, each of which is its place."""
    return Piece(
        trajectory_id=item.trajectory_id,
        epoch=item.epoch,
        start=start,
        spans=spans,
        ids=np.arange(start, end, dtype=np.int32).tobytes(),
        logprobs=np.full(end - start, -0.5, np.float32).tobytes(),
    )


class Log:
    """Keeps events in memory; `tests/orchestrator` uses the real ledger."""

    def __init__(self):
        self.events = []
        self.machine = Machine()
        self.store_tokens = self.machine.store_tokens
        self.store_columns = self.machine.store_columns

    def append(self, event):
        self.machine.apply(len(self.events) + 1, event, wall=0.0, mono=0.0)
        self.events.append(event)

    def store_prompt(self, prompt):
        pass


class ManualClock:
    """Time that moves when told."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        return self.time


class Fleet:
    """A scheduler, replicas with `versions[i]`, and what was assigned to them.

    Where there is a folder for `segments` they write their tokens there, which are their places.
    """

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
        publish_every=1,
        policies=(),
        recorder=None,
        segments=None,
        refers=(),
        length_cost=lambda length: 0.0,
        in_rl=True,
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
        self.writers = {
            index: SegmentWriter(segments, f"replica-{index}-1-0") for index in range(replicas if segments else 0)
        }
        options = {"without_signal": WithoutSignal.TRAIN, "one_version": True, **settings}
        self.scheduler = TrajectoryScheduler(
            ControlSettings(
                seed=0,
                replicas=replicas,
                batch_per_replica=batch_per_replica,
                group_size=group_size,
                sampling=SamplingParams(max_new_tokens=16),
                admission=Admission(
                    schedule=schedule,
                    batch=batch,
                    capacity=capacity,
                    max_staleness=max_staleness,
                    publish_every=publish_every,
                ),
                bound=StalenessBound(max_staleness, policies),
                **options,
            ),
            prompt_at=make_prompt,
            on_issued=self._check_draw,
            on_rewards=self.told.append,
            recorder=self.log,
            submit_for_scoring=lambda trajectory, prompt: self.unscored.append(trajectory),
            submit_for_columns={name: partial(self._submit, name) for name in refers},
            credit=Credit(group_advantages(Advantage.GROUP_STD), length_cost),
            clock=self.clock,
        )
        self.draws = None
        if in_rl:
            self.scheduler.admit()
        self.scheduler.published(0)

    def _check_draw(self, group, prompt):
        """No group that a sound scheduler issues is a fault; a resumed one continues where it was restored."""
        if self.draws is None:
            self.draws = Draws(
                [Endless()], DataConfig.model_validate({"train": "a"}), num_open=lambda source: ROWS
            )
            self.draws.replay((f"g{place}", place, f"p{place}") for place in range(prompt.index))
        assert self.draws.issued(group, prompt.index, prompt.id) == ""

    def learned(self, version):
        """The learner makes a step before each version up to this one."""
        for newer in range(self.scheduler.state.newest_version + 1, version + 1):
            self.scheduler.state.ages.record_step(learned=True)
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
        await self.scheduler.incoming.on_report(report)
        self.hand_out()

    def hand_out(self):
        for index, assignments in self.scheduler.dispatcher.dispatch().items():
            self.received[index] += sum(item.version is None for item in assignments)
            self.running[index].update({item.trajectory_id: item for item in assignments})

    def _submit(self, name, trajectory):
        self.unreferred.append((name, trajectory))

    async def refer_all(self, *names):
        """The stages of these columns, by default all, deliver all that they were given."""
        given, self.unreferred = self.unreferred, []
        for name, trajectory in reversed(given):
            if names and name not in names:
                self.unreferred.append((name, trajectory))
                continue
            await self.scheduler.incoming.on_column(
                trajectory.id,
                name,
                ColumnRef(Dtype.FLOAT32, make_ref(REFERENCE, digest=trajectory.id.encode().ljust(16))),
            )

    async def lose_replica(self, index, *, salvaged=()):
        """A replica dies."""
        await self.scheduler.incoming.on_replica_lost(index, salvaged)

    async def lose_segment(self, segment, detail):
        """A segment is gone, and with it what live trajectories have in it."""
        lost = {
            one.id: detail
            for one in self.scheduler.state.live.values()
            if segment in {ref.at.segment for ref in (*one.tokens, *one.columns.values())}
        }
        await self.scheduler.incoming.drop_lost(lost)

    async def grow(self, index, trajectory_id, *, tokens):
        """A replica tells `tokens` more of a trajectory that goes on, as where somebody looks ahead."""
        item = self.running[index][trajectory_id]
        piece, spans = self._generated(index, item, tokens)
        self.running[index][trajectory_id] = msgspec.structs.replace(item, tokens=(*item.tokens, piece))
        await self.report(
            index,
            progress=[
                Progress(
                    trajectory_id=trajectory_id, epoch=item.epoch, start=item.length, tokens=piece, spans=spans
                )
            ],
        )

    def salvaged(self, index, trajectory_id, *, tokens, start=None, used_s=0.0):
        """What the journal of a replica has of a trajectory, `tokens` from where it was told, or from `start`."""
        item = self.running[index][trajectory_id]
        piece, spans = self._generated(index, item, tokens, start)
        return Salvaged(trajectory_id=trajectory_id, tokens=piece, spans=spans, used_s=used_s)

    def _generated(self, index, item, tokens, start=None):
        """Reference to so many tokens more, and their spans."""
        if not tokens:
            return None, ()
        version = self.versions[index] if item.version is None else item.version
        start = item.length if start is None else start
        end = start + tokens
        spans = (Span(version, start, end),)
        if index not in self.writers:
            return make_tokens(start, end, replica=index), spans
        piece = make_piece(item, start, end, spans)
        return tokens_ref(piece, self.writers[index].write(piece)), spans

    async def finish(
        self,
        index,
        trajectory_id,
        *,
        tokens=3,
        follows=None,
        reason=FinishReason.STOP,
        epoch=None,
        generate_s=0.0,
        **report,
    ):
        """A replica generates `tokens` more, behind all or behind so many, and ends the trajectory."""
        item = self.running[index].pop(trajectory_id)
        piece, spans = self._generated(index, item, tokens)
        spans = tuple(msgspec.structs.replace(span, follows=follows) for span in spans)
        progress = Progress(
            trajectory_id=trajectory_id,
            epoch=item.epoch if epoch is None else epoch,
            start=item.length,
            tokens=piece,
            spans=spans,
            finish_reason=reason,
            generate_s=generate_s,
        )
        await self.report(index, progress=[progress], **report)

    async def refuse(self, index, trajectory_id):
        """The engine does not take it."""
        await self._end(index, trajectory_id, failure=DropReason.REFUSED, detail="too long")

    async def miss(self, index, trajectory_id):
        """A replica cannot read what a trajectory has of a response."""
        await self._end(index, trajectory_id, lost=True, detail="its segment is gone")

    async def _end(self, index, trajectory_id, **words):
        item = self.running[index].pop(trajectory_id)
        await self.report(
            index,
            progress=[Progress(trajectory_id=trajectory_id, epoch=item.epoch, start=item.length, **words)],
        )

    async def finish_all(self, index, **report):
        for trajectory_id in list(self.running[index]):
            await self.finish(index, trajectory_id, **report)

    async def score_all(self, reward=lambda index: float(index % 2)):
        """Every finished trajectory gets a reward by its place in the group."""
        waiting, self.unscored = self.unscored, []
        for trajectory in waiting:
            await self.scheduler.incoming.on_score(
                Score(trajectory_id=trajectory.id, value=reward(trajectory.sample_index))
            )
