"""The composition root of a run: wires all parts and leads them through their phases.

Phases: start parts -> first version -> evaluation -> RL -> stop replicas -> evaluations -> summary. Runs in the
process of `laminar train`; every part that is a process of its own has a keeper in `workers`.

In the RL phase three loops go on side by side: reports of replicas come in, the scheduler decides, assignments
go out (`workers.replicas`); scores come in, and the scheduler closes groups (`scoring`); batches come in, and the
learner steps, publishes and checkpoints (`trainer`).
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine

from laminar_py.control.deadlines import HOUSEKEEPING_S
from laminar_py.control.recovery import check_scored
from laminar_py.ledger.evaluations import open_passes, read_evaluations, settled
from laminar_py.ledger.recovery import Recovered, recover
from laminar_py.ledger.row_files import read_rows
from laminar_py.observe.telemetry.fleet import note_placed, watch_fleet
from laminar_py.observe.telemetry.memory import watch_memory
from laminar_py.observe.telemetry.summary import Summary, summarise
from laminar_py.observe.telemetry.view import View
from laminar_py.observe.telemetry.waits import Waits
from laminar_py.records.events import Evaluated, RunEnded
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.metrics import StepRow
from laminar_py.records.trajectory import Kind, Prompt
from laminar_py.runtime.cluster.errors import RunFailedError
from laminar_py.runtime.cluster.ray_cluster import all_placed
from laminar_py.runtime.orchestrator import policies
from laminar_py.runtime.orchestrator.evaluator import Evaluator, Moment
from laminar_py.runtime.orchestrator.fleet import ElasticFleet
from laminar_py.runtime.orchestrator.pauses import keep_short
from laminar_py.runtime.orchestrator.record import record_start, seal
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.orchestrator.trainer import Trainer
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.workers.environments import EnvironmentProcesses
from laminar_py.runtime.workers.incarnation import Opened, open_incarnation
from laminar_py.runtime.workers.learner import LearnerLink
from laminar_py.runtime.workers.payload import PayloadHosts, take_up
from laminar_py.runtime.workers.reference import ReferenceStage
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.replicas import Replicas
from laminar_py.runtime.workers.trackers import Trackers

log = logging.getLogger(__name__)


class Controller:
    """Leader of a run from its start, or a resume, to its end."""

    def __init__(self, opened: Opened, *, view: View) -> None:
        config, run = opened.config, opened.run
        goes_on, ledger = opened.resumed and run.has_ledger, run.live_ledger
        self._recovered: Recovered | None = recover(run.path, ledger=ledger, there=run.has) if goes_on else None
        self._evaluations = read_evaluations(ledger) if goes_on else []
        check_scored(self._recovered.live if self._recovered else (), config.algorithm)
        incarnation = open_incarnation(opened, recovered=self._recovered)
        self._incarnation, self._view, say = incarnation, view, view.notice
        self._trackers = Trackers(incarnation, resumed=goes_on)
        self._payload = payload = PayloadHosts(incarnation)
        self._reference = ReferenceStage.of(incarnation, payload=payload)
        self._scheduler = scheduler = policies.make_scheduler(
            incarnation, submit_score=self._finished, reference=self._reference, fail=self._fail
        )
        self._relays = relays = Relays(incarnation)
        self._learner = learner = LearnerLink(incarnation, relays=relays, payload=payload, show=view.progress)
        self._versions = Versions(incarnation, completed=learner.completed, stored=relays.published)
        self._environments = EnvironmentProcesses(incarnation, self._relays.keys)
        self._replicas = replicas = Replicas(incarnation, scheduler=scheduler, relays=relays, payload=payload)
        self._scoring = Scoring(
            incarnation, scheduler=scheduler, payload=payload, say=say, end=self._fail, wake=replicas.wake
        )
        self._migration = policies.make_migration(
            incarnation, scheduler=scheduler, replicas=replicas, versions=self._versions
        )
        self._fleet = ElasticFleet(
            incarnation, scheduler=scheduler, replicas=replicas, migration=self._migration, scoring=self._scoring
        )
        self._evaluator = Evaluator(
            incarnation, scheduler=scheduler, replicas=replicas, hold=self._hold, publish=self._evaluated, say=say
        )
        self._trainer = Trainer(
            incarnation,
            scheduler=scheduler,
            learner=learner,
            payload=payload,
            evaluator=self._evaluator,
            versions=self._versions,
            show=self._stepped,
        )

    def interrupt(self) -> None:
        """Finish the step in hand, checkpoint, end."""
        self._trainer.stop.set()

    # ---- phases

    async def lead(self) -> Summary:
        """Run to the end, or to the step in hand after `interrupt`."""
        await self._incarnation.ledger.start()
        self._trackers.start()
        summary: Summary | None = None
        try:
            await record_start(self._incarnation, self._recovered)
            await self._start_parts()
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(work, name=name) for name, work in self._background().items()]
                await self._trainer.start()
                async for name, work in self._late():
                    background.append(tasks.create_task(work, name=name))
                summary = await self._lead_rl()
                for task in background:
                    task.cancel()
            return summary
        finally:
            await self._close(summary)

    async def _start_parts(self) -> None:
        """Have the processes of all parts spawned, relays and scorers up, and what was interrupted waiting."""
        self._payload.stores.spawn()
        self._scoring.spawn()
        self._environments.spawn()
        self._learner.spawn()
        self._replicas.spawn()
        if self._reference is not None:
            self._reference.spawn()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._payload.stores.start())
            tasks.create_task(self._relays.start())
            tasks.create_task(self._scoring.start())
            tasks.create_task(self._environments.start())
        if self._recovered is not None:
            self._scoring.grow_by(len(self._recovered.live))  # the fleet may have been larger
            await self._take_up_evaluations(self._recovered)
            await take_up(self._recovered, self._payload, self._scheduler)
            self._scheduler.continue_live()  # interrupted trajectories go on while the learner starts
            self._recovered = None

    async def _take_up_evaluations(self, recovered: Recovered) -> None:
        """Ask for the passes that were open again, and for none that is on record."""
        step, run = recovered.checkpoint.step if recovered.checkpoint else 0, self._incarnation.run
        self._evaluator.take_up(
            await asyncio.to_thread(open_passes, run.live_ledger),
            results=self._evaluations,
            requests=recovered.eval_requests,
            now=Moment(version=-1, step=step, rl_s=self._incarnation.stats.rl_s),
            passed_s={0: 0.0} | {row.step: row.rl_s for row in read_rows(run.metrics, StepRow)},
        )

    def _background(self) -> dict[str, Coroutine[object, object, None]]:
        """Work beside the trainer from the start."""
        run, stats, book = self._incarnation.run, self._incarnation.stats, self._scheduler.book
        shm = run.shm(self._incarnation.config.relay.shm)
        return {
            "keep-relays": self._relays.keep(),
            "keep-stores": self._payload.stores.keep(),
            "record-versions": self._versions.run(),
            "scoring": self._scoring.run(),
            "housekeeping": self._keep_house(),
            "memory": watch_memory(run, stats, shm),
            "placed": note_placed(run.placed, all_placed=all_placed),
            "fleet": watch_fleet(run.fleet, stats, generated_tokens=lambda: book.generated_tokens),
            "keep-replicas": self._replicas.keep(),
            "keep-environments": self._environments.keep(),
            "sweep-environments": self._environments.sweep(self._scheduler.is_live),
            "scale": self._fleet.run(say=self._view.notice),
        }

    async def _late(self) -> AsyncIterator[tuple[str, Coroutine[object, object, None]]]:
        """Work beside the trainer that needs weights, each as soon as its part is ready."""
        if self._reference is not None:
            await self._reference.start()
            wanted, deliver = self._scheduler.is_live, self._scheduler.closing.on_reference
            yield "reference", self._reference.run(wanted=wanted, deliver=deliver, lose=self._scheduler.losses.of)
        yield "pauses", keep_short()
        if self._incarnation.config.repacks:
            speed = await self._replicas.speed()
            log.info("engine: %s", speed)
            yield "repack", self._migration.run(speed)

    async def _lead_rl(self) -> Summary:
        trainer, stats, scheduler = self._trainer, self._incarnation.stats, self._scheduler
        if trainer.step == 0:
            await self._unless_stopped(self._evaluator.first(trainer.moment))
        stats.rl_phase(True)
        if scheduler.book.groups or not trainer.stop.is_set():  # nothing begins for a run that is about to end
            scheduler.admit()
            self._replicas.dispatch()
        await trainer.run()
        stats.rl_phase(False)
        scheduler.pause()
        finished = not trainer.stop.is_set() and await self._unless_stopped(self._finish_evaluations())
        if not finished:
            self._evaluator.abandon()
            scheduler.end()
            await self._replicas.stop(evaluations=True)
        await self._payload.close(scheduler)
        self._incarnation.ledger.append(
            RunEnded(self._incarnation.number, "finished" if finished else "interrupted")
        )
        await self._incarnation.ledger.commit()
        config = self._incarnation.config
        summary = summarise(
            self._incarnation.run,
            stats,
            finished=finished,
            restarts=dict(self._incarnation.supervisor.restarts),
            sets=config.eval.sets,
            has_environment=config.has_environment,
        )
        if trainer.fault is not None and not finished:
            raise RunFailedError(trainer.fault)
        return summary

    async def _finish_evaluations(self) -> None:
        """Do what is left of evaluations once all steps are done."""
        await self._replicas.stop(evaluations=False)
        await self._evaluator.finish(self._trainer.moment)

    async def _unless_stopped(self, work: Coroutine[object, object, None]) -> bool:
        """Do it, or until the run is to end, for which it is False."""
        task = asyncio.create_task(work, name="unless-stopped")
        stop = asyncio.create_task(self._trainer.stop.wait(), name="stop")
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return not self._trainer.stop.is_set()
        finally:
            task.cancel()
            stop.cancel()

    async def _keep_house(self) -> None:
        """Enforce deadlines, which no report and no score brings about, and hand out what they free."""
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            await self._scheduler.enforce_deadlines()
            self._replicas.wake()
            notes = [self._waits.line, self._scoring.failures.text]
            self._view.refresh(self._incarnation.stats, self._trainer.step, self._trainer.version, notes)

    @property
    def _waits(self) -> Waits:
        stats, scheduler, version = self._incarnation.stats, self._scheduler, self._trainer.version
        return Waits(
            in_rl=stats.in_rl,
            step=self._trainer.step,
            learner_idle_s=stats.learner_idle_s,
            ready=len(scheduler.consumption.buffer),
            wanted=self._incarnation.config.rollout.prompts_per_step,
            generating=scheduler.views.in_flight,
            scores=self._scoring.waits,
            current=sum(replica.version == version for replica in stats.replicas.values()),
            replicas=len(stats.replicas),
        )

    async def _close(self, summary: Summary | None) -> None:
        """End checkpoints, scorers, ledger and trackers, whatever happened; a run with a summary is sealed."""
        try:
            try:
                await self._fleet.close()
                await self._trainer.close()
            finally:
                await self._scoring.close()  # what they work on in vain would go on to write beside the seal
            await self._incarnation.ledger.close()
            if summary is not None:
                await asyncio.to_thread(seal, self._incarnation.run.path)
        finally:
            await self._trackers.close(summary)

    # ---- between the parts

    def _finished(self, trajectory: FinishedTrajectory, prompt: Prompt) -> None:
        """A trajectory is ready to be scored."""
        if trajectory.kind is Kind.TRAIN:
            self._migration.finished(trajectory)
        self._scoring.submit(trajectory, prompt)

    async def _hold(self, version: int) -> None:
        """Have the relays keep a version for its evaluation."""
        await self._versions.recorded()  # on its way there before
        await self._relays.hold(version)

    def _evaluated(self, result: Evaluated) -> None:
        self._incarnation.ledger.append(result)
        self._evaluations.append(result)
        told = settled(self._evaluations)[-1]
        self._view.evaluated(told)
        self._trackers.evaluated(told)

    def _fail(self, fault: str) -> None:
        """The run cannot go on."""
        self._trainer.end(fault)

    def _stepped(self, row: StepRow) -> None:
        self._replicas.wake()  # other groups may be issued now
        self._view.step(row)
        self._trackers.step(row)
