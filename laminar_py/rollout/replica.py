"""A rollout replica: the trajectories that it runs, and when its engine takes new weights.

Wired by the replica's actor. The controller calls `submit`, `abort`, `collect`, and for repacking `survey`,
`expect`, `give_up`; weights come from the local relay. `admission` has the state. Under `drain` a replica admits
a batch under a version, finishes it, loads the newest weights and admits the next. Invariants: it admits nothing
before it has weights; under `drain` it leaves a version only when nothing of that runs here or is on its way here.
When the engine is lost, one last report has all that the engine gave; the next `collect` raises.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import EngineStatus, SamplingParams
from laminar_py.records.protocols import (
    Clock,
    EngineLostError,
    Environments,
    InferenceEngine,
    VersionLostError,
    WeightSource,
)
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.records.trajectory import Kind
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.admission import ReplicaAdmission, ReplicaState, is_new
from laminar_py.rollout.calibration import EngineBounds, measure_speed
from laminar_py.rollout.loading import WeightLoader
from laminar_py.rollout.outbox import GATHER_S, Outbox
from laminar_py.rollout.running import Running
from laminar_py.rollout.storing import ResponseStore
from laminar_py.rollout.streams import Streams

log = logging.getLogger(__name__)


class Replica:
    """Runs assignments on `engine` and follows `weights` under the policy `on_new_weights`."""

    def __init__(
        self,
        index: int,
        *,
        engine: InferenceEngine,
        weights: WeightSource,
        store: ResponseStore,
        clock: Clock,
        on_new_weights: OnNewWeights,
        batch: int,
        max_batch: int,
        partial_interval_s: float,
        tells_partials: bool = False,
        max_seconds: float | None = None,
        verify_every: int = 0,
        initial: Sequence[Assignment] = (),
        gather_s: float = GATHER_S,
        environments: Environments | None = None,
    ) -> None:
        self.index = index
        self._engine = engine
        self._weights = weights
        self._clock = clock
        self._policy = on_new_weights
        self._max_batch = max_batch
        self._store = store
        self._partial_interval_s, self._tells_partials = partial_interval_s, tells_partials
        self._max_seconds = max_seconds
        self._initial = initial
        self._pinned: deque[Assignment] = deque()  # wait for their version; bounded by what the controller sends
        self._expected: set[str] = set()  # on their way here from other replicas, under the version in use
        self._expected_passes: set[str] = set()  # of which more is to come, under the version of what came
        self._newest = -1  # the newest version that the relay has announced
        self._weights_wanted = asyncio.Event()  # set when new weights may be due
        self._weights_kept = asyncio.Lock()  # held while weights change, or must not
        self._told = asyncio.Event()  # set once the loss of the engine was raised
        self._admission = ReplicaAdmission(on_new_weights, batch=batch, max_batch=max_batch)
        self._out = Outbox(index=index, clock=clock, gather_s=gather_s)
        self._streams = Streams(engine, self._out, store, environments, ended=self._one_left, lost=self._lose)
        self._loader = WeightLoader(engine, weights, self._streams, self._out, verify_every=verify_every)

    # ---- called by the controller

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Start these; those pinned to a version that is not loaded wait until it is, oldest version first."""
        self._admission.received += sum(assignment.version is None for assignment in assignments)
        self._expected.difference_update(assignment.trajectory_id for assignment in assignments)
        self._expected_passes.update(item.group_id for item in assignments if item.more_to_come)
        for assignment in assignments:
            if not self._admission.trains and assignment.kind is Kind.TRAIN:
                self._streams.hand_back(assignment)
            elif assignment.version is None or (assignment.version == self._loader.version and self._serves):
                self._admission.count(assignment)
                self._streams.start(assignment)
            else:
                self._pinned.append(assignment)
        if self._pinned:
            self._pinned = deque(sorted(self._pinned, key=lambda waiting: waiting.version or 0))
            self._weights_wanted.set()

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """End these wherever they are; what they have is reported with finish reason ABORT."""
        self._hand_back_pinned(trajectory_ids)
        with self._watching_for_loss():
            await self._streams.abort(trajectory_ids)

    async def stop(self, *, evaluations: bool) -> None:
        """Admit nothing more and interrupt all training, and evaluations too; partial responses are reported."""
        self._admission.stop()
        self._expected.clear()
        assignments = [*self._pinned, *(running.assignment for running in self._running.values())]
        await self.abort([item.trajectory_id for item in assignments if evaluations or item.kind is Kind.TRAIN])

    async def collect(self, timeout_s: float) -> ReplicaReport:
        """The next report: soon after something finished or changed, else after `timeout_s`.

        Raises `EngineLostError` after the last report of a lost engine.
        """
        if self._admission.loss is not None and not self._out.urgent.is_set():
            self._told.set()
            raise self._admission.loss
        await self._out.wait(timeout_s)
        status = self._look()
        admissible = 0 if self._pinned else self._admissible(status)
        return self._out.take(status, admissible=admissible, received=self._admission.received)

    async def measure_speed(
        self, *, vocab: int, max_len: int, sampling: SamplingParams
    ) -> tuple[EngineSpeed, bool]:
        """Speed of the engine, once that has weights, and True if it had nothing else to do. New weights wait.

        Raises `EngineLostError`, after the last report.
        """
        await self._streams.serving.wait()
        try:
            async with self._weights_kept:
                bounds = EngineBounds(
                    vocab=vocab,
                    slots=self._max_batch,
                    max_len=max_len,
                    kv_capacity=self._engine.status().kv_capacity,
                    sampling=sampling,
                )
                idle = not self._running
                return await measure_speed(self._engine, bounds, self._clock), idle
        except EngineLostError as error:
            self._lose(error)
            await self._told.wait()
            raise

    def report_soon(self) -> None:
        """Have the next report go out without waiting for more to share it."""
        self._out.at_once()

    def note(self) -> None:
        """Have the journal hold what running trajectories have got, as it does every `partial_interval_s`."""
        self._streams.note_partials(tells=False)

    @property
    def away(self) -> frozenset[str]:
        """Trajectories whose environment works on a turn."""
        return self._streams.away

    # ---- called for repacking

    async def survey(self, lengths: Callable[[], Mapping[str, int]] = dict) -> Survey:
        """Everything it has now; nothing, if its engine is lost, so that its last report comes first.

        `lengths` has the responses of which the engine has more than it has delivered.
        """
        status = self._look()
        await asyncio.sleep(0)  # what the engine has just delivered is taken first
        training = [] if self._admission.state is ReplicaState.LOST else self._streams.training
        grown = lengths()
        return Survey(
            replica=self.index,
            version=self._loader.version,
            slots=self._max_batch,
            kv_used=status.kv_used,
            kv_capacity=status.kv_capacity,
            running=tuple(
                running.held(grown.get(running.assignment.trajectory_id, running.length))
                for running in training
                if not running.queues
            ),
            waiting=tuple(running.held(running.length) for running in training if running.queues),
            settled=len(training) == len(self._running) and not self._pinned and self._keeps_version,
            held_s=self._streams.held_s,
        )

    def expect(self, version: int, trajectory_ids: Sequence[str]) -> bool:
        """Promise to keep `version` until all of these have come or are called off; False if it cannot."""
        if version != self._loader.version or not self._keeps_version:
            return False
        self._expected.update(trajectory_ids)
        return True

    def call_off(self, names: Sequence[str]) -> None:
        """Expect these trajectories, and more of these passes, no more."""
        self._expected.difference_update(names)
        self._expected_passes.difference_update(names)
        self._weights_wanted.set()

    @property
    def expected(self) -> frozenset[str]:
        """Trajectories that it keeps its version for."""
        return frozenset(self._expected)

    async def give_up(self, trajectory_ids: Sequence[str]) -> None:
        """`abort` for those that go on elsewhere: the report is awaited, so it goes out with their last words."""
        self._hand_back_pinned(trajectory_ids)
        with self._watching_for_loss():
            await self._streams.give_up(trajectory_ids)
        self._out.at_once()

    # ---- loops of the process

    async def run(self) -> None:
        """Take up what it was started for, then follow the relay until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._streams.open(tasks)
                self.submit(self._initial)
                tasks.create_task(self._watch_engine(), name="watch-engine")
                tasks.create_task(self._follow_relay(), name="follow-relay")
                tasks.create_task(self._refresh_weights(), name="refresh-weights")
                tasks.create_task(self._watch_partials(), name="watch-partials")
                tasks.create_task(self._keep_synced(), name="keep-synced")
        finally:
            self._streams.close()

    async def _watch_engine(self) -> None:
        with self._watching_for_loss():
            await self._engine.watch()

    async def _follow_relay(self) -> None:
        while True:
            self._newest = await self._weights.wait_newer(self._newest)
            self._weights_wanted.set()

    async def _refresh_weights(self) -> None:
        while self._admission.state is not ReplicaState.LOST:
            await self._weights_wanted.wait()
            self._weights_wanted.clear()
            async with self._weights_kept:
                with self._watching_for_loss():
                    await self._refresh()

    async def _refresh(self) -> None:
        if self._running:
            if not self._pinned and self._may_swap():
                await self._loader.swap(self._policy, may_swap=self._may_swap)
        elif self._expected or self._expected_passes - {item.group_id for item in self._pinned}:
            return  # it has promised to keep its version
        elif self._pinned:
            await self._load_pinned()
        else:
            await self._begin_batch()

    async def _watch_partials(self) -> None:
        while True:
            await asyncio.sleep(self._partial_interval_s)
            if self._max_seconds is not None:
                with self._watching_for_loss():
                    await self._streams.cut_overdue(self._max_seconds)
            with self._watching_for_loss():
                self._streams.note_partials(tells=self._tells_partials)
                if self._tells_partials:
                    self._out.urgent.set()

    async def _keep_synced(self) -> None:
        with self._watching_for_loss():
            await self._store.keep_synced()

    def _one_left(self) -> None:
        """A trajectory has left, and weights may be due; a replica that has nothing to do says so at once."""
        if not self._running:
            self._weights_wanted.set()
            self._out.at_once()
        elif self._may_swap():
            self._weights_wanted.set()

    # ---- weights

    async def _begin_batch(self) -> None:
        """Take the newest weights and, unless it stops or there are none yet, admit a batch."""
        if self._newest > self._loader.version:
            await self._loader.load(None)
        if self._loader.version < 0:
            return  # what ran now would keep it from loading the first ones
        # what came while the weights were loaded begins under them
        self._admission.begin_batch(admitted=sum(is_new(item.assignment) for item in self._running.values()))
        self._out.at_once()

    async def _load_pinned(self) -> None:
        """Load the version that waiting trajectories must continue under; new ones may join the newest alone."""
        version = self._pinned[0].version
        assert version is not None, "only pinned trajectories wait"
        try:
            if version > self._loader.version:
                await self._loader.load(version)
        except VersionLostError:
            lost = [item for item in self._pinned if item.version == version]
            self._out.lost += [item.trajectory_id for item in lost]
            self._expected_passes.difference_update(item.group_id for item in lost)
            self._pinned = deque(item for item in self._pinned if item.version != version)
            self._weights_wanted.set()
        else:
            self._admission.continue_batch(newest=self._loader.version >= self._newest)
            self._start_pinned()
        self._out.urgent.set()

    def _start_pinned(self) -> None:
        """Start what waited for the version in use; what is older is handed back, for no engine goes back."""
        waiting, self._pinned = self._pinned, deque()
        for assignment in waiting:
            if assignment.version == self._loader.version:
                self._admission.count_pinned(assignment)
                self._streams.start(assignment)
            elif (assignment.version or 0) < self._loader.version:
                self._streams.hand_back(assignment)
                self._expected_passes.discard(assignment.group_id)
            else:
                self._pinned.append(assignment)
        if not self._running:
            self._weights_wanted.set()

    def _may_swap(self) -> bool:
        """True where weights are newer, unless it drains, stops, or evaluates, for which it keeps its version."""
        if self._newest <= self._loader.version:
            return False
        if self._policy is OnNewWeights.DRAIN or not self._admission.trains or self._expected_passes:
            return False
        return all(running.assignment.kind is not Kind.EVAL for running in self._running.values())

    # ---- the loss of the engine

    @contextlib.contextmanager
    def _watching_for_loss(self) -> Iterator[None]:
        try:
            yield
        except EngineLostError as error:
            self._lose(error)

    def _lose(self, error: EngineLostError) -> None:
        if self._admission.state is not ReplicaState.LOST:
            log.error("replica %d lost its engine: %s", self.index, error)
        self._admission.lose(error)
        self._streams.tell_all()

    def _look(self) -> EngineStatus:
        """Status of the engine; a lost one holds nothing."""
        if self._admission.state is not ReplicaState.LOST:
            try:
                return self._engine.status()
            except EngineLostError as error:
                self._lose(error)
        return EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=self._loader.version)

    # ---- what it has

    def _admissible(self, status: EngineStatus) -> int:
        """Training trajectories that may begin; none in the place of those away where slots or cache are full."""
        num_away = 0 if status.waiting else len(self.away)
        return self._admission.admissible(num_running=len(self._running), num_away=num_away)

    @property
    def _running(self) -> Mapping[str, Running]:
        return self._streams.running

    @property
    def _serves(self) -> bool:
        """True unless weights are being loaded."""
        return self._streams.serving.is_set()

    @property
    def _keeps_version(self) -> bool:
        """True if it serves a version and is not about to leave it."""
        return self._serves and self._admission.trains and bool(self._running)

    def _hand_back_pinned(self, trajectory_ids: Sequence[str]) -> None:
        for assignment in [waiting for waiting in self._pinned if waiting.trajectory_id in trajectory_ids]:
            self._pinned.remove(assignment)
            self._streams.hand_back(assignment)
