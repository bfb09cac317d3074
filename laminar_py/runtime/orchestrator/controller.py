"""The controller of a run, or of an evaluation: the loops that a trajectory passes, and the phases of a run.

    prompts of the data
          v         assignments                  reports
       +----------+  [commands]   ............   [reports]   +-----------------+
       | dispatch | ------------> : replicas : ------------> | process_reports |
       +----------+               ............               +-----------------+
          ^   ^                         ^ weights              |      | finished responses
          |   '---[waiting]-- partial responses ---------------'      v
          |                             |             [unscored] --> scorers ----> [scores]
          | room for groups             |             [to judge] --> frozen models     |
          |                             |                                |             v
       +-------+       [ready]          |       +----------------------------+ +----------------+
       | train | <----------------------|------ |      collect_logprobs      | | collect_scores |
       +-------+     groups with        |       +----------------------------+ +----------------+
          |          advantages         |
          | version [copied]       +---------+
          '----------------------> | publish | --> relays --> replicas
                                   +---------+

Each loop is a function below. Each queue is bounded:

    queue      type                   owner                           bound
    waiting    LiveTrajectory         control.waiting                 live trajectories: `buffer.capacity`
    commands   Command                runtime.link.hub                work that replicas have room for
    reports    `Reports`              `Handoff` here                  one; the hub waits until it is processed
    unscored   Unscored               reward.stage                    trajectories that can wait: `max_scored`
    to judge   TrajectoryRef          learner.packing.buffer          live trajectories; a queue for each model
    scores     list[Score]            `Handoff` here                  one; a scorer waits until it is recorded
    ready      ReadyGroup             learner.packing.buffer          live trajectories
    copied     version                versions                        one; the learner completes it before the next

An evaluation has no learner: the loops `train`, `collect_logprobs` and `publish` are missing. Weights
stay version 0, and each set is evaluated once. Beside the data path, keepers keep all processes alive.

Phases: start parts -> first version -> evaluation -> RL -> stop replicas -> evaluations -> summary. Runs in the
process of `laminar train` or `laminar eval`; each part in a process of its own has a keeper in `workers`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import TypeAlias

from laminar_py.control.dispatcher import DISPATCH_S, Throttle
from laminar_py.control.incoming import HOUSEKEEPING_S
from laminar_py.control.scheduler import TrajectoryScheduler, check_scored
from laminar_py.ledger.evaluations import comparable, open_passes, read_evaluations
from laminar_py.ledger.recovery import Recovered, recover
from laminar_py.ledger.row_files import read_rows
from laminar_py.observe.fleet import watch_fleet, watch_memory
from laminar_py.observe.live import View
from laminar_py.observe.stats import Stats
from laminar_py.observe.summary import Summary, summarise
from laminar_py.records.events import Evaluated, RunEnded
from laminar_py.records.metrics import StepRow
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason, Kind, Prompt, TrajectoryRef
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.rollout.calibration import MOST_S
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.link.hub import ReplicaConnection
from laminar_py.runtime.link.messages import Abort, CallOff
from laminar_py.runtime.orchestrator.alarms import Alarms
from laminar_py.runtime.orchestrator.evaluator import EvalPoint, Evaluator
from laminar_py.runtime.orchestrator.progress import RunProgress, named_if_slow
from laminar_py.runtime.orchestrator.requests import SettingRequests
from laminar_py.runtime.orchestrator.resume import describe_surplus, is_over, record_overrides
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.orchestrator.setup import (
    Handoff,
    TrainingParts,
    lease_devices,
    limit_gc_pauses,
    make_scheduler,
    record_start,
    seal,
)
from laminar_py.runtime.orchestrator.signals import SIGNALS
from laminar_py.runtime.orchestrator.sources import (
    EvalSource,
    EvalSummary,
    answers_on_record,
    publish_source,
    summarise_evaluation,
)
from laminar_py.runtime.orchestrator.trainer import BatchLostError, StoppedError, StopRequest, Trainer
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.workers.environments import EnvironmentProcesses
from laminar_py.runtime.workers.incarnation import RunStart, open_incarnation
from laminar_py.runtime.workers.learner import FrozenStage, LearnerKeeper
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.replicas import Replicas
from laminar_py.runtime.workers.segments import RunSegments, restore_live
from laminar_py.runtime.workers.trackers import Trackers

log = logging.getLogger(__name__)
Reports: TypeAlias = Sequence[tuple[ReplicaConnection, ReplicaReport]]
Result: TypeAlias = Summary | EvalSummary

SCORES_AT_ONCE = 16  # recorded before other tasks of the event loop get a turn
SPEED_PHASE = f"measuring a replica's speed for repacking (once per model and machine, about {MOST_S:g} s)"

# ---- the loops


def dispatch(scheduler: TrajectoryScheduler, *, replicas: Replicas, dispatch_loop: Throttle, stats: Stats) -> None:
    """Send aborts, assignments and called-off moves to replicas; wake `dispatch_loop` if assignments remain."""
    replicas.update_places()
    for index, trajectory_ids in scheduler.state.take_aborts().items():
        replicas.send_command(index, Abort(list(trajectory_ids)))
    for index, assignments in scheduler.dispatcher.dispatch().items():
        replicas.assign(index, assignments)
    for index, trajectory_ids in scheduler.moves.take_called_off().items():
        replicas.send_command(index, CallOff(list(trajectory_ids)))
    stats.set_generating(scheduler.views.in_flight > 0)
    if scheduler.dispatcher.has_more:
        dispatch_loop.wake()


async def process_reports(
    reports: Handoff[Reports],
    *,
    scheduler: TrajectoryScheduler,
    replicas: Replicas,
    dispatch_loop: Throttle,
    stats: Stats,
) -> None:
    """Process replicas' reports until cancelled; finished responses go to the scorers and the frozen models.

    If a replica is idle or has new weights, `dispatch` runs immediately; otherwise it runs within `DISPATCH_S`.
    """
    async for batch in reports.items():
        has_idle_or_updated = False
        for connection, report in batch:
            views, index = scheduler.views, connection.replica
            version = views.by_index[index].version
            if replicas.is_killed(index):
                continue
            await scheduler.incoming.on_report(report)
            stats.on_report(report)
            replicas.check_weights(connection, report)
            has_idle_or_updated |= views.by_index[index].idle or report.status.version != version
        stats.set_generating(scheduler.views.in_flight > 0)
        if has_idle_or_updated:
            dispatch_loop.run_now()
        else:
            dispatch_loop.wake()


async def collect_scores(
    scores: Handoff[Sequence[Score]], *, scheduler: TrajectoryScheduler, scoring: Scoring, dispatch_loop: Throttle
) -> None:
    """Record scores until cancelled. A group with all its scores goes to the learner, or is dropped."""
    async for batch in scores.items():
        of_responses = scoring.finish_trials(batch)
        lost = {it.trajectory_id: it.detail for it in of_responses if it.failure is DropReason.TOKENS_LOST}
        if lost:
            await scheduler.incoming.drop_lost(lost)
        for number, score in enumerate(of_responses, 1):
            if number % SCORES_AT_ONCE == 0:
                await asyncio.sleep(0)
            if score.trajectory_id in lost:
                continue
            trajectory = scheduler.state.live.get(score.trajectory_id)
            if trajectory is not None:
                scoring.count_score(score, trajectory)
            await scheduler.incoming.on_score(score)
        dispatch_loop.wake()  # a group with all its scores makes room for another group


async def collect_logprobs(stage: FrozenStage, *, scheduler: TrajectoryScheduler) -> None:
    """Record log-probabilities of a frozen model until cancelled; drop trajectories with lost tokens."""
    while True:
        answer = await stage.next_answer(wanted=scheduler.is_live)
        for trajectory_id, logprobs in answer.logprobs.items():
            await scheduler.incoming.on_column(trajectory_id, stage.column, logprobs)
        await scheduler.incoming.drop_lost(answer.lost)


async def train(trainer: Trainer, *, scheduler: TrajectoryScheduler) -> None:
    """Train on batches of ready groups until all steps are done or the run must end, then save a checkpoint.

    A crashed learner restarts from its last checkpoint. The groups of a batch without a step are ready again.
    """
    while not trainer.is_done:
        batch = None
        try:
            batch = await trainer.next_batch()
            if batch is None:
                break
            outcome = await trainer.learn(batch)
        except PartCrashedError as error:
            if batch is not None:
                await scheduler.consumption.put_back(batch)
            await trainer.go_back(error)
            continue
        except BatchLostError as error:
            assert batch is not None, "only `learn` raises BatchLostError, and it has a batch"
            await scheduler.consumption.put_back(batch)
            await scheduler.incoming.drop_lost(error.lost)
            continue
        trainer.pause_if_last(batch)
        if batch.groups:  # a batch without groups is no step
            await trainer.commit(batch, outcome)
            await trainer.save_if_due()
    await trainer.save_last()


# ---- the parts and their phases


class Controller:
    """Leads a run, or the evaluation of a `source`, from its start or a resume to its end."""

    def __init__(self, start: RunStart, *, view: View, source: EvalSource | None = None) -> None:
        config, run = start.config, start.run
        continues = start.resumed and run.has_ledger
        self._recovered = recover(run.path, exists=run.has, kept=config.buffer.replay.kept) if continues else None
        self._evaluations = read_evaluations(run.ledger) if continues else []
        check_scored(self._recovered.live if self._recovered else (), config.algorithm)
        self._incarnation = incarnation = open_incarnation(start, recovered=self._recovered)
        self._source, self.view = source, view
        self._stop = StopRequest()
        self._alarms = Alarms(incarnation, self._recovered, stop=self._stop.alarm, show_line=view.notice)
        self._reports: Handoff[Reports] = Handoff()
        self._scores: Handoff[Sequence[Score]] = Handoff()
        self._dispatch_loop = Throttle(self._dispatch, every_s=DISPATCH_S)
        self._trackers = Trackers(incarnation, resumed=continues)
        self._segments = segments = RunSegments(incarnation)
        self._frozen = [FrozenStage(incarnation, source, segments=segments) for source in config.algorithm.stages]
        self._scheduler = scheduler = make_scheduler(
            incarnation,
            submit_for_scoring=self._submit_for_scoring,
            frozen=self._frozen,
            versions_return=source is not None,
            fail=self._stop.fail,
            on_fault=partial(self._alarms.tell, "draws", "controller"),
        )
        self._relays = relays = Relays(incarnation)
        self._environments = EnvironmentProcesses(incarnation, relays.keys)
        self._replicas = Replicas(
            incarnation,
            scheduler=scheduler,
            relays=relays,
            segments=segments,
            dispatch_loop=self._dispatch_loop,
            on_reports=self._reports.hand_over,
        )
        self._replicas.check, self._scoring = self._alarms.reported, self._make_scoring()
        self._progress = RunProgress(incarnation, view=view, scheduler=scheduler, scoring=self._scoring)
        self._evaluator = self._make_evaluator()
        self._learning = self._make_learning() if source is None else None

    def interrupt(self) -> None:
        """Request the end of the run: a step and its checkpoint are finished, a start is cancelled."""
        self._stop.asked.set()
        SIGNALS.tell()

    def _make_scoring(self) -> Scoring:
        """Make the stage that scores responses; its scores go to `collect_scores`, its warnings to the view."""
        scoring = Scoring(
            self._incarnation,
            scheduler=self._scheduler,
            segments=self._segments,
            deliver=self._scores.hand_over,
            view=self.view,
            end=self._stop.fail,
            trains=self._source is None,
        )
        scoring.check = self._alarms.scored
        return scoring

    def _make_evaluator(self) -> Evaluator:
        """Make the evaluator of held-out sets; its results go to the ledger, the view and the trackers."""
        return Evaluator(
            self._incarnation,
            scheduler=self._scheduler,
            replicas=self._replicas,
            dispatch_loop=self._dispatch_loop,
            hold=self._hold,
            publish=self._publish_result,
            show_line=self.view.notice,
            trains=self._source is None,
        )

    def _make_learning(self) -> TrainingParts:
        """Make the parts that only an RL run has: learner, versions, trainer, repacking and changes."""
        incarnation, scheduler, replicas = self._incarnation, self._scheduler, self._replicas
        learner = LearnerKeeper(incarnation, relays=self._relays, show=self.view.progress)
        versions = Versions(incarnation, completed=learner.completed, stored=self._relays.published)
        versions.check = partial(self._alarms.published, learner)
        requests = SettingRequests(
            incarnation,
            scheduler=scheduler,
            replicas=replicas,
            scoring=self._scoring,
            dispatch_loop=self._dispatch_loop,
            alarms=self._alarms,
            learner=learner,
        )
        self._alarms.unquantize = requests.unquantize
        trainer = Trainer(
            incarnation,
            scheduler=scheduler,
            learner=learner,
            evaluator=self._evaluator,
            versions=versions,
            lease=lease_devices(incarnation, replicas, learner),
            stop=self._stop,
            show=self._show_step,
            show_line=self.view.notice,
            on_fault=partial(self._alarms.tell, "checkpoint", "learner"),
            check_step=self._alarms.stepped,
            stepped=requests.stepped,
            went_back=requests.went_back,
        )
        migration = Migration(
            MigrationSettings.from_config(incarnation.config),
            scheduler=scheduler,
            fleet=replicas,
            published=versions.recorded_after,
            clock=incarnation.clock,
        )
        return TrainingParts(
            learner=learner, versions=versions, trainer=trainer, migration=migration, requests=requests
        )

    # ---- phases

    async def lead(self) -> Result:
        """Lead the run through all its phases, or to a stop after `interrupt`; return the summary."""
        await self._incarnation.ledger.start()
        self._alarms.start()
        self._trackers.start()
        self.view.recall(self._evaluations)
        summary: Result | None = None
        try:
            await record_start(self._incarnation, self._recovered)
            async with asyncio.TaskGroup() as tasks:
                background = list[asyncio.Task[None]]()
                try:
                    finished = await self._lead_phases(tasks, background)
                except StoppedError:
                    finished = False
                summary = await self._end(finished=finished)
                for task in background:
                    task.cancel()
            return summary
        finally:
            await self._close(summary)

    async def _lead_phases(self, tasks: asyncio.TaskGroup, background: "list[asyncio.Task[None]]") -> bool:
        """Lead the run to its end; return False, or raise StoppedError, if it stops early. Add to `background`."""
        incarnation = self._incarnation
        if incarnation.made_steps and await asyncio.to_thread(is_over, incarnation.run, incarnation.config):
            return True
        SIGNALS.enter("the last tokens of its replicas")
        with named_if_slow("starting relays, scorers and environments", self.view.notice):
            await self._stop.unless_asked(self._start_parts())
        background += [tasks.create_task(work, name=name) for name, work in self._loops().items()]
        if self._learning is None:
            await self._stop.unless_asked(self._lead_evaluation())
            return True
        async for name, work in self._start_learning(self._learning):
            background.append(tasks.create_task(work, name=name))
        return await self._lead_rl(self._learning.trainer)

    async def _start_parts(self) -> None:
        """Spawn all processes, start the parts that need no learner, and continue interrupted trajectories."""
        learner = None if self._learning is None else self._learning.learner
        for part in (self._scoring, self._environments, learner, self._replicas, *self._frozen):
            if part is not None:
                part.spawn()
        async with asyncio.TaskGroup() as tasks:
            for started in (self._relays, self._scoring, self._environments):
                tasks.create_task(started.start())
        if self._recovered is not None and self._learning is not None:
            self._scoring.grow(self._scoring.most + len(self._recovered.live))  # of an earlier, larger fleet
            await self._restore_passes(self._recovered)
            await self._restore()
            if surplus := describe_surplus(self._scheduler.state.settings, len(self._scheduler.state.groups)):
                self.view.notice(surplus)
            if not self._incarnation.made_steps:
                self._scheduler.continue_live()  # interrupted trajectories continue while the learner starts

    def _loops(self) -> dict[str, Coroutine[object, object, None]]:
        """Return the loops, by task name, that run from the start; `train` runs in the task of `lead`."""
        scheduler, state, dispatch_loop = self._scheduler, self._scheduler.state, self._dispatch_loop
        run, stats = self._incarnation.run, self._incarnation.stats
        loops: dict[str, Coroutine[object, object, None]] = {
            "relays": self._relays.keep(),
            "replicas": self._replicas.keep(),
            "environments": self._environments.keep(),
            "scorers": self._scoring.run(),
            "dispatch": dispatch_loop.run(),
            "process-reports": process_reports(
                self._reports,
                scheduler=scheduler,
                replicas=self._replicas,
                dispatch_loop=dispatch_loop,
                stats=stats,
            ),
            "collect-scores": collect_scores(
                self._scores, scheduler=scheduler, scoring=self._scoring, dispatch_loop=dispatch_loop
            ),
            "deadlines": self._keep_deadlines(),
            "sweep-environments": self._environments.sweep(self._is_followed),
            "memory": watch_memory(stats, run.shm(self._incarnation.config.relay.shm)),
        }
        if self._learning is not None:
            loops["publish"] = self._learning.versions.run()
            loops["fleet-rows"] = watch_fleet(run.fleet, stats, generated_tokens=lambda: state.generated_tokens)
            loops["requests"] = self._learning.requests.run()
        return loops

    async def _start_learning(
        self, learning: TrainingParts
    ) -> AsyncIterator[tuple[str, Coroutine[object, object, None]]]:
        """Start the learner, then the parts that need its first version; yield (task name, loop) of each."""
        await learning.trainer.start()
        if overrides := self._incarnation.overrides:
            await asyncio.to_thread(record_overrides, self._incarnation.run, overrides)
        for stage in self._frozen:
            self._progress.enter(f"the {stage.source} model starts")
            await self._stop.unless_asked(stage.bring_up())  # after a warm start, which the reference may load
            stage.check = partial(self._alarms.referred, stage.source)
            yield f"collect-{stage.source}", collect_logprobs(stage, scheduler=self._scheduler)
        yield "pauses", limit_gc_pauses()
        if self._incarnation.config.repacks and not self._incarnation.made_steps:
            self._progress.enter(SPEED_PHASE)
            speed = await self._stop.unless_asked(self._replicas.speed())
            log.info("engine: %s", speed)
            yield "repack", learning.migration.run(speed)

    async def _lead_rl(self, trainer: Trainer) -> bool:
        """Evaluate the first version, train all steps, finish evaluations; return False if the run ends early."""
        stats, scheduler = self._incarnation.stats, self._scheduler
        if trainer.step == 0:
            SIGNALS.enter("the last tokens of its replicas")
            if self._incarnation.inputs.sets:
                self._progress.enter(f"evaluation of version {trainer.version}, before RL")
            await self._stop.unless_asked(self._evaluator.first(trainer.point))
        stats.set_rl_phase(True)
        # no work begins in a run that is about to end
        if not trainer.is_done and (scheduler.state.groups or not self._stop.asked.is_set()):
            scheduler.admit()
            self._dispatch_loop.run_now()
        try:
            await train(trainer, scheduler=scheduler)
        finally:
            stats.set_rl_phase(False)
        scheduler.pause()
        if self._stop.asked.is_set():
            finished = trainer.is_done and self._stop.fault is None and not self._evaluator.has_left(trainer.point)
            if finished:
                await self._replicas.stop(evaluations=True)
            return finished
        await self._stop.unless_asked(self._finish_evaluations(trainer))
        return True

    async def _finish_evaluations(self, trainer: Trainer) -> None:
        """Stop training on all replicas, and evaluate the last version and the deferred ones."""
        last = f"evaluation of version {trainer.version}, after step {trainer.step}"
        self._progress.enter(f"{last if self._incarnation.inputs.sets else 'replicas stop'}: RL is over")
        await self._replicas.stop(evaluations=False)
        await self._evaluator.finish(trainer.point)

    async def _lead_evaluation(self) -> None:
        """Publish the weights and evaluate every set under them.

        Passes begin after the publish, since a replica reports a version as lost if no relay has it. An earlier
        controller's trajectories continue after the passes begin, since they belong to these passes.
        """
        assert self._source is not None, "an evaluation has a source"
        published = await publish_source(self._incarnation, self._relays, step=self._source.step)
        self._scheduler.published(published.version)
        done = {result.pass_id for result in self._evaluations}
        run, sets = self._incarnation.run, list(self._incarnation.inputs.sets)
        answers = await asyncio.to_thread(answers_on_record, run, sets, done=done) if self._recovered else {}
        passes = self._evaluator.every_set(
            EvalPoint(published.version, self._source.step, 0.0), done=done, answers=answers
        )
        await self._restore()
        self._dispatch_loop.wake()
        for ended in asyncio.as_completed(passes):
            await ended
            await self._incarnation.ledger.commit()  # each result is on disk at once

    async def _end(self, *, finished: bool) -> Result:
        """Record the end of the run, stopped early unless `finished`; return the summary or raise its fault."""
        incarnation, config = self._incarnation, self._incarnation.config
        SIGNALS.enter("the last tokens of its replicas")
        if not finished:
            self._evaluator.abandon()
            self._scheduler.end()
            await self._replicas.stop(evaluations=True)
        await self._segments.close()
        incarnation.ledger.append(RunEnded(incarnation.number, "finished" if finished else "interrupted"))
        await incarnation.ledger.commit()
        if self._source is not None:
            summary: Result = summarise_evaluation(incarnation.run, self._source, finished=finished)
        else:
            summary = summarise(
                incarnation.run,
                incarnation.stats,
                finished=finished,
                restarts=dict(incarnation.supervisor.restarts),
                sets=config.eval.sets,
                has_environment=config.has_environment,
            )
        if self._stop.fault is not None and not finished:
            raise RunFailedError(self._stop.fault)
        return summary

    async def _close(self, summary: Result | None) -> None:
        """Close checkpoints, scorers, ledger and trackers after any end; a run with a summary gets a seal."""
        SIGNALS.enter("its files and trackers to close")
        try:
            try:
                if self._learning is not None:
                    await self._learning.trainer.close()
            finally:
                await self._scoring.close()  # a running scorer would write after the seal
            await self._incarnation.ledger.close()
            if summary is not None:
                await asyncio.to_thread(seal, self._incarnation.run.path)
        finally:
            await self._trackers.close(summary if isinstance(summary, Summary) else None)

    # ---- a resume

    async def _restore_passes(self, recovered: Recovered) -> None:
        """Request again the evaluation passes that an earlier controller began and did not finish."""
        step, run = recovered.checkpoint.step if recovered.checkpoint else 0, self._incarnation.run
        self._evaluator.restore(
            await asyncio.to_thread(open_passes, run.ledger),
            results=self._evaluations,
            sampling=recovered.eval_sampling,
            now=EvalPoint(version=-1, step=step, rl_s=self._incarnation.stats.rl_s),
            passed_s={0: 0.0} | {row.step: row.rl_s for row in read_rows(run.metrics, StepRow)},
        )

    async def _restore(self) -> None:
        """Continue the trajectories of an earlier controller, at the first call only."""
        if self._recovered is not None:
            await restore_live(self._recovered, self._segments, self._scheduler)
            self._recovered = None

    # ---- beside the data path

    async def _keep_deadlines(self) -> None:
        """Enforce deadlines, which depend on time alone, and show the progress of the run."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._scheduler.incoming.enforce_deadlines()
            self._dispatch_loop.wake()
            self._progress.refresh(None if self._learning is None else self._learning.trainer)

    def _is_followed(self, trajectory_id: str) -> bool:
        """Return True if a trajectory may take another turn. Before `_restore`, any trajectory may."""
        return self._recovered is not None or self._scheduler.is_live(trajectory_id)

    # ---- between the parts

    def _dispatch(self) -> None:
        """Call `dispatch` with the parts of this run; `_dispatch_loop` calls this method after each `wake`."""
        loop, stats = self._dispatch_loop, self._incarnation.stats
        dispatch(self._scheduler, replicas=self._replicas, dispatch_loop=loop, stats=stats)

    def _submit_for_scoring(self, trajectory: TrajectoryRef, prompt: Prompt) -> None:
        """Send a finished response to the scorers; report a training response to the repack planner first."""
        if self._learning is not None and trajectory.kind is Kind.TRAIN:
            self._learning.migration.finished(trajectory)
        self._scoring.submit_response(trajectory, prompt)

    async def _hold(self, version: int) -> None:
        """Wait until copied versions are on record, then make the relays keep `version` for its evaluation."""
        assert self._learning is not None, "only an RL run defers evaluations"
        await self._learning.versions.recorded()
        await self._relays.hold(version)

    def _publish_result(self, result: Evaluated) -> None:
        """Record an evaluation's result, show it in the view, and send it to the trackers."""
        self._incarnation.ledger.append(result)
        self._evaluations.append(result)
        shown = comparable(self._evaluations)[-1]
        if self._source is None:
            self.view.evaluated(shown)
        else:
            self.view.notice(f"{shown.set_name}: {shown.figures.describe()}")
        self._trackers.evaluated(shown)

    def _show_step(self, row: StepRow) -> None:
        """Send a recorded step to the view and the trackers; wake `dispatch`, since it has room for groups."""
        self._dispatch_loop.wake()
        self.view.step(row)
        self._trackers.step(row)
