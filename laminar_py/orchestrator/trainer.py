"""The learner's loop: batch, step, commit, publish, checkpoint; and its way back after a death.

Owned by the controller. Invariant: a step and the consumption of its trajectories are one transaction of the
ledger, and what lies after the last checkpoint can be undone.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import asdict

from laminar_py.cluster.errors import PartDiedError, RunFailedError
from laminar_py.config.algorithm import Advantage, Objective
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule
from laminar_py.control.consumption import Batch
from laminar_py.control.flow import Flow
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recordings import join_recordings
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.orchestrator.checkpoints import Checkpoints, checkpoint_name
from laminar_py.orchestrator.evaluator import Evaluator, Moment
from laminar_py.orchestrator.versions import Versions
from laminar_py.packing.balance import attention_share
from laminar_py.packing.packer import assign, step_terms
from laminar_py.packing.stage import Packing
from laminar_py.records.events import RolledBack, Stepped, StepSkipped
from laminar_py.records.trajectory import Trajectory
from laminar_py.telemetry.stats import Stats, StepRow, read_totals
from laminar_py.workers.learner import LearnerLink
from laminar_py.workers.specs import StepOutcome
from laminar_py.workers.supervisor import Supervisor

log = logging.getLogger(__name__)


class Trainer:
    """Where the learner is: step and version."""

    def __init__(
        self,
        config: RunConfig,
        *,
        run: RunFolder,
        flow: Flow,
        ledger: Ledger,
        learner: LearnerLink,
        evaluator: Evaluator,
        stats: Stats,
        supervisor: Supervisor,
        versions: Versions,
        checkpoints: Checkpoints,
        incarnation: int,
        show: Callable[[StepRow], None],
    ) -> None:
        self.step = 0
        self.stop = asyncio.Event()
        self._config = config
        self._run = run
        self._flow = flow
        self._ledger = ledger
        self._learner = learner
        self._evaluator = evaluator
        self._stats = stats
        self._supervisor = supervisor
        self._versions = versions
        self._incarnation = incarnation
        self._show = show
        self._checkpoints = checkpoints
        self._attention_share = 0.0
        self._skipped = 0  # steps in a row without a finite gradient
        self._saved_step = -1  # of the checkpoint that was begun last
        packer = config.packer
        flow.consumption.pack(
            Packing(
                groups=config.rollout.prompts_per_step,
                max_tokens=packer.max_tokens,
                ranks=config.learner.world_size,
                look_ahead=packer.look_ahead,
                max_passes=packer.max_passes,
                by_id=config.schedule is Schedule.SYNC,
            )
        )

    @property
    def version(self) -> int:
        """The newest that the learner published, -1 before the first."""
        return self._versions.newest

    @property
    def moment(self) -> Moment:
        """Version, step and time of now."""
        return Moment(self.version, self.step, self._stats.rl_s)

    async def start(self) -> None:
        """Bring the learner up from the last checkpoint, publish what it holds, have a checkpoint of it."""
        while True:
            try:
                return await self._start()
            except PartDiedError as error:
                self._respawn(await self._bury(error))

    async def run(self) -> None:
        """Train until all steps are done, time is up or `stop` is set; then checkpoint."""
        while self.step < self._config.steps:
            try:
                batch = await self._next_batch()
            except PartDiedError as error:
                await self._go_back(error)
                continue
            if batch is None:
                break
            try:
                outcome = await self._learn(batch)
            except PartDiedError as error:
                await self._flow.consumption.put_back(batch)
                await self._go_back(error)
                continue
            last = self.stop.is_set() or self.step + 1 == self._config.steps
            if last:
                self._flow.pause()  # what began now would be interrupted
            await self._commit(batch, outcome)
            self._count_skipped(outcome)
            if self.step % self._config.learner.checkpoint_every == 0 or self.step == self._config.steps:
                await self._save_or_go_back()
        await self._save_last()

    # ---- one step

    async def _next_batch(self) -> Batch | None:
        """The next batch, or None when the run is to end.

        Raises PartDiedError if the learner dies over the version that the batch may be waiting for, or over a
        checkpoint; and whatever else a checkpoint fails with.
        """
        groups, limit = self._config.rollout.prompts_per_step, self._config.max_rl_seconds
        take = asyncio.create_task(
            self._flow.consumption.next_batch(groups=groups, version=self.version), name="next-batch"
        )
        stop = asyncio.create_task(self._asked_to_stop(), name="stop")
        failures = [
            asyncio.create_task(self._versions.any_lost(), name="version-lost"),
            asyncio.create_task(self._checkpoints.any_failure(), name="checkpoint-failed"),
        ]
        left = None if limit is None else max(0.0, limit - self._stats.rl_s)
        await asyncio.wait([take, stop, *failures], timeout=left, return_when=asyncio.FIRST_COMPLETED)
        stopped, failure = stop.done(), self._versions.lost or self._checkpoints.failure
        for task in (stop, *failures):
            task.cancel()
        if take.done() and failure is None and not stopped and left != 0.0:
            return take.result()
        take.cancel()
        await asyncio.wait([take])
        if not take.cancelled():
            await self._flow.consumption.put_back(take.result())
        if failure is not None and not stopped:
            raise failure
        return None

    async def _asked_to_stop(self) -> None:
        """Until the run is to stop here. Under `sync` a batch that has begun is trained first: nothing is cut.

        Once the flow is paused no batch is completed any more, whatever is live.
        """
        await self.stop.wait()
        if self._config.schedule is Schedule.SYNC and self._flow.book.groups and self._flow.continuing:
            await asyncio.Event().wait()
        self._flow.pause()

    async def _learn(self, batch: Batch) -> StepOutcome | None:
        """One optimizer step; None if no group of the batch has signal. Raises PartDiedError."""
        if not batch.trajectories:
            return None
        learner, algorithm, step = self._config.learner, self._config.algorithm, self.step + 1
        terms = step_terms(
            batch.bins,
            aggregation=algorithm.aggregation,
            version=batch.version,
            constant=self._config.rollout.sampling.max_new_tokens,
            normalises=algorithm.advantage is Advantage.BATCH_STD,
            teaches=algorithm.teacher_coef > 0,
            compares=algorithm.objective is Objective.BALANCE,
            refers=algorithm.refers_in_stage,
        )
        packed = assign(
            batch.bins,
            terms,
            stand_ins=await self._stand_ins(batch),
            max_tokens=self._config.packer.max_tokens,
            ranks=learner.world_size,
            attention_share=self._attention_share,
        )
        publishes = step % learner.publish_every == 0 or step == self._config.steps
        self._stats.step_begins()
        try:
            return await self._learner.step(packed, version=self._versions.number() if publishes else None)
        finally:
            self._stats.step_ends()

    async def _stand_ins(self, batch: Batch) -> dict[str, Trajectory]:
        """What trains in the place of trajectories that are reweighted, or of which something is recorded."""
        if not self._config.rollout.record:
            return batch.reweighted
        return batch.reweighted | await join_recordings(self._ledger, self._run.path, batch.trajectories)

    async def _commit(self, batch: Batch, outcome: StepOutcome | None) -> None:
        self.step += 1
        row = self._stats.row(
            step=self.step,
            version=batch.version,
            batch=batch.trajectories,
            metrics=outcome.metrics if outcome else None,
            generated_tokens=self._flow.generated_tokens,
            versions_alive=self._flow.book.versions_alive(),
            stall_s=outcome.stall_s if outcome else 0.0,
        )
        self._flow.consumption.commit(batch, self.step)
        tokens = sum(len(trajectory.response_ids) for trajectory in batch.trajectories)
        self._ledger.append(
            Stepped(
                step=self.step,
                incarnation=self._incarnation,
                num_trajectories=len(batch.trajectories),
                num_tokens=tokens,
                loss=row.loss,
                grad_norm=row.grad_norm,
                reward=row.reward,
                elapsed_s=row.learner_s,
                waited_s=row.waited_s,
                reference_s=row.reference_s,
            )
        )
        if outcome is not None and outcome.metrics.skipped:
            ids = tuple(trajectory.id for trajectory in batch.trajectories)
            self._ledger.append(StepSkipped(self.step, self._incarnation, outcome.metrics.skipped, ids))
        if outcome is not None and outcome.version is not None:
            self._copied(outcome.version, parent=batch.version)
        # One transaction, since nothing was awaited in between; the next step need not wait for the disk.
        with self._run.metrics.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        self._show(row)
        await self._evaluator.stepped(self.moment, last=self.step == self._config.steps)

    def _count_skipped(self, outcome: StepOutcome | None) -> None:
        """Raises RunFailedError after too many steps in a row that taught nothing."""
        if outcome is None:
            return
        metrics = outcome.metrics
        self._skipped = self._skipped + 1 if metrics.skipped == metrics.updates else 0
        limit = self._config.learner.max_skipped
        if self._skipped:
            log.warning("step %d: a gradient that is not finite was skipped", self.step)
        if self._skipped >= limit:
            raise RunFailedError(
                f"learner.max_skipped={limit}: the gradient was not finite in {limit} steps in a row, up to step"
                f" {self.step}; lower learner.lr, look at the rewards, or raise it and --resume"
            )

    def _copied(self, version: int, *, parent: int | None) -> None:
        """The learner has copied its weights."""
        self._flow.newest_version = version
        self._versions.copied(version, step=self.step, parent=parent)

    # ---- checkpoints

    async def _save(self) -> None:
        """Begin a checkpoint of this step. Raises PartDiedError."""
        restarts = self._supervisor.total_restarts
        name = checkpoint_name(self.step, incarnation=self._incarnation, restarts=restarts)
        self._saved_step = self.step
        await self._checkpoints.begin(name, step=self.step, version=self.version)

    async def _save_or_go_back(self) -> None:
        """The last one is waited for: what the run has learned is not done before it is on record."""
        try:
            await self._save()
            if self.step == self._config.steps:
                await self._checkpoints.finish()
        except PartDiedError as error:
            await self._go_back(error)

    async def _save_last(self) -> None:
        """The run ends here; if the learner dies over this checkpoint, the one before it stands."""
        try:
            if self._saved_step != self.step:
                await self._save()
            await self._checkpoints.finish()
        except PartDiedError as error:
            death = await self._bury(error)
            standing = self._checkpoints.last
            assert standing is not None, "a learner trains only once there is a checkpoint"
            log.warning("the checkpoint of step %d is lost; %s stands", self.step, standing.path)
            self._supervisor.died(death)

    # ---- the learner's life

    async def _start(self) -> None:
        checkpoint = self._checkpoints.last
        started = await self._learner.start(self._run.path / checkpoint.path if checkpoint else None)
        for part, pid in (await self._learner.pids()).items():
            self._supervisor.started(part, pid)
        # A step without signal counts, though the learner saw none.
        self.step = self._saved_step = checkpoint.step if checkpoint else 0
        log.info("learner: %d parameters, attention %s", started.num_parameters, started.attention)
        self._attention_share = attention_share(
            hidden_size=started.hidden_size,
            num_layers=started.num_layers,
            num_parameters=started.num_parameters,
        )
        await self._versions.adopt(step=self.step)
        version = self._versions.number()
        await self._learner.publish(version)
        self._copied(version, parent=checkpoint.version if checkpoint else None)
        await self._versions.recorded()
        if self._versions.lost is not None:
            raise self._versions.lost
        await self._ledger.commit()
        if checkpoint is None:
            await self._save()
            await self._checkpoints.finish()

    async def _go_back(self, error: PartDiedError) -> None:
        """The learner died: start it from the last checkpoint; what was consumed since is ready again."""
        first = await self._bury(error)
        checkpoint = self._checkpoints.last
        assert checkpoint is not None, "a learner trains only once there is a checkpoint"
        await self._versions.recorded()
        await self._versions.adopt(step=self.step)
        self._ledger.append(RolledBack(checkpoint.step, "learner_died"))
        undone = await self._flow.consumption.roll_back()
        totals = read_totals(self._run.metrics, checkpoint.step)
        self._stats.totals.trained_tokens = totals.trained_tokens
        log.warning("back to step %d; %d trajectories are ready again", checkpoint.step, undone)
        self._respawn(first)
        await self.start()
        self._flow.go_on()

    async def _bury(self, error: PartDiedError) -> PartDiedError:
        """End what is left of the learner, settle its last checkpoint; what it died of."""
        self._learner.kill()
        return await self._checkpoints.settle() or error

    def _respawn(self, error: PartDiedError) -> None:
        self._versions.start_over()
        self._checkpoints.start_over()
        self._supervisor.died(error)
        self._learner.spawn()
