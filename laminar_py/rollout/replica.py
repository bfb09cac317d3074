"""One rollout replica: an inference engine, the trajectories it was given, and when it takes new weights.

Wired by the runtime's actor. The controller calls `submit`, `abort`, `collect`; weights come from the local
relay. States under `drain`: OPEN (admits until its batch is full) -> CLOSED (finishes what it has) -> empty ->
loads the newest weights -> OPEN. Invariant: every token is reported once, in order, with the version that the
engine stamped on it. When the engine is lost, one last report has all that it gave; the next `collect` raises.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from laminar_py.config import OnNewWeights
from laminar_py.interfaces import (
    Clock,
    EngineLostError,
    InferenceEngine,
    PulledVersion,
    VersionLostError,
    WeightSource,
)
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.calibration import EngineBounds, measure_speed
from laminar_py.rollout.outbox import Outbox
from laminar_py.rollout.running import Running, begin, handed_back
from laminar_py.types import (
    Assignment,
    Break,
    FinishReason,
    Kind,
    Load,
    PauseMode,
    ReplicaReport,
    Survey,
)

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
        self._running: dict[str, Running] = {}
        self._pinned: deque[Assignment] = deque()  # wait for their version; bounded by what the controller sends
        self._out = Outbox(index, clock)
        self._engine_error: EngineLostError | None = None
        self._version = -1
        self._next_verified = 0  # the first version from here on is
        self._newest = -1  # the newest version that the relay has announced
        self._admitted = 0  # training trajectories admitted under the version in use
        self._received = 0  # of new ones
        self._measuring = False
        self._expected: set[str] = set()  # on their way here from other replicas, under the version in use
        self._open = False  # may begin new trajectories under the version in use
        self._stopping = False
        self._serving = asyncio.Event()  # cleared while weights are loaded
        self._weights_wanted = asyncio.Event()

    # ---- called by the controller

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Start these; those pinned to a version that is not loaded wait until it is, oldest version first."""
        self._received += sum(assignment.version is None for assignment in assignments)
        self._expected.difference_update(assignment.trajectory_id for assignment in assignments)
        for assignment in assignments:
            if self._stopping and assignment.kind is Kind.TRAIN:
                self._return(assignment)
            elif assignment.version is None or (assignment.version == self._version and self._serving.is_set()):
                self._start(assignment)
            else:
                self._pinned.append(assignment)
        if self._pinned:
            self._pinned = deque(sorted(self._pinned, key=lambda waiting: waiting.version or 0))
            self._weights_wanted.set()

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """End these wherever they are; what they have is reported with finish reason ABORT."""
        wanted = set(trajectory_ids)
        for assignment in [waiting for waiting in self._pinned if waiting.trajectory_id in wanted]:
            self._pinned.remove(assignment)
            self._return(assignment)
        await asyncio.gather(*(self._abort(r) for name, r in list(self._running.items()) if name in wanted))

    # ---- repacking

    async def survey(self) -> Survey:
        """What it has at this moment; nothing, if its engine is lost, so that its last report comes first."""
        nothing = Survey(self.index, self._version, self._max_batch, 0, 1, (), settled=False)
        if self._engine_error is not None:
            return nothing
        try:
            status = self._engine.status()
        except EngineLostError as error:
            self._lose_engine(error)
            return nothing
        await asyncio.sleep(0)  # what the engine has just delivered is taken first
        held = list(self._running.values())
        training = [running for running in held if running.assignment.kind is Kind.TRAIN]
        return Survey(
            self.index,
            self._version,
            self._max_batch,
            status.kv_used,
            status.kv_capacity,
            tuple(running.held() for running in training if running.first_token_s is not None),
            tuple(running.held() for running in training if running.first_token_s is None),
            settled=len(training) == len(held) and not self._pinned and self._keeps_version,
        )

    async def measure_speed(self, *, vocab: int, max_len: int) -> tuple[EngineSpeed, bool]:
        """Of its engine, once that has weights; and whether it had nothing else to do. New ones wait meanwhile."""
        await self._serving.wait()
        self._measuring = True
        try:
            bounds = EngineBounds(vocab, self._max_batch, max_len, self._engine.status().kv_capacity)
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
        streams = [
            running.task
            for name in trajectory_ids
            if (running := self._running.get(name)) is not None and running.in_engine and running.task is not None
        ]
        await self.abort(trajectory_ids)
        if streams:
            await asyncio.wait(streams)
        self._out.at_once()

    @property
    def _keeps_version(self) -> bool:
        """It serves a version and is not about to leave it."""
        return self._serving.is_set() and not self._stopping and bool(self._running)

    async def stop(self) -> None:
        """Admit nothing more and interrupt all training; partial responses are reported."""
        self._stopping = True
        self._open = False
        self._expected.clear()
        assignments = [*self._pinned, *(running.assignment for running in self._running.values())]
        await self.abort([item.trajectory_id for item in assignments if item.kind is Kind.TRAIN])

    async def _abort(self, running: Running) -> None:
        if running.in_engine and not running.resubmit:
            await self._engine.abort(running.assignment.trajectory_id)
            return
        running.resubmit = False  # it waits for weights, outside the engine
        if running.task is not None:
            running.task.cancel()
        self._ended(running, FinishReason.ABORT)

    async def collect(self, timeout_s: float) -> ReplicaReport:
        """The next report: soon after something finished or changed, else after `timeout_s`.

        Raises `EngineLostError` after the last report of a lost engine.
        """
        if self._engine_error is not None and not self._out.urgent.is_set():
            raise self._engine_error
        await self._out.wait(timeout_s)
        return self._out.take(self._engine.status(), admissible=self._admissible, received=self._received)

    # ---- loops of the process

    async def run(self) -> None:
        """Take up what it was started for, then follow the relay until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            self.submit(self._initial)
            self._tasks.create_task(self._watch_engine(), name="watch-engine")
            self._tasks.create_task(self._follow_relay(), name="follow-relay")
            self._tasks.create_task(self._refresh_weights(), name="refresh-weights")
            self._tasks.create_task(self._watch_partials(), name="watch-partials")

    async def _follow_relay(self) -> None:
        while True:
            self._newest = await self._weights.wait_newer(self._newest)
            self._weights_wanted.set()

    async def _watch_engine(self) -> None:
        try:
            await self._engine.watch()
        except EngineLostError as error:
            self._lose_engine(error)

    async def _refresh_weights(self) -> None:
        while self._engine_error is None:
            await self._weights_wanted.wait()
            self._weights_wanted.clear()
            try:
                await self._refresh()
            except EngineLostError as error:
                self._lose_engine(error)

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
                await self._cut_overdue(self._max_seconds)
            self._collect_partials()

    # ---- weights

    async def _begin_round(self) -> None:
        """Take the newest weights and, unless it stops, admit a batch."""
        if self._newest > self._version:
            await self._load(None)
        # what came while the weights were loaded begins under them
        self._admitted = sum(_is_new(running.assignment) for running in self._running.values())
        self._open = not self._stopping
        self._out.at_once()

    async def _load_pinned(self) -> None:
        """Load the version that waiting trajectories must continue under; the round stays closed."""
        version = self._pinned[0].version
        assert version is not None, "only pinned trajectories wait"
        try:
            if version > self._version:
                await self._load(version)
        except VersionLostError:
            self._serving.set()
            self._out.lost += [a.trajectory_id for a in self._pinned if a.version == version]
            self._pinned = deque(a for a in self._pinned if a.version != version)
            self._weights_wanted.set()
            self._out.urgent.set()
            return
        self._open = self._version >= self._newest and not self._stopping
        waiting, self._pinned = self._pinned, deque()
        for assignment in waiting:
            if assignment.version == self._version:
                self._admitted += assignment.kind is Kind.TRAIN  # this version was loaded for it
                self._start(assignment)
            elif (assignment.version or 0) < self._version:
                self._return(assignment)  # its weights were overtaken while it was on its way here
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
        self._serving.clear()
        interrupted = await self._interrupt() if self._policy is OnNewWeights.RESUME else []
        if self._policy is not OnNewWeights.RESUME:
            await self._engine.pause(PAUSES[self._policy])
        await self._install(pulled, began)
        await self._engine.resume()
        for running in interrupted:
            if running.resubmit:
                running.resubmit = False
                self._spawn(running)
        self._out.urgent.set()

    async def _interrupt(self) -> list[Running]:
        """Abort everything in the engine; what is to be submitted again."""
        interrupted = [running for running in self._running.values() if running.in_engine]
        for running in interrupted:
            running.resubmit = True
        await self._engine.pause(PauseMode.ABORT)
        streams = [running.task for running in interrupted if running.task is not None]
        if streams:  # else all that runs still waits to enter the engine
            await asyncio.wait(streams)
        return interrupted

    async def _load(self, version: int | None) -> None:
        """Pull and load while nothing runs."""
        began = self._clock.now()
        self._serving.clear()
        await self._install(await self._weights.pull(version), began)

    async def _install(self, pulled: PulledVersion, began: float) -> None:
        await self._engine.load_weights(Path(pulled.path), pulled.version)
        checksum = None
        if self._verify_every and pulled.version >= self._next_verified:
            checksum = await self._engine.checksum()
            self._next_verified = (pulled.version // self._verify_every + 1) * self._verify_every
        self._version = pulled.version
        self._serving.set()
        elapsed = self._clock.now() - began
        self._out.loads.append(Load(pulled.version, pulled.digest, elapsed, checksum))
        log.info("replica %d serves version %d after %.3f s", self.index, pulled.version, elapsed)

    @property
    def _may_swap(self) -> bool:
        """Not `drain`, and nothing runs that must keep its version."""
        evaluating = any(running.assignment.kind is Kind.EVAL for running in self._running.values())
        return self._policy is not OnNewWeights.DRAIN and not self._stopping and not evaluating

    # ---- trajectories

    def _start(self, assignment: Assignment) -> None:
        self._admitted += _is_new(assignment)
        running = begin(assignment, self._clock.now())
        self._running[assignment.trajectory_id] = running
        self._spawn(running)

    def _spawn(self, running: Running) -> None:
        name = running.assignment.trajectory_id
        running.in_engine = False
        running.task = self._tasks.create_task(self._generate(running), name=name)

    async def _generate(self, running: Running) -> None:
        await self._serving.wait()
        running.in_engine = True
        name = running.assignment.trajectory_id
        try:
            async for delta in self._engine.generate(running.request()):
                if self._running.get(name) is running:  # else it was ended outside the engine
                    running.take(delta, self._clock.now())
                    if delta.finish_reason is not None:
                        self._ended(running, delta.finish_reason)
        except EngineLostError as error:
            if self._running.get(name) is running:
                self._report_progress(running, None, broken=Break.CUT)
            self._lose_engine(error)
        except ValueError as error:  # the request's fault, not the engine's
            log.error("replica %d: %s", self.index, error)
            if self._running.get(name) is running:
                self._report_progress(running, None, refusal=str(error))
                self._remove(running)

    def _lose_engine(self, error: EngineLostError) -> None:
        """Take up nothing more, and report all that it gave."""
        if self._engine_error is None:
            log.error("replica %d lost its engine: %s", self.index, error)
            self._engine_error = error
            self._stopping, self._open = True, False
        for running in self._running.values():
            if running.ids:
                self._report_progress(running, None)
        self._out.urgent.set()

    def _ended(self, running: Running, reason: FinishReason) -> None:
        running.wall_cut = running.wall_cut and reason is FinishReason.ABORT and running.length > 0
        if running.wall_cut:
            running.resubmit, reason = False, FinishReason.LENGTH
        if reason is FinishReason.ABORT and running.resubmit:
            self._report_progress(running, None, broken=Break.NEW_WEIGHTS)
            return
        running.resubmit = False
        self._report_progress(running, reason)
        self._remove(running)

    def _remove(self, running: Running) -> None:
        del self._running[running.assignment.trajectory_id]
        self._weights_wanted.set()  # they may have waited for it
        self._out.urgent.set()

    def _report_progress(
        self, running: Running, reason: FinishReason | None, *, broken: Break | None = None, refusal: str = ""
    ) -> None:
        now = self._clock.now()
        self._out.progress.append(running.progress(reason, now, broken=broken, refusal=refusal))

    def _return(self, assignment: Assignment) -> None:
        """Give back what never started here."""
        self._out.progress.append(handed_back(assignment))
        self._out.urgent.set()

    def _collect_partials(self) -> None:
        now = self._clock.now()
        for running in self._running.values():
            if running.ids and now - running.reported_s >= self._partial_interval_s:
                self._report_progress(running, None)
                self._out.urgent.set()

    async def _cut_overdue(self, max_seconds: float) -> None:
        now = self._clock.now()
        for running in list(self._running.values()):
            if running.first_token_s is not None and running.used_s(now) > max_seconds:
                running.wall_cut = True
                await self._engine.abort(running.assignment.trajectory_id)

    @property
    def _admissible(self) -> int:
        """Training trajectories it takes now."""
        if not self._open or self._stopping or self._pinned:
            return 0
        if self._policy is OnNewWeights.DRAIN:
            return self._batch - self._admitted
        return self._max_batch + self._max_batch // 4 - len(self._running)


def _is_new(assignment: Assignment) -> bool:
    """It counts as admitted under the version in use; one that must keep its version was admitted elsewhere."""
    return assignment.kind is Kind.TRAIN and assignment.version is None
