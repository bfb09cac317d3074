"""The learner's side of a run: batches, steps, checkpoints, and restarts of the learner.

It restarts after a crash, and with another number of ranks. Called by the loop `controller.train`. A step and
the consumption of its trajectories are one transaction of the ledger, and steps after the last checkpoint can be
undone (law 1).
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

import msgspec

from laminar_py.config.changes import resized
from laminar_py.config.rollout import Schedule
from laminar_py.control.consumption import StepBatch
from laminar_py.control.lease import DeviceLease, leased_batch
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.control.state import Phase
from laminar_py.control.steps import RefillWatch, pack_step, step_events
from laminar_py.learner.packing.packer import Packed
from laminar_py.ledger.row_files import append_row, open_rows
from laminar_py.observe.stats import read_totals, replay_figures
from laminar_py.records.events import LearnerLoaded, RolledBack
from laminar_py.records.host import counted
from laminar_py.records.metrics import StepMetrics, StepRow
from laminar_py.records.trajectory import TrajectoryRef
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.part import watched
from laminar_py.runtime.orchestrator.checkpoints import (
    Checkpoints,
    checkpoint_name,
    republished_fault,
    restored_fault,
)
from laminar_py.runtime.orchestrator.evaluator import EvalPoint, Evaluator
from laminar_py.runtime.orchestrator.signals import SIGNALS
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.learner import LearnerKeeper
from laminar_py.runtime.workers.specs import StepOutcome

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_SKIPPED = 3  # steps in a row without a finite gradient, after which the run ends


class BatchLostError(Exception):
    """Tokens of a batch cannot be read; `lost` has a reason for each affected trajectory, by its id."""

    def __init__(self, lost: Mapping[str, str]) -> None:
        super().__init__(f"the learner cannot read the tokens of {len(lost)} trajectories: {', '.join(lost)}")
        self.lost = lost


class StoppedError(Exception):
    """The run must stop before some work is done; the work is cancelled."""


class StopRequest:
    """Request to end a run early: by the user, or for a `fault` that makes the run fail."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()  # set when the run must stop
        self.failed = asyncio.Event()  # set when the run must stop as failed
        self.fault: str | None = None  # first line given to `fail`
        self.unsound = False  # the learner's state may be wrong, so no checkpoint of it is kept

    def fail(self, fault: str) -> None:
        """End the run after the present step and its checkpoint, as failed with this line."""
        self.fault = self.fault or fault
        self.asked.set()
        self.failed.set()

    def alarm(self, line: str) -> None:
        """End the run as failed with this line, without another checkpoint."""
        self.unsound = True
        self.fail(line)

    async def unless_asked(self, work: Coroutine[object, object, T]) -> T:
        """Return the result of `work`; cancel it and raise StoppedError if the run must stop first."""
        return await watched(work, self._raise_once_asked())

    async def _raise_once_asked(self) -> None:
        await self.asked.wait()
        raise StoppedError


class Trainer:
    """Makes the steps of a run: batches, checkpoints, and the restart of the learner after its crash."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        learner: LearnerKeeper,
        evaluator: Evaluator,
        versions: Versions,
        lease: DeviceLease,
        stop: StopRequest,
        show: Callable[[StepRow], None],
        show_line: Callable[[str], None] = lambda line: None,
        on_fault: Callable[[str], None] = log.error,  # of a checkpoint, or of a learner that loaded one (law 13)
        check_step: Callable[[StepBatch, StepMetrics, int, int], None] = lambda batch, metrics, step, made: None,
        stepped: Callable[[StepRow, StepBatch], None] = lambda row, batch: None,  # before the next batch is taken
        went_back: Callable[[], None] = lambda: None,  # to a checkpoint
    ) -> None:
        self.step = self._steps_made = 0  # of the run; by the learner, which makes none without trajectories
        self._check_step, self._stepped, self._went_back = check_step, stepped, went_back
        self._stop = stop
        self._config, self._run = incarnation.config, incarnation.run
        self._stream, self._supervisor = incarnation.inputs.stream, incarnation.supervisor
        self._ledger, self._stats = incarnation.ledger, incarnation.stats
        self._incarnation_number = incarnation.number
        self._scheduler, self._learner = scheduler, learner
        self._evaluator, self._versions, self._lease = evaluator, versions, lease
        self._checkpoints = Checkpoints(
            incarnation,
            save=learner.save,
            saved=learner.saved,
            recorded=versions.on_record,
            checkpointed=scheduler.consumption.checkpointed,
            on_fault=on_fault,
        )
        self._on_fault, self._show, self._show_line = on_fault, show, show_line
        self._attention_share = 0.0
        self._refill = RefillWatch(
            max_refill=self._config.rollout.max_refill, record=self._ledger.append, end=stop.fail
        )
        self._num_skipped, self._saved_step = 0, -1  # steps without a finite gradient in a row; newest checkpoint

    @property
    def version(self) -> int:
        """Newest version that the learner has copied; -1 before the first."""
        return self._versions.newest

    @property
    def is_done(self) -> bool:
        """True once all steps are done."""
        return self.step >= self._config.steps

    @property
    def point(self) -> EvalPoint:
        """The learner's newest version, the present step, and the seconds of RL so far."""
        return EvalPoint(self.version, self.step, self._stats.rl_s)

    async def start(self) -> None:
        """Start the learner from the last checkpoint, publish its weights, and save a first checkpoint.

        Raises StoppedError if the run must stop before the learner has started.
        """
        try:
            await self._stop.unless_asked(self._lease.take(self.step, at_once=True))
            while True:
                try:
                    await self._start_learner()
                except PartCrashedError as error:
                    await self._stop.unless_asked(self._replace_learner(await self._kill_learner(error)))
                else:
                    self._evaluator.note_version(self.point)
                    return
        finally:
            await self._lease.give(self.step)

    async def close(self) -> None:
        """Cancel a checkpoint that is still being written."""
        await self._checkpoints.close()

    def _cost_of_end(self) -> str:
        """Return what an end at once loses: the learner's work since the newest checkpoint on record."""
        last = self._checkpoints.last
        if last is None:
            return ""
        lost, step_s = [], self._stats.learner_step_s
        if self.step > last.step:
            first = last.step + 1
            lost.append(f"step {first}" if first == self.step else f"steps {first} to {self.step}")
        if step_s is not None:
            lost.append(f"{step_s:.0f} s of work on step {self.step + 1}")
        what = " and ".join(lost)
        from_ = f"a resume goes on from the checkpoint of step {last.step}"
        return f"{what} would be lost, and {from_}" if lost else f"no step is lost, and {from_}"

    # ---- one step

    async def next_batch(self) -> StepBatch | None:
        """Wait for the next batch; return None if the run must end: a stop, all steps done, `max_rl_seconds`.

        The learner gets other ranks before, if the user wants them. Raises PartCrashedError if the learner crashes
        while it completes a version or a checkpoint, and any other error of a checkpoint.
        """
        while not self.is_done:
            if self._resizes:
                await self._resize()
            batch = await self._wait_for_batch()
            if batch is not None or self._stop.asked.is_set() or self._left_s == 0.0:
                return batch
        return None

    @property
    def _left_s(self) -> float | None:
        """Seconds of RL that are left; None without a limit."""
        limit = self._config.max_rl_seconds
        return None if limit is None else max(0.0, limit - self._stats.rl_s)

    @property
    def _resizes(self) -> bool:
        """Whether the user wants other ranks of the learner, and the run continues."""
        return self._learner.resizing.is_set() and not self._stop.asked.is_set() and self._left_s != 0.0

    async def _wait_for_batch(self) -> StepBatch | None:
        """Wait for the next batch; return None if the run must end, or other ranks were wanted."""
        ends_after_batch = self._config.schedule is Schedule.SYNC
        awaited = f"step {self.step + 1}" if ends_after_batch else f"the checkpoint of step {self.step}"
        SIGNALS.enter(awaited, self._cost_of_end)
        groups, left = self._config.fresh_groups, self._left_s
        work = leased_batch(self._lease, self._scheduler, groups=groups, version=self.version, step=self.step)
        take = asyncio.create_task(work, name="next-batch")
        stop = asyncio.create_task(self._pause_on_stop(), name="stop")
        others = [
            asyncio.create_task(self._versions.wait_until_lost(), name="version-lost"),
            asyncio.create_task(self._checkpoints.any_failure(), name="checkpoint-failed"),
            asyncio.create_task(self._until_resized(), name="learner-resizes"),
        ]
        try:
            await asyncio.wait([take, stop, *others], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._give_back(take)
            raise
        finally:
            stopped, failure = stop.done(), self._versions.lost or self._checkpoints.failure
            for task in (stop, *others):
                task.cancel()
        if take.done() and failure is None and not stopped and left != 0.0:
            return take.result()
        await self._give_back(take)
        if failure is not None and not stopped:
            raise failure
        return None

    async def _until_resized(self) -> None:
        """Wait until other ranks are wanted; without an end once the run must stop, since it keeps its ranks."""
        await self._learner.resizing.wait()
        if self._stop.asked.is_set():
            await asyncio.Event().wait()

    async def _resize(self) -> None:
        """Start the learner with the ranks that the user wants, from a checkpoint of this step.

        It keeps its ranks if GPUs for others are no longer free, the checkpoint has a fault, the run must end, or
        the user has asked again meanwhile. Raises PartCrashedError.
        """
        if self._saved_step != self.step:
            await self._save()
        await self._checkpoints.finish()
        await self._versions.recorded()
        if self._versions.lost is not None:
            raise self._versions.lost
        last, before = self._checkpoints.last, self._learner.num_ranks
        if last is None or last.step != self.step:
            ranks_now = counted(before, "rank")
            self._show_line(f"the learner keeps {ranks_now}, since step {self.step} has no sound checkpoint")
            self._learner.drop_request()
        elif self._resizes and await self._learner.resize():
            ranks = self._stats.ranks = self._learner.num_ranks
            self._config = resized(self._config, ranks)
            self._checkpoints.start_over()
            self._show_line(f"after step {self.step} the learner goes from {before} to {counted(ranks, 'rank')}")
            await self.start()

    async def _give_back(self, take: asyncio.Task[StepBatch]) -> None:
        """Cancel a task that waits for a batch, and put back a batch that it already has."""
        take.cancel()
        await asyncio.wait([take])
        if not take.cancelled():
            await self._scheduler.consumption.put_back(take.result())

    async def _pause_on_stop(self) -> None:
        """Wait until the run is to stop before the next batch, and pause the scheduler.

        Under `sync`, a batch whose generation has begun is trained first. This does not hold for a run that fails,
        nor for a scheduler that is paused, since neither may complete a batch.
        """
        await self._stop.asked.wait()
        state = self._scheduler.state
        if self._config.schedule is Schedule.SYNC and state.groups and state.phase is not Phase.PAUSED:
            await self._stop.failed.wait()
        self._scheduler.pause()

    async def learn(self, batch: StepBatch) -> StepOutcome | None:
        """Pack a batch and take its step; return None, without a step, for a batch without trajectories.

        Raises PartCrashedError, or BatchLostError if tokens of the batch are lost; no step is taken then.
        """
        if not batch.trajectories:
            return None
        SIGNALS.enter(f"step {self.step + 1}", self._cost_of_end)
        shares = self._config.rollout.shares_prompts
        packed = pack_step(self._config, batch, attention_share=self._attention_share, shares=shares)
        self._stats.begin_step()
        try:
            return await self._learn_packed(packed)
        finally:
            self._stats.end_step()

    async def _learn_packed(self, packed: Packed[TrajectoryRef]) -> StepOutcome:
        """Let the ranks read their tokens and take a step; the step copies a version if one is due."""
        lost = await self._learner.fetch(packed)
        if lost:
            raise BatchLostError(lost)
        step = self.step + 1
        # steps since the newest version, this step included
        unpublished = 1 + self._scheduler.state.ages.age_of(self.version)
        publish_every = self._scheduler.state.settings.admission.publish_every  # `laminar set` may change it
        publishes = unpublished >= publish_every or step == self._config.steps
        version = self._versions.next_number() if publishes else None
        return await self._learner.step(packed.weights, version=version)

    def pause_if_last(self, batch: StepBatch) -> None:
        """Pause the scheduler if no step follows this batch, since the run would interrupt new trajectories.

        Also record a batch that `rollout.max_refill` left short. Too many batches without signal end the run.
        """
        self._refill.observe_batch(batch, self._scheduler.consumption.refill_stopped(batch, self.step + 1))
        if self._stop.asked.is_set() or self.step + bool(batch.groups) == self._config.steps:
            self._scheduler.pause()

    async def commit(self, batch: StepBatch, outcome: StepOutcome | None) -> None:
        """Record a step, and begin the evaluations that are due. Raises RunFailedError (`MAX_SKIPPED`)."""
        self.step += 1
        if outcome is not None:
            self._steps_made += 1
            self._check_step(batch, outcome.metrics, self.step, self._steps_made)
        row = self._stats.step_row(
            step=self.step,
            version=batch.version,
            batch=batch.trajectories,
            staleness=batch.staleness[: batch.num_fresh],
            metrics=outcome.metrics if outcome else None,
            generated_tokens=self._scheduler.state.generated_tokens,
            versions_alive=self._scheduler.state.versions_alive(),
            stall_s=outcome.stall_s if outcome else 0.0,
        )
        replay = replay_figures(batch.staleness[batch.num_fresh :])
        row = msgspec.structs.replace(row, order=self._stream.figures, replay=replay)
        await finish_despite_cancel(self._record(batch, row, outcome))
        with open_rows(self._run.metrics) as file:
            append_row(file, row)
        self._show(row)
        self._stepped(row, batch)
        await self._evaluator.stepped(self.point, last=self.is_done)
        self._count_skipped(outcome)

    async def _record(self, batch: StepBatch, row: StepRow, outcome: StepOutcome | None) -> None:
        """Record a step in one transaction, without waiting for the disk."""
        skipped = outcome.metrics.skipped if outcome else 0
        with self._ledger.together():
            await self._scheduler.consumption.commit(batch, self.step)
            self._ledger.append_all(step_events(row, batch, incarnation=self._incarnation_number, skipped=skipped))
            if outcome is not None and outcome.version is not None:
                self._note_copied(outcome.version, parent=batch.version)

    def _count_skipped(self, outcome: StepOutcome | None) -> None:
        """Count steps in a row in which every update was skipped. Raises RunFailedError at `MAX_SKIPPED`."""
        if outcome is None:
            return
        metrics = outcome.metrics
        self._num_skipped = self._num_skipped + 1 if metrics.skipped == metrics.updates else 0
        if self._num_skipped:
            log.warning("step %d: no update was made, since the loss or gradient is not finite", self.step)
        if self._num_skipped >= MAX_SKIPPED:
            raise RunFailedError(
                f"the loss or gradient was not finite in {MAX_SKIPPED} steps in a row, up to step {self.step};"
                " lower learner.lr or look at the rewards, and --resume"
            )

    def _note_copied(self, version: int, *, parent: int | None) -> None:
        """Report to scheduler and `Versions` that the learner has copied its weights as `version`."""
        self._scheduler.published(version)
        self._versions.copied(version, step=self.step, parent=parent)

    # ---- checkpoints

    async def _save(self) -> None:
        """Begin a checkpoint of this step, and return once the learner may continue. Raises PartCrashedError."""
        SIGNALS.enter(f"the checkpoint of step {self.step}", self._cost_of_end)
        await self._lease.take(self.step, at_once=True)
        restarts = self._supervisor.total_restarts
        name = checkpoint_name(self.step, incarnation=self._incarnation_number, restarts=restarts)
        self._saved_step = self.step
        await self._checkpoints.begin(name, step=self.step, version=self.version)

    async def save_if_due(self) -> None:
        """Begin a checkpoint every `learner.checkpoint_every` steps and after the last step; wait for the last."""
        is_due = self.is_done or not self.step % self._config.learner.checkpoint_every
        if self._stop.unsound or not is_due:
            return
        try:
            await self._save()
            if self.is_done:
                await self._checkpoints.finish()
        except PartCrashedError as error:
            await self.go_back(error)

    async def save_last(self) -> None:
        """Save a checkpoint at the end of the run; if the learner crashes meanwhile, keep the one before.

        After it shared devices are the replicas'.
        """
        SIGNALS.enter(f"the checkpoint of step {self.step}", self._cost_of_end)
        try:
            if self._saved_step != self.step and not self._stop.unsound:
                await self._save()
            await self._checkpoints.finish()
        except PartCrashedError as error:
            crash = await self._kill_learner(error)
            standing = self._checkpoints.last
            assert standing is not None, "a learner trains only once there is a checkpoint"
            log.warning(
                "the learner crashed, so the checkpoint of step %d is lost; a resume starts from %s",
                self.step,
                standing.path,
            )
            self._supervisor.crashed(crash)
        finally:
            await self._lease.give(self.step)

    # ---- the learner's life

    async def _start_learner(self) -> None:
        """Start the learner from the last checkpoint, publish its weights, and record that version.

        A new run also saves its first checkpoint here. Raises the error of a version that was lost.
        """
        checkpoint = self._checkpoints.last
        folder = self._run.path / checkpoint.path if checkpoint else None
        started = await self._stop.unless_asked(self._learner.start(folder))
        if fault := await asyncio.to_thread(restored_fault, self._run, checkpoint, started):
            self._on_fault(fault)
        SIGNALS.enter("the first version and its checkpoint")
        # the learner counts only optimizer steps, so the step comes from the checkpoint
        self.step = self._saved_step = checkpoint.step if checkpoint else 0
        self._steps_made = started.steps_taken
        log.info("learner: %d parameters, attention %s", started.num_parameters, started.attention)
        for refused in started.refused:
            log.warning("learner: attention kernel not used, %s", refused)
        self._ledger.append(LearnerLoaded(started.attention, started.refused))
        self._attention_share = started.attention_share
        await self._adopt()
        version = self._versions.next_number()
        await self._learner.publish(version)
        self._note_copied(version, parent=checkpoint.version if checkpoint else None)
        await self._versions.recorded()
        if self._versions.lost is not None:
            raise self._versions.lost
        await self._ledger.commit()
        if checkpoint is None:
            await self._save()
            await self._checkpoints.finish()
        elif fault := await asyncio.to_thread(republished_fault, self._run, checkpoint, version):
            self._on_fault(fault)

    async def _adopt(self) -> None:
        """Record versions that a crashed learner completed but did not report; the scheduler learns their ages."""
        for version in await self._versions.adopt(step=self.step):
            self._scheduler.state.ages.record_version(version)

    async def go_back(self, error: PartCrashedError) -> None:
        """Restart a crashed learner from its last checkpoint; trajectories of later steps are ready again."""
        crash = await self._kill_learner(error)
        checkpoint = self._checkpoints.last
        assert checkpoint is not None, "a learner trains only once there is a checkpoint"
        await self._versions.recorded()
        await self._adopt()
        self._ledger.append(RolledBack(checkpoint.step, "learner_crashed"))
        undone = await self._scheduler.consumption.roll_back(checkpoint.step)
        totals = read_totals(self._run.metrics, checkpoint.step)
        self._stats.totals.trained_tokens = totals.trained_tokens
        line = f"the learner goes back to step {checkpoint.step}; {undone} trajectories are ready again ({crash})"
        log.warning(line)
        self._show_line(line)
        try:
            await self._stop.unless_asked(self._replace_learner(crash))
        except StoppedError:
            await self._lease.give(self.step)
            raise
        await self.start()
        self._went_back()
        self._scheduler.admit()

    async def _kill_learner(self, error: PartCrashedError) -> PartCrashedError:
        """Kill the learner's processes; wait until its unfinished checkpoint is on record or has failed."""
        self._learner.kill()
        try:
            await self._checkpoints.finish()
        except PartCrashedError as lost:
            return lost
        return error

    async def _replace_learner(self, crash: PartCrashedError) -> None:
        """Forget the crashed learner's versions and checkpoint, count the crash, and replace its processes."""
        self._versions.start_over()
        self._checkpoints.start_over()
        await self._learner.replace(crash)


async def finish_despite_cancel(work: Coroutine[object, object, None]) -> None:
    """Finish short `work` even if the caller is cancelled; then raise the cancellation."""
    task = asyncio.create_task(work, name="finish-despite-cancel")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
