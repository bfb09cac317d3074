"""One rollout replica: what it admits, and when its engine takes new weights.

Wired by the runtime's actor. The controller calls `submit`, `abort`, `collect`, and for repacking `survey`,
`expect`, `give_up`; weights come from the local relay. States under `drain`: OPEN (admits until its batch is full)
-> CLOSED (finishes what it has) -> empty -> loads the newest weights -> OPEN. Invariant: under `drain` it leaves a
version only when nothing of it runs here or is on its way here. When the engine is lost, one last report has all
that it gave; the next `collect` raises.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import PauseMode, SamplingParams
from laminar_py.records.protocols import (
    Clock,
    EngineLostError,
    InferenceEngine,
    PulledVersion,
    VersionLostError,
    WeightSource,
)
from laminar_py.records.replica import Assignment, Load, ReplicaReport, Survey
from laminar_py.records.trajectory import Kind
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.calibration import EngineBounds, measure_speed
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.running import Running
from laminar_py.rollout.streams import Streams

log = logging.getLogger(__name__)

PAUSES = {OnNewWeights.RETRACT: PauseMode.RETRACT, OnNewWeights.IN_PLACE: PauseMode.IN_PLACE}


class Replica:
    """Runs assignments on `engine` and follows `weights` under the policy `on_new_weights`."""

    def __init__(
        self,
        index: int,
        *,
        engine: InferenceEngine,
        weights: WeightSource,
        clock: Clock,
        on_new_weights: OnNewWeights,
        batch: int,
        max_batch: int,
        partial_interval_s: float,
        max_seconds: float | None = None,
        verify_every: int = 0,
        initial: Sequence[Assignment] = (),
    ) -> None:
        self.index = index
        self._engine = engine
        self._weights = weights
        self._clock = clock
        self._policy = on_new_weights
        self._batch = batch
        self._max_batch = max_batch
        self._partial_interval_s = partial_interval_s
        self._max_seconds = max_seconds
        self._verify_every = verify_every
        self._initial = initial
        self._pinned: deque[Assignment] = deque()  # wait for their version; bounded by what the controller sends
        self._out = Outbox(index=index, clock=clock)
        self._streams = Streams(index, engine=engine, out=self._out, clock=clock, ended=self._wake)
        self._version = -1
        self._next_verified = 0  # the first version from here on is
        self._newest = -1  # the newest version that the relay has announced
        self._admitted = 0  # training trajectories admitted under the version in use
        self._received = 0  # of new ones
        self._measuring = False
        self._expected: set[str] = set()  # on their way here from other replicas, under the version in use
        self._open = False  # may begin new trajectories under the version in use
        self._stopping = False
        self._weights_wanted = asyncio.Event()

    # ---- called by the controller

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Start these; those pinned to a version that is not loaded wait until it is, oldest version first."""
        self._received += sum(assignment.version is None for assignment in assignments)
        self._expected.difference_update(assignment.trajectory_id for assignment in assignments)
        for assignment in assignments:
            if self._closed and assignment.kind is Kind.TRAIN:
                self._streams.hand_back(assignment)
            elif assignment.version is None or (assignment.version == self._version and self._serves):
                self._start(assignment)
            else:
                self._pinned.append(assignment)
        if self._pinned:
            self._pinned = deque(sorted(self._pinned, key=lambda waiting: waiting.version or 0))
            self._weights_wanted.set()

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """End these wherever they are; what they have is reported with finish reason ABORT."""
        self._hand_back_pinned(trajectory_ids)
        await self._streams.abort(trajectory_ids)

    # ---- repacking

    async def survey(self) -> Survey:
        """What it has at this moment; nothing, if its engine is lost, so that its last report comes first."""
        nothing = Survey(
            replica=self.index,
            version=self._version,
            slots=self._max_batch,
            kv_used=0,
            kv_capacity=1,
            running=(),
            settled=False,
        )
        if self._streams.engine_error is not None:
            return nothing
        try:
            status = self._engine.status()
        except EngineLostError as error:
            self._streams.lose_engine(error)
            return nothing
        await asyncio.sleep(0)  # what the engine has just delivered is taken first
        training = self._streams.training
        return Survey(
            replica=self.index,
            version=self._version,
            slots=self._max_batch,
            kv_used=status.kv_used,
            kv_capacity=status.kv_capacity,
            running=tuple(running.held() for running in training if running.first_token_s is not None),
            waiting=tuple(running.held() for running in training if running.first_token_s is None),
            settled=len(training) == len(self._running) and not self._pinned and self._keeps_version,
        )

    async def measure_speed(
        self, *, vocab: int, max_len: int, sampling: SamplingParams
    ) -> tuple[EngineSpeed, bool]:
        """Of its engine, once that has weights; and whether it had nothing else to do. New ones wait meanwhile."""
        await self._streams.serving.wait()
        self._measuring = True
        try:
            bounds = EngineBounds(
                vocab=vocab,
                slots=self._max_batch,
                max_len=max_len,
                kv_capacity=self._engine.status().kv_capacity,
                sampling=sampling,
            )
            idle = not self._running
            return await measure_speed(self._engine, bounds, self._clock), idle
        finally:
            self._measuring = False
            self._weights_wanted.set()

    def expect(self, version: int, trajectory_ids: Sequence[str]) -> bool:
        """Whether it promises to keep `version` until all of these have come or are called off."""
        if version != self._version or not self._keeps_version:
            return False
        self._expected.update(trajectory_ids)
        return True

    def call_off(self, trajectory_ids: Sequence[str]) -> None:
        """These will not come."""
        self._expected.difference_update(trajectory_ids)
        self._weights_wanted.set()

    @property
    def expected(self) -> frozenset[str]:
        """Trajectories that it keeps its version for."""
        return frozenset(self._expected)

    async def give_up(self, trajectory_ids: Sequence[str]) -> None:
        """`abort` for those that go on elsewhere: the report is awaited, so it goes out with their last words."""
        self._hand_back_pinned(trajectory_ids)
        await self._streams.give_up(trajectory_ids)
        self._out.at_once()

    @property
    def _keeps_version(self) -> bool:
        """It serves a version and is not about to leave it."""
        return self._serves and not self._closed and bool(self._running)

    async def stop(self) -> None:
        """Admit nothing more and interrupt all training; partial responses are reported."""
        self._stopping = True
        self._open = False
        self._expected.clear()
        assignments = [*self._pinned, *(running.assignment for running in self._running.values())]
        await self.abort([item.trajectory_id for item in assignments if item.kind is Kind.TRAIN])

    async def collect(self, timeout_s: float) -> ReplicaReport:
        """The next report: soon after something finished or changed, else after `timeout_s`.

        Raises `EngineLostError` after the last report of a lost engine.
        """
        error = self._streams.engine_error
        if error is not None and not self._out.urgent.is_set():
            raise error
        await self._out.wait(timeout_s)
        return self._out.take(self._engine.status(), admissible=self._admissible, received=self._received)

    # ---- loops of the process

    async def run(self) -> None:
        """Take up what it was started for, then follow the relay until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._streams.open(tasks)
            self.submit(self._initial)
            tasks.create_task(self._watch_engine(), name="watch-engine")
            tasks.create_task(self._follow_relay(), name="follow-relay")
            tasks.create_task(self._refresh_weights(), name="refresh-weights")
            tasks.create_task(self._watch_partials(), name="watch-partials")

    async def _follow_relay(self) -> None:
        while True:
            self._newest = await self._weights.wait_newer(self._newest)
            self._weights_wanted.set()

    async def _watch_engine(self) -> None:
        try:
            await self._engine.watch()
        except EngineLostError as error:
            self._streams.lose_engine(error)

    async def _refresh_weights(self) -> None:
        while self._streams.engine_error is None:
            await self._weights_wanted.wait()
            self._weights_wanted.clear()
            try:
                await self._refresh()
            except EngineLostError as error:
                self._streams.lose_engine(error)

    async def _refresh(self) -> None:
        if self._measuring:
            return
        if not self._running and self._expected:
            return  # it has promised to keep its version
        if self._pinned:
            if not self._running:
                await self._load_pinned()
        elif not self._running:
            await self._begin_round()
        elif self._newest > self._version and self._may_swap:
            await self._swap_in_flight()

    async def _watch_partials(self) -> None:
        while True:
            await asyncio.sleep(self._partial_interval_s)
            if self._max_seconds is not None:
                await self._streams.cut_overdue(self._max_seconds)
            self._streams.report_partials(self._partial_interval_s)

    # ---- weights

    async def _begin_round(self) -> None:
        """Take the newest weights and, unless it stops, admit a batch."""
        if self._newest > self._version:
            await self._load(None)
        # what came while the weights were loaded begins under them
        self._admitted = sum(_is_new(running.assignment) for running in self._running.values())
        self._open = not self._closed
        self._out.at_once()

    async def _load_pinned(self) -> None:
        """Load the version that waiting trajectories must continue under; the round stays closed."""
        version = self._pinned[0].version
        assert version is not None, "only pinned trajectories wait"
        try:
            if version > self._version:
                await self._load(version)
        except VersionLostError:
            self._streams.serving.set()
            self._out.lost += [a.trajectory_id for a in self._pinned if a.version == version]
            self._pinned = deque(a for a in self._pinned if a.version != version)
            self._weights_wanted.set()
            self._out.urgent.set()
            return
        self._open = self._version >= self._newest and not self._closed
        waiting, self._pinned = self._pinned, deque()
        for assignment in waiting:
            if assignment.version == self._version:
                self._admitted += assignment.kind is Kind.TRAIN  # this version was loaded for it
                self._start(assignment)
            elif (assignment.version or 0) < self._version:
                self._streams.hand_back(assignment)  # its weights were overtaken while it was on its way here
            else:
                self._pinned.append(assignment)
        if not self._running:
            self._weights_wanted.set()
        self._out.urgent.set()

    async def _swap_in_flight(self) -> None:
        """New weights under running trajectories, which go on under them; they run until the weights are here."""
        began = self._clock.now()
        pulled = await self._weights.pull()
        if not self._may_swap:
            return  # what came meanwhile must end first
        self._streams.serving.clear()
        interrupted = await self._streams.interrupt() if self._policy is OnNewWeights.RESUME else []
        if self._policy is not OnNewWeights.RESUME:
            await self._engine.pause(PAUSES[self._policy])
        await self._install(pulled, began)
        await self._engine.resume()
        self._streams.resubmit(interrupted)
        self._out.urgent.set()

    async def _load(self, version: int | None) -> None:
        """Pull and load while nothing runs."""
        began = self._clock.now()
        self._streams.serving.clear()
        await self._install(await self._weights.pull(version), began)

    async def _install(self, pulled: PulledVersion, began: float) -> None:
        await self._engine.load_weights(Path(pulled.path), pulled.version)
        checksum = None
        if self._verify_every and pulled.version >= self._next_verified:
            checksum = await self._engine.checksum()
            self._next_verified = (pulled.version // self._verify_every + 1) * self._verify_every
        self._version = pulled.version
        self._streams.serving.set()
        elapsed = self._clock.now() - began
        self._out.loads.append(Load(pulled.version, pulled.digest, elapsed, checksum))
        log.info("replica %d serves version %d after %.3f s", self.index, pulled.version, elapsed)

    @property
    def _may_swap(self) -> bool:
        """Not `drain`, and nothing runs that must keep its version."""
        evaluating = any(running.assignment.kind is Kind.EVAL for running in self._running.values())
        return self._policy is not OnNewWeights.DRAIN and not self._closed and not evaluating

    # ---- what it admits

    def _start(self, assignment: Assignment) -> None:
        self._admitted += _is_new(assignment)
        self._streams.start(assignment)

    def _hand_back_pinned(self, trajectory_ids: Sequence[str]) -> None:
        for assignment in [waiting for waiting in self._pinned if waiting.trajectory_id in trajectory_ids]:
            self._pinned.remove(assignment)
            self._streams.hand_back(assignment)

    def _wake(self) -> None:
        """New weights may have waited for this."""
        self._weights_wanted.set()

    @property
    def _running(self) -> Mapping[str, Running]:
        return self._streams.running

    @property
    def _serves(self) -> bool:
        """Not while weights are loaded."""
        return self._streams.serving.is_set()

    @property
    def _closed(self) -> bool:
        """It takes up no training any more."""
        return self._stopping or self._streams.engine_error is not None

    @property
    def _admissible(self) -> int:
        """Training trajectories it takes now."""
        if not self._open or self._closed or self._pinned:
            return 0
        if self._policy is OnNewWeights.DRAIN:
            return self._batch - self._admitted
        return self._max_batch + self._max_batch // 4 - len(self._running)


def _is_new(assignment: Assignment) -> bool:
    """It counts as admitted under the version in use; one that must keep its version was admitted elsewhere."""
    return assignment.kind is Kind.TRAIN and assignment.version is None
