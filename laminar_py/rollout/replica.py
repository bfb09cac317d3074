"""A rollout replica: it runs trajectories in its engine, and decides when the engine takes new weights.

    controller: start_assignments, abort, stop, survey, expect, give_up
        |                                                          ^ next_report: tokens, loads, remaining room
        v                                                          |
    +- Replica ----------------------------------------------------+--------------------+
    |  admission: may a trajectory begin under this version?     outbox                 |
    |      v                                                       ^                    |
    |  Streams: a request for each turn, deltas come back ---------+--> store: segment, journal
    |      v  ^                                                                         |
    |   engine  <--- load, swap --- serve: the loop <--- newest version --- relay       |
    +-----------------------------------------------------------------------------------+

`Replica.serve` is the loop; the controller's calls run while it waits. It wakes when the relay has a newer
version, when the last trajectory left, or when trajectories wait for their version.

Under `drain` a replica admits a batch under a version, finishes the batch, loads the newest weights and admits the
next batch. It leaves a version only when no trajectory of that version runs here or is on its way here (law 2).
Under every policy a replica admits nothing before it has weights, no request enters the engine during a load, and
each load is in one report. If the engine is lost, one last report has all delivered tokens, and the `next_report`
after it raises (`tests/rollout/test_replica.py`).
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import EngineLostError, EngineStatus, InferenceEngine, PauseMode, SamplingParams
from laminar_py.records.environment import Environments
from laminar_py.records.host import Clock
from laminar_py.records.replica import Assignment, ReplicaReport, Survey
from laminar_py.records.stops import Decode
from laminar_py.records.trajectory import Kind
from laminar_py.records.weights import VersionLostError, WeightSource
from laminar_py.repack.signals import EngineSpeed
from laminar_py.rollout.admission import ReplicaAdmission, ReplicaState, is_new
from laminar_py.rollout.calibration import EngineBounds, measure_speed
from laminar_py.rollout.loader import WeightLoader
from laminar_py.rollout.outbox import GATHER_S, Outbox
from laminar_py.rollout.running import RunningTrajectory
from laminar_py.rollout.storing import ResponseStore
from laminar_py.rollout.streams import Streams
from laminar_py.rollout.verifying import Prober

log = logging.getLogger(__name__)
GOES_ON_S, LOOK_S = 60.0, 0.02  # longest wait for responses to go on after a hold, and between two looks


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
        batch: int,  # most new trajectories under a version, with `drain`
        max_batch: int,  # sequences that the engine decodes at a time
        partial_interval_s: float,  # between writes to the journal
        max_seconds: float | None = None,  # cap on the time of a response
        verify_every: int = 0,  # versions, of which one is hashed; 0: none
        prober: Prober | None = None,
        initial: Sequence[Assignment] = (),  # to start with
        gather_s: float = GATHER_S,  # least time between reports
        environments: Environments | None = None,
        decode: Decode = None,  # for stop strings of environments
    ) -> None:
        self.index = index
        self._engine = engine
        self._weights = weights
        self._policy = on_new_weights
        self._max_batch, self._store = max_batch, store
        self._partial_interval_s = partial_interval_s
        self._max_seconds, self._initial = max_seconds, initial
        self._pinned: deque[Assignment] = deque()  # wait for their version; the controller bounds them
        self._expected: set[str] = set()  # trajectories on their way here, under the current version
        self._expected_passes: set[str] = set()  # passes with further members to come, under the current version
        self._newest = -1  # newest version that the relay announced
        self._weights_wanted = asyncio.Event()  # set when `serve` has to look whether weights are due
        self._weights_lock = asyncio.Lock()  # held while weights change, and while they must not
        self._hold: PauseMode | None = None  # set from a call of `hold` to `unhold`
        self._held_since: float | None = None  # when `hold` got the lock, which it keeps
        self._loss_raised = asyncio.Event()  # set when `next_report` has raised the engine's loss
        self._admission = ReplicaAdmission(on_new_weights, batch=batch, max_batch=max_batch)
        self._out = Outbox(index=index, clock=clock, gather_s=gather_s)
        self._streams = Streams(
            engine, self._out, store, environments, decode, on_ended=self._on_ended, on_lost=self._lose
        )
        self._loader = WeightLoader(engine, weights, self._streams, self._out, verify_every, prober)

    # ---- called by the controller

    def start_assignments(self, assignments: Sequence[Assignment]) -> None:
        """Start assignments, or queue them until their version is loaded; if stopped, hand training back."""
        self._admission.received += sum(assignment.version is None for assignment in assignments)
        self._expected.difference_update(assignment.trajectory_id for assignment in assignments)
        self._expected_passes.update(item.group_id for item in assignments if item.more_to_come)
        serves = self._streams.serving.is_set() or self._held_since is not None  # no weights are being loaded
        for assignment in assignments:
            if not self._admission.trains and assignment.kind is Kind.TRAIN:
                self._streams.hand_back(assignment)
            elif assignment.version is None or (serves and assignment.version == self._loader.version):
                self._admission.count(assignment)
                self._streams.start(assignment)
            else:
                self._pinned.append(assignment)
        if self._pinned:
            self._pinned = deque(sorted(self._pinned, key=lambda waiting: waiting.version or 0))
            self._weights_wanted.set()

    async def abort(self, trajectory_ids: Sequence[str]) -> None:
        """Abort trajectories by their ids; later reports have their tokens, with finish reason ABORT."""
        self._hand_back_pinned(trajectory_ids)
        with self._watching_for_loss():
            await self._streams.abort(trajectory_ids)

    async def stop(self, *, evaluations: bool) -> None:
        """Take no more training and abort all training; abort evaluations too if `evaluations` is true."""
        self._admission.stop()
        self._expected.clear()
        assignments = [*self._pinned, *(running.assignment for running in self._running.values())]
        await self.abort([item.trajectory_id for item in assignments if evaluations or item.kind is Kind.TRAIN])

    async def next_report(self, timeout_s: float) -> ReplicaReport:
        """Wait for news, at most `timeout_s`, and return the next report; every host can read the reported tokens.

        Raises `EngineLostError` after the last report of a lost engine. Raises `StoreFullError` if the disk is
        full; that report is lost, and its trajectories continue from the journal in a later epoch.
        """
        if self._admission.lost_error is not None and not self._out.urgent.is_set():
            self._loss_raised.set()
            raise self._admission.lost_error
        await self._out.wait(timeout_s)
        status = self._engine_status()
        # trajectories that wait for environments free their places only while the engine has no queue
        num_away = 0 if status.waiting else len(self.away)
        num_free = self._admission.admissible(num_running=len(self._running), num_away=num_away)
        admissible = 0 if self._pinned else num_free
        report = self._out.pop_report(status, admissible=admissible, received=self._admission.received)
        await self._store.synced()  # one sync for all tokens that the report names
        return report

    async def hold(self, mode: PauseMode) -> None:
        """Stop computing until `unhold`: running requests pause by `mode`, none enters, no weights are loaded.

        Waits while weights are loaded or the speed is measured. A lost engine computes nothing.
        """
        self._hold = mode
        await self._weights_lock.acquire()
        if self._hold is None:  # `unhold` was faster
            self._weights_lock.release()
            return
        self._held_since = self._out.clock.now()
        self._streams.serving.clear()
        with self._watching_for_loss():
            await self._engine.pause(mode)

    async def unhold(self) -> None:
        """Load weights that are due, and compute again after `hold`.

        Returns once half of the responses have continued, with their caches.
        """
        self._hold, since, self._held_since = None, self._held_since, None
        if since is None:
            return
        self._streams.excuse(self._out.clock.now() - since)
        with self._watching_for_loss():
            await self._load_due()  # before caches are computed again
            await self._engine.resume()
            if self._loader.version >= 0:
                self._streams.serving.set()
        before = {name: running.length for name, running in self._running.items() if running.first_token_s}
        self._weights_lock.release()
        self._weights_wanted.set()
        deadline = self._out.clock.now() + GOES_ON_S
        while self._out.clock.now() < deadline:
            stand = sum(name in self._running and self._running[name].length == it for name, it in before.items())
            if 2 * stand <= len(before) or self._held_since is not None:
                return
            await asyncio.sleep(LOOK_S)

    async def measure_speed(
        self, *, vocab: int, max_len: int, sampling: SamplingParams
    ) -> tuple[EngineSpeed, bool]:
        """Wait for the first weights, and return the engine's speed and whether the engine was idle at the start.

        New weights wait during the measurement. Raises `EngineLostError`, after the last report.
        """
        await self._streams.serving.wait()
        try:
            async with self._weights_lock:
                await self._loader.finish_probe()
                bounds = EngineBounds(
                    vocab=vocab,
                    slots=self._max_batch,
                    max_len=max_len,
                    kv_capacity=self._engine.status().kv_capacity,
                    sampling=sampling,
                )
                idle = not self._running
                return await measure_speed(self._engine, bounds, self._out.clock), idle
        except EngineLostError as error:
            self._lose(error)
            await self._loss_raised.wait()
            raise

    def report_soon(self) -> None:
        """Let the next report leave without gathering more news."""
        self._out.flush_now()

    def journal_partials(self) -> None:
        """Write new tokens of running trajectories to the journal now, not only every `partial_interval_s`."""
        self._streams.save_partials()

    @property
    def away(self) -> frozenset[str]:
        """Ids of trajectories whose environment answers a turn now."""
        return self._streams.away

    # ---- called for repacking

    async def survey(self, lengths: Callable[[], Mapping[str, int]] = dict) -> Survey:
        """Return the replica's training trajectories and KV use; no trajectories if the engine is lost.

        `lengths()` gives response lengths by id, where the engine has more tokens than it has delivered.
        """
        status = self._engine_status()
        await asyncio.sleep(0)  # first handle what the engine has just delivered
        training = [] if self._admission.state is ReplicaState.LOST else self._streams.training
        grown = lengths()
        return Survey(
            replica=self.index,
            version=self._loader.version,
            slots=self._max_batch,
            kv_used=status.kv_used,
            kv_capacity=status.kv_capacity,
            running=tuple(
                running.summary(grown.get(running.assignment.trajectory_id, running.length))
                for running in training
                if not running.is_queued
            ),
            waiting=tuple(running.summary(running.length) for running in training if running.is_queued),
            can_move=len(training) == len(self._running) and not self._pinned and self._keeps_version,
            held_s=self._streams.held_s,
        )

    def expect(self, version: int, trajectory_ids: Sequence[str]) -> bool:
        """Promise to keep `version` until these trajectories arrive or are called off; return False if not."""
        if version != self._loader.version or not self._keeps_version:
            return False
        self._expected.update(trajectory_ids)
        return True

    def call_off(self, names: Sequence[str]) -> None:
        """Stop expecting trajectories, or further members of passes, by the ids in `names`."""
        self._expected.difference_update(names)
        self._expected_passes.difference_update(names)
        self._weights_wanted.set()

    async def give_up(self, trajectory_ids: Sequence[str]) -> None:
        """Abort trajectories by their ids, wait for the ends of their streams, and let the next report leave."""
        self._hand_back_pinned(trajectory_ids)
        with self._watching_for_loss():
            await self._streams.give_up(trajectory_ids)
        self._out.flush_now()

    # ---- the loop, and tasks beside it

    async def serve(self) -> None:
        """Load weights whenever the state of the replica allows it, until the engine is lost."""
        while self._admission.state is not ReplicaState.LOST:
            await self._weights_wanted.wait()
            self._weights_wanted.clear()
            async with self._weights_lock:
                with self._watching_for_loss():
                    await self._load_due()

    async def run(self) -> None:
        """Start the initial assignments, then run `serve` and the tasks beside it until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._streams.open(tasks)
                self.start_assignments(self._initial)
                tasks.create_task(self._until_lost(self._engine.watch()), name="watch-engine")
                tasks.create_task(self._follow_relay(), name="follow-relay")
                tasks.create_task(self.serve(), name="serve")
                tasks.create_task(self._watch_partials(), name="watch-partials")
                tasks.create_task(self._until_lost(self._store.keep_synced()), name="keep-synced")
        finally:
            await self._loader.end_probe()
            self._streams.close()

    async def _until_lost(self, work: Awaitable[None]) -> None:
        """Await `work`; if it raises `EngineLostError`, note the loss instead."""
        with self._watching_for_loss():
            await work

    async def _follow_relay(self) -> None:
        """Note each newer version that the relay announces, and wake `serve`, until cancelled."""
        while True:
            self._newest = await self._weights.wait_newer(self._newest)
            self._weights_wanted.set()

    async def _watch_partials(self) -> None:
        """Journal new tokens and abort overdue trajectories every `_partial_interval_s`, until cancelled."""
        while True:
            await asyncio.sleep(self._partial_interval_s)
            if self._max_seconds is not None:
                with self._watching_for_loss():
                    await self._streams.cut_overdue(self._max_seconds)
            with self._watching_for_loss():
                self._streams.save_partials()

    def _on_ended(self) -> None:
        """After a trajectory left, wake `serve` if weights may be due now, and report at once if none runs."""
        if not self._running:
            self._weights_wanted.set()
            self._out.flush_now()
        elif self._may_swap():
            self._weights_wanted.set()

    # ---- weights

    async def _load_due(self) -> None:
        """Load weights if the state of the replica allows it. The caller holds `_weights_lock`."""
        if self._running and not self._pinned and self._may_swap():
            await self._loader.swap(self._policy, may_swap=self._may_swap)
        elif self._running or self._expects_more:
            return  # running trajectories, or trajectories on their way here, need this version
        elif self._pinned:
            await self._load_pinned()
        else:
            await self._begin_batch()

    async def _begin_batch(self) -> None:
        """Load the newest weights, if they are newer, and admit a batch under them; no batch without weights."""
        if self._newest > self._loader.version:
            await self._loader.load(None)
        if self._loader.version < 0:
            return  # a trajectory that ran now would delay the first weights
        # new trajectories that arrived during the load belong to this batch
        self._admission.begin_batch(admitted=sum(is_new(item.assignment) for item in self._running.values()))
        self._out.flush_now()

    async def _load_pinned(self) -> None:
        """Load the first pinned trajectories' version, and start these; report them as lost if no relay has it."""
        version = self._pinned[0].version
        assert version is not None, f"{self._pinned[0].trajectory_id} waits here without a pinned version"
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
        """Start waiting trajectories of the current version; hand back trajectories of older versions (law 2)."""
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
        """Whether it may load newer weights under running trajectories: never under `drain` or during a pass."""
        if self._newest <= self._loader.version:
            return False
        if self._policy is OnNewWeights.DRAIN or not self._admission.trains or self._expected_passes:
            return False
        return all(running.assignment.kind is not Kind.EVAL for running in self._running.values())

    # ---- the loss of the engine

    @contextlib.contextmanager
    def _watching_for_loss(self) -> Iterator[None]:
        """Run the body; if it raises `EngineLostError`, note the loss instead."""
        try:
            yield
        except EngineLostError as error:
            self._lose(error)

    def _lose(self, error: EngineLostError) -> None:
        """Note that the engine is lost, and report all delivered tokens; the first loss is logged."""
        if self._admission.state is not ReplicaState.LOST:
            log.error("replica %d lost its engine: %s", self.index, error)
        self._admission.lose(error)
        self._streams.report_all()

    def _engine_status(self) -> EngineStatus:
        """Return the engine's status; if the engine is lost, note the loss and return a status without load."""
        if self._admission.state is not ReplicaState.LOST:
            try:
                return self._engine.status()
            except EngineLostError as error:
                self._lose(error)
        return EngineStatus(running=0, waiting=0, kv_used=0, kv_capacity=1, version=self._loader.version)

    # ---- its state

    @property
    def _running(self) -> Mapping[str, RunningTrajectory]:
        return self._streams.running

    @property
    def _expects_more(self) -> bool:
        """Whether trajectories, or further members of passes, are on their way here under the current version."""
        return bool(self._expected or self._expected_passes - {item.group_id for item in self._pinned})

    @property
    def _keeps_version(self) -> bool:
        """Whether the replica can promise its version: it serves, takes training, and trajectories run."""
        return self._streams.serving.is_set() and self._admission.trains and bool(self._running)

    def _hand_back_pinned(self, trajectory_ids: Sequence[str]) -> None:
        """Hand back each of these trajectories that still waits for its version."""
        for assignment in [waiting for waiting in self._pinned if waiting.trajectory_id in trajectory_ids]:
            self._pinned.remove(assignment)
            self._streams.hand_back(assignment)
