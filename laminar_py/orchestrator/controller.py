"""The composition root of a run: wires all parts and leads them through its phases.

Phases: start parts -> first version -> evaluation -> RL -> stop replicas -> evaluations -> summary. It runs in
the process of `laminar train`; every part that is a process of its own has a keeper here that revives it.
"""

import asyncio
import gc
import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import blake2b

from laminar_py.cluster.placement import Placement
from laminar_py.config.repack import RepackPlanner
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import StalePolicy
from laminar_py.control.book import FlowSettings
from laminar_py.control.dispatcher import Dispatcher
from laminar_py.control.flow import Flow
from laminar_py.control.staleness import Admission, StalenessBound
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.ledger.database import SCHEMA_VERSION, LedgerError
from laminar_py.ledger.ledger import Ledger
from laminar_py.ledger.recovery import Recovered, recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.seal import seal_run
from laminar_py.orchestrator.checkpoints import Checkpoints
from laminar_py.orchestrator.evaluator import Evaluator
from laminar_py.orchestrator.trainer import Trainer
from laminar_py.orchestrator.versions import Versions
from laminar_py.preflight.inputs import Inputs
from laminar_py.records.clock import SystemClock
from laminar_py.records.events import Evaluated, RunEnded, RunStarted
from laminar_py.records.protocols import VersionLostError
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import Kind, Prompt, Trajectory
from laminar_py.relay.subscriber import Subscriber
from laminar_py.repack.migration import Migration, MigrationSettings
from laminar_py.reward.stage import ScoringStage
from laminar_py.telemetry.memory import processes, used_bytes
from laminar_py.telemetry.stats import Stats, StepRow, read_totals
from laminar_py.telemetry.summary import Summary, summarise
from laminar_py.telemetry.tracking import Tracking
from laminar_py.telemetry.view import View
from laminar_py.workers.learner import LearnerLink
from laminar_py.workers.reference import ReferenceStage
from laminar_py.workers.relays import Relays
from laminar_py.workers.replicas import Replicas
from laminar_py.workers.scorers import Scorers
from laminar_py.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

SCORING_BATCH = 64
HOUSEKEEPING_S = 0.5
MEMORY_S = 10.0
FLEET_S = 1.0


class Controller:
    """One incarnation of one run."""

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        *,
        placement: Placement,
        inputs: Inputs,
        view: View,
        resume: bool,
    ) -> None:
        self._config = config
        self._run = run
        self._inputs = inputs
        self._view = view
        self._placement = placement
        goes_on = resume and run.ledger.is_file()
        self._tracking = Tracking(config, run, resumed=goes_on)
        self._recovered: Recovered | None = recover(run.path, there=run.has) if goes_on else None
        recovered, clock = self._recovered, SystemClock()
        self._incarnation = recovered.incarnation if recovered else 1
        step = recovered.checkpoint.step if recovered and recovered.checkpoint else 0
        self._shm = run.shm(config.relay.shm)
        self._ledger = Ledger(run.ledger, host=socket.gethostname(), clock=clock)
        self._stats = Stats(clock, replicas=config.rollout.replicas, totals=read_totals(run.metrics, step))
        self._supervisor = Supervisor(record=self._ledger.append, max_restarts=config.supervisor.max_restarts)
        self._reference = self._make_reference()
        self._flow = self._make_flow(clock)
        self._relays = Relays(
            config,
            run_dir=run.path,
            shm=self._shm,
            supervisor=self._supervisor,
            placement=placement,
            record=self._ledger.append,
        )
        self._learner = LearnerLink(
            config, run_dir=run.path, relays=self._relays, show=view.progress, placement=placement
        )
        self._versions = Versions(
            ledger=self._ledger,
            sealed=self._learner.sealed,
            stored=self._relays.published,
            incarnation=self._incarnation,
        )
        self._replicas = Replicas(
            config,
            run_dir=run.path,
            flow=self._flow,
            relays=self._relays,
            placement=placement,
            stats=self._stats,
            supervisor=self._supervisor,
        )
        self._migration = Migration(
            MigrationSettings(
                config.repack.planner or RepackPlanner.PREDICTIVE,
                config.repack.interval_s,
                config.repack.max_stall_s,
                config.rollout.sampling.max_new_tokens,
            ),
            flow=self._flow,
            fleet=self._replicas,
            published=self._versions.recorded_after,
            clock=clock,
        )
        self._evaluator = Evaluator(
            config.eval,
            prompts=inputs.heldout,
            rl_s=self._stats.rl_s,
            flow=self._flow,
            hold=self._hold,
            restart_replicas=self._replicas.restart,
            publish=self._evaluated,
        )
        self._checkpoints = Checkpoints(
            run,
            ledger=self._ledger,
            save=self._learner.save,
            saved=self._learner.saved,
            recorded=self._versions.on_record,
            settled=self._flow.consumption.checkpointed,
            clock=clock,
            keep=config.learner.keep_checkpoints,
            last=recovered.checkpoint if recovered else None,
        )
        self._trainer = Trainer(
            config,
            run=run,
            flow=self._flow,
            ledger=self._ledger,
            learner=self._learner,
            evaluator=self._evaluator,
            stats=self._stats,
            supervisor=self._supervisor,
            versions=self._versions,
            checkpoints=self._checkpoints,
            incarnation=self._incarnation,
            show=self._stepped,
        )

    def interrupt(self) -> None:
        """Finish the step in hand, checkpoint, end."""
        self._trainer.stop.set()

    async def lead(self) -> Summary:
        """Run to the end, or to the step in hand after `interrupt`."""
        await self._ledger.start()
        self._tracking.start()
        summary: Summary | None = None
        try:
            await self._record_start()
            scorers = Scorers(
                self._config,
                run_dir=self._run.path,
                supervisor=self._supervisor,
                placement=self._placement,
            )
            self._learner.spawn()
            self._replicas.spawn()
            await self._relays.start()
            self._stage = ScoringStage(
                await scorers.start(),
                batch=SCORING_BATCH,
                timeout_s=self._config.reward.timeout_s,
                queue=self._max_live,
                wanted=self._flow.awaits_score,
                deliver=self._on_scores,
                restart=scorers.restart,
            )
            if self._recovered is not None:
                await self._flow.restore(self._recovered)
                self._flow.continuing = True  # interrupted trajectories go on while the learner starts
                self._recovered = None
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._relays.keep(), name="keep-relays"),
                    tasks.create_task(self._versions.run(), name="record-versions"),
                    tasks.create_task(self._stage.run(), name="scoring"),
                    tasks.create_task(self._keep_house(), name="housekeeping"),
                    tasks.create_task(self._watch_memory(), name="memory"),
                    tasks.create_task(self._watch_fleet(), name="fleet"),
                    tasks.create_task(self._replicas.keep(), name="keep-replicas"),
                ]
                await self._trainer.start()
                if self._reference is not None:
                    await self._reference.start()
                    referring = self._reference.run(wanted=self._flow.is_live, deliver=self._flow.on_reference)
                    background.append(tasks.create_task(referring, name="reference"))
                if self._config.repacks:
                    speed = await self._replicas.speed()
                    log.info("engine: %s", speed)
                    background.append(tasks.create_task(self._migration.run(speed), name="repack"))
                summary = await self._lead_rl()
                for task in background:
                    task.cancel()
            return summary
        finally:
            try:
                await self._ledger.close()
                if summary is not None:
                    await asyncio.to_thread(self._seal)
            finally:
                await self._tracking.close(summary)

    def _seal(self) -> None:
        try:
            seal_run(self._run.path)
        except LedgerError as error:  # no reason to fail a run that is done
            log.warning("%s", error)

    async def _lead_rl(self) -> Summary:
        trainer, stats, flow = self._trainer, self._stats, self._flow
        if trainer.step == 0:
            await self._evaluator.now(trainer.moment)
        gc.freeze()  # what the start has made stays: the collector of cycles need not look at it again and again
        flow.go_on()
        stats.rl_phase(True)
        await self._replicas.dispatch()
        await trainer.run()
        stats.rl_phase(False)
        flow.pause()
        await self._replicas.stop()
        finished = not trainer.stop.is_set()
        if finished:
            await self._evaluator.finish(trainer.moment)
        else:
            self._evaluator.abandon()
        self._ledger.append(RunEnded(self._incarnation, "finished" if finished else "interrupted"))
        await self._ledger.commit()
        return summarise(self._run, stats, finished=finished, restarts=dict(self._supervisor.restarts))

    async def _record_start(self) -> None:
        recovered = self._recovered
        checkpoint = recovered.checkpoint if recovered else None
        started = RunStarted(
            incarnation=self._incarnation,
            host=socket.gethostname(),
            pid=os.getpid(),
            schema=SCHEMA_VERSION,
            config_digest=blake2b(self._config.model_dump_json().encode(), digest_size=16).hexdigest(),
            drain=self._config.rollout.on_new_weights is OnNewWeights.DRAIN,
            max_staleness=self._config.staleness.enforced,
            resumed_step=checkpoint.step if checkpoint else None,
        )
        self._ledger.append_all([started, *(recovered.events if recovered else ())])
        await self._ledger.commit()

    def _make_flow(self, clock: SystemClock) -> Flow:
        rollout, staleness = self._config.rollout, self._config.staleness
        return Flow(
            settings=FlowSettings(
                seed=self._config.seed,
                group_size=rollout.group_size,
                sampling=rollout.sampling.params(stop_ids=self._inputs.tokenizer.eos_ids),
                teaches=self._config.algorithm.teacher_coef > 0,
                without_signal=rollout.without_signal,
                one_version=rollout.on_new_weights is OnNewWeights.DRAIN,
                group_deadline_s=rollout.group_deadline_s,
                probe_share=rollout.probe_share,
                max_probes=self._max_probes,
                min_group_survivors=rollout.min_group_survivors,
                max_seconds=rollout.max_seconds,
            ),
            prompt_at=self._inputs.stream.prompt,
            recorder=self._ledger,
            submit_score=self._submit_score,
            advantages=group_advantages(self._config.algorithm.advantage),
            length_cost=overlong_cost(rollout.sampling.max_new_tokens, self._config.algorithm.overlong_tokens),
            dispatcher=Dispatcher(rollout.replicas),
            admission=Admission(
                schedule=self._config.schedule,
                batch=rollout.prompts_per_step,
                capacity=self._config.capacity // rollout.group_size,
                max_staleness=staleness.max_staleness,
                wait=StalePolicy.WAIT in staleness.policies,
            ),
            bound=StalenessBound(staleness.max_staleness, staleness.policies),
            clock=clock,
            submit_reference=None if self._reference is None else self._reference.submit,
        )

    def _make_reference(self) -> ReferenceStage | None:
        if not self._config.algorithm.refers_in_stage:
            return None
        return ReferenceStage(
            self._config,
            run=self._run,
            ledger=self._ledger,
            supervisor=self._supervisor,
            placement=self._placement,
            busy=self._stats.referred,
        )

    # ---- scoring

    def _submit_score(self, trajectory: Trajectory, prompt: Prompt) -> None:
        if trajectory.kind is Kind.TRAIN:
            self._migration.finished(trajectory)
        self._stage.submit(
            ScoringRequest(
                trajectory_id=trajectory.id,
                prompt=prompt.text,
                response="",
                answer=prompt.answer,
                finish_reason=trajectory.finish_reason,
                response_ids=trajectory.response_ids,
            )
        )

    async def _on_scores(self, scores: Sequence[Score]) -> None:
        for score in scores:
            lifecycle = self._flow.book.live.get(score.trajectory_id)
            await self._flow.on_score(score)
            if lifecycle is not None and lifecycle.kind is Kind.TRAIN and score.value is not None:
                self._stats.scored(score.value, lifecycle.length)

    # ---- evaluation

    async def _hold(self, version: int) -> None:
        """Pull a version from the root under a name of its own, so that the root keeps it."""
        await self._versions.recorded()  # it may still be on its way there
        subscriber = Subscriber(self._relays.root, f"evaluation-{version}", self._relays.keys)
        listening = asyncio.create_task(subscriber.run(), name=f"hold-{version}")
        try:
            await subscriber.pull(version)
        except VersionLostError as error:  # its learner died over it; the evaluation will be left out
            log.warning("version %d is not kept for its evaluation: %s", version, error)
        finally:
            await subscriber.close()
            await listening

    def _evaluated(self, result: Evaluated) -> None:
        self._ledger.append(result)
        self._view.evaluated(result)
        self._tracking.evaluated(result)

    def _stepped(self, row: StepRow) -> None:
        self._view.step(row)
        self._tracking.step(row)

    # ---- behind

    @property
    def _max_live(self) -> int:
        """Trajectories that can wait for a score: what admission lets live, all evaluations and probes."""
        evaluations = (2 + self._config.num_evaluations) * len(self._inputs.heldout)
        return self._config.capacity + self._config.rollout.group_size + evaluations + self._max_probes

    @property
    def _max_probes(self) -> int:
        """An eighth of what all replicas decode at a time."""
        rollout = self._config.rollout
        return -(-rollout.replicas * rollout.max_batch // 8) if rollout.probe_share else 0

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._flow.enforce_deadlines()
            await self._replicas.dispatch()
            self._view.refresh(self._stats, self._trainer.step, self._trainer.version)

    async def _watch_fleet(self) -> None:
        with self._run.fleet.open("a") as file:
            while True:
                await asyncio.sleep(FLEET_S)
                if self._stats.in_rl:
                    row = self._stats.fleet(self._flow.generated_tokens)
                    file.write(json.dumps(asdict(row)) + "\n")
                    file.flush()

    async def _watch_memory(self) -> None:
        while True:
            pids = [process.pid for process in processes()]
            self._run.note_processes(pids)
            used = await asyncio.to_thread(used_bytes, pids, self._shm)
            self._stats.peak_memory_bytes = max(self._stats.peak_memory_bytes, used)
            await asyncio.sleep(MEMORY_S)
