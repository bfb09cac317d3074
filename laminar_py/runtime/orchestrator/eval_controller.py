"""The controller of `laminar eval`: every set once under one version, without a learner.

Phases: start parts -> version 0 -> a pass of each set -> summary. All but the learner are the parts of a run, and
so is the record, from which an evaluation that was stopped or killed goes on: passes have the same numbers, so
their trajectories draw the same tokens (`control.evaluation`).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.control.deadlines import HOUSEKEEPING_S
from laminar_py.control.evaluation import Evaluation, EvaluationLostError
from laminar_py.ledger.database import reading
from laminar_py.ledger.evaluations import evaluations_on_record, read_answers
from laminar_py.ledger.recovery import Recovered, recover
from laminar_py.observe.telemetry.summary import EvaluationFigures, evaluation_figures, write_summary
from laminar_py.observe.telemetry.view import View
from laminar_py.records.evaluations import EvalAnswer, pass_id
from laminar_py.records.events import Evaluated, RunEnded, VersionPublished
from laminar_py.records.finished import FinishedTrajectory
from laminar_py.records.trajectory import Prompt
from laminar_py.records.weights import Published
from laminar_py.runtime.cluster.errors import RunFailedError
from laminar_py.runtime.orchestrator import policies
from laminar_py.runtime.orchestrator.evaluator import evaluated, unscored_line
from laminar_py.runtime.orchestrator.record import record_start, seal
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.workers.environments import EnvironmentProcesses
from laminar_py.runtime.workers.incarnation import Opened, open_incarnation
from laminar_py.runtime.workers.payload import PayloadHosts, take_up
from laminar_py.runtime.workers.relays import Relays
from laminar_py.runtime.workers.replicas import Replicas
from laminar_py.runtime.workers.weights import WeightFolder

log = logging.getLogger(__name__)

TELL_S = 15.0  # between lines on how far it is


class EvalSource(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint or model folder, e.g. `EvalSource(path="runs/math-1/checkpoints/step-40-1.0", step=40)`."""

    path: str
    step: int  # of the checkpoint; 0 for a folder


class EvalSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an evaluation."""

    run: str
    source: EvalSource
    finished: bool
    evaluations: list[EvaluationFigures]


class EvalController:
    """Leader of an evaluation from its start, or a resume, to its end."""

    def __init__(self, opened: Opened, source: EvalSource, *, view: View) -> None:
        run = opened.run
        goes_on = opened.resumed and run.has_ledger
        self._recovered: Recovered | None = recover(run.path, ledger=run.live_ledger) if goes_on else None
        self._incarnation = incarnation = open_incarnation(opened, recovered=self._recovered)
        self._source = source
        self._view = view
        self._stop = asyncio.Event()
        self._fault: str | None = None
        self._done, self._answers = self._on_record(list(opened.inputs.sets)) if goes_on else ([], {})
        self._scheduler = policies.make_scheduler(
            incarnation, submit_score=self._finished, reference=None, versions_return=True, fail=self._fail
        )
        self._payload = payload = PayloadHosts(incarnation)
        self._relays = Relays(incarnation)
        self._weights = WeightFolder(incarnation, relays=self._relays)
        self._environments = EnvironmentProcesses(incarnation, self._relays.keys)
        self._replicas = Replicas(incarnation, scheduler=self._scheduler, relays=self._relays, payload=payload)
        self._scoring = Scoring(
            incarnation,
            scheduler=self._scheduler,
            payload=payload,
            say=view.notice,
            end=self._fail,
            wake=self._replicas.wake,
            trains=False,
        )

    def interrupt(self) -> None:
        """Keep what there is, and end."""
        self._stop.set()

    async def lead(self) -> EvalSummary:
        """Evaluate all sets, or until `interrupt`."""
        ledger = self._incarnation.ledger
        await ledger.start()
        summary: EvalSummary | None = None
        try:
            await record_start(self._incarnation, self._recovered)
            async with asyncio.TaskGroup() as tasks:
                await self._start_parts()
                background = self._background(tasks)
                await self._publish()
                finished = await self._settle(await self._ask(tasks))
                if not finished:
                    self._scheduler.end()
                    await self._replicas.stop(evaluations=True)
                await self._payload.close(self._scheduler)
                ledger.append(RunEnded(self._incarnation.number, "finished" if finished else "interrupted"))
                await ledger.commit()
                summary = self._summarise(finished=finished)
                for task in background:
                    task.cancel()
            if self._fault is not None:
                raise RunFailedError(self._fault)
            return summary
        finally:
            await self._scoring.close()  # what they work on in vain would go on to write beside the seal
            await ledger.close()
            if summary is not None:
                await asyncio.to_thread(seal, self._incarnation.run.path)

    # ---- phases

    def _on_record(self, names: Sequence[str]) -> tuple[list[Evaluated], dict[str, Mapping[str, EvalAnswer]]]:
        """Passes that are done, and the answers of the others by pass."""
        with reading(self._incarnation.run.live_ledger) as connection:
            done = evaluations_on_record(connection)
            known = {one.pass_id for one in done}
            ids = (pass_id(index, name) for index, name in enumerate(names))
            return done, {id: read_answers(connection, id) for id in ids if id not in known}

    async def _start_parts(self) -> None:
        """Spawn all processes."""
        self._payload.stores.spawn()
        self._scoring.spawn()
        self._environments.spawn()
        self._weights.spawn()
        self._replicas.spawn()
        async with asyncio.TaskGroup() as starting:
            starting.create_task(self._payload.stores.start())
            starting.create_task(self._relays.start())
            starting.create_task(self._scoring.start())
            starting.create_task(self._environments.start())

    async def _ask(self, tasks: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        """Ask for the passes, and take up what was under way.

        Not before version 0 is published: a replica that asks for a version that no relay has yet calls it lost.
        """
        done = {one.pass_id for one in self._done}
        passes = [
            tasks.create_task(self._pass(index, name), name=f"evaluate-{name}")
            for index, name in enumerate(self._incarnation.inputs.sets)
            if pass_id(index, name) not in done
        ]
        await asyncio.sleep(0)  # until all have asked
        if self._recovered is not None:
            await take_up(self._recovered, self._payload, self._scheduler)
            self._recovered = None
        self._replicas.wake()
        return passes

    def _background(self, tasks: asyncio.TaskGroup) -> "list[asyncio.Task[None]]":
        """Work beside the passes."""
        works = {
            "keep-relays": self._relays.keep(),
            "keep-stores": self._payload.stores.keep(),
            "scoring": self._scoring.run(),
            "housekeeping": self._keep_house(),
            "keep-replicas": self._replicas.keep(),
            "keep-environments": self._environments.keep(),
            "sweep-environments": self._environments.sweep(self._is_followed),
        }
        return [tasks.create_task(work, name=name) for name, work in works.items()]

    def _is_followed(self, trajectory_id: str) -> bool:
        """True where a turn of it may still come: of any, before what was under way is taken up."""
        return self._recovered is not None or self._scheduler.is_live(trajectory_id)

    async def _publish(self) -> None:
        """Have the weights served. Raises `ConfigError` where they are others than when the evaluation began."""
        published = await self._weights.publish()
        known = self._digest_on_record()
        if known is None:
            self._record(published)
        elif known != published.digest:
            raise ConfigError(
                f"model.path={self._incarnation.config.model.path}: holds other weights than this evaluation began"
                " with; begin another one, without --resume"
            )
        self._scheduler.published(published.version)

    def _digest_on_record(self) -> str | None:
        with reading(self._incarnation.run.live_ledger) as connection:
            row = connection.execute("SELECT digest FROM version WHERE version = 0").fetchone()
        return None if row is None else str(row[0])

    def _record(self, published: Published) -> None:
        self._incarnation.ledger.append(
            VersionPublished(
                version=published.version,
                step=self._source.step,
                incarnation=self._incarnation.number,
                parent=None,
                digest=published.digest,
                num_bytes=published.num_bytes,
                stall_s=published.stall_s,
            )
        )

    async def _pass(self, index: int, name: str) -> None:
        """Evaluate a set; what comes of it is on record and told."""
        evaluations, config = self._scheduler.evaluations, self._incarnation.config
        asked = evaluations.request(
            self._incarnation.inputs.sets[name],
            0,
            index=index,
            set_name=name,
            samples=config.eval.sets[name].samples,
            answers=self._answers.get(pass_id(index, name)),
        )
        try:
            evaluation: Evaluation = await asked
        except EvaluationLostError as error:
            raise RunFailedError(f"{name}: {error} is lost; go on with --resume") from None
        result = await evaluated(evaluation, name, step=self._source.step, rl_s=0.0)
        if result is None:
            self._view.notice(unscored_line(evaluation, name, step=self._source.step))
            return
        self._incarnation.ledger.append(result)
        self._done.append(result)
        self._view.notice(f"{name}: {result.figures.tell()}")
        await self._incarnation.ledger.commit()
        await self._incarnation.ledger.copy()

    async def _settle(self, passes: "Sequence[asyncio.Task[None]]") -> bool:
        """Until all passes are done, or it is to stop; False then."""
        stop: asyncio.Task[object] = asyncio.create_task(self._stop.wait(), name="stop")
        done: asyncio.Task[object] = asyncio.create_task(_all(passes), name="passes")
        await asyncio.wait([stop, done], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if done.done():
            done.result()
            return self._fault is None
        for task in passes:
            task.cancel()
        await asyncio.wait([done])
        return False

    def _summarise(self, *, finished: bool) -> EvalSummary:
        with reading(self._incarnation.run.live_ledger) as connection:
            evaluations = evaluation_figures(evaluations_on_record(connection))
        run = self._incarnation.run
        summary = EvalSummary(run=str(run.path), source=self._source, finished=finished, evaluations=evaluations)
        write_summary(run, summary)
        return summary

    # ---- between the parts

    async def _keep_house(self) -> None:
        """Hand out what waits, and say how far it is."""
        clock, told_s, told = self._incarnation.clock, 0.0, ""
        while True:
            await self._scheduler.enforce_deadlines()
            self._replicas.wake()
            line = self._scheduler.evaluations.progress
            if line != told and clock.now() - told_s > TELL_S:
                told_s, told = clock.now(), line
                self._view.notice(line)
            await asyncio.sleep(HOUSEKEEPING_S)

    def _finished(self, trajectory: FinishedTrajectory, prompt: Prompt) -> None:
        """Have an answer scored."""
        self._scoring.submit(trajectory, prompt)

    def _fail(self, fault: str) -> None:
        """The evaluation cannot go on."""
        self._fault = self._fault or fault
        self._stop.set()


async def _all(tasks: "Sequence[asyncio.Task[None]]") -> None:
    await asyncio.gather(*tasks)
