"""Held-out evaluation: when, under which version, and with what result. Owned by the controller.

An evaluation during RL begins at once, among the training trajectories. It uses the newest version that a replica
serves, and its result belongs to that version's step. A deferred evaluation runs after RL, and the relays keep its
version until then. `laminar eval` evaluates each set once, under its only version.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from laminar_py.control.dispatcher import Throttle
from laminar_py.control.evaluation import Evaluation, EvaluationLostError
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.evaluations import OpenPass
from laminar_py.records.evaluations import EvalAnswer, pass_id, pass_number, set_figures, set_of
from laminar_py.records.events import Evaluated
from laminar_py.runtime.cluster.errors import RunFailedError
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.replicas import Replicas

log = logging.getLogger(__name__)

POINTS_KEPT = 1000  # newest versions whose step is known; a pass ends before so many more are published


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """A weight version to evaluate, its learner step, and the seconds of RL when it was the newest."""

    version: int
    step: int
    rl_s: float


class Evaluator:
    """Evaluates the sets. `hold` makes the relays keep a version, `publish` gets results, `show_line` shows lines.

    A resumed run continues open passes, and repeats neither results nor past marks of `at_seconds`. A run that
    `trains` skips an evaluation whose version is lost; `laminar eval` fails.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        replicas: Replicas,
        dispatch_loop: Throttle,
        hold: Callable[[int], Awaitable[None]],
        publish: Callable[[Evaluated], None],
        show_line: Callable[[str], None],
        trains: bool = True,
    ) -> None:
        config = incarnation.config
        self._config = config.eval
        self._verdicts = config.reward.verdicts
        self._intervals = config.eval.intervals()
        self._sampling = config.eval.sampling_by_set(config.rollout.sampling.params())
        self._sets = incarnation.inputs.sets  # prompts by name
        self._scheduler = scheduler
        self._hold = hold
        self._replicas = replicas
        self._dispatch_loop = dispatch_loop
        self._trains = trains
        self._publish = publish
        self._show_line = show_line
        self._marks_s = [mark_s for mark_s in self._config.at_seconds if mark_s > incarnation.stats.rl_s]
        self._deferred: list[tuple[EvalPoint, list[str]]] = []  # until after RL: point and sets
        self._running: set[asyncio.Task[None]] = set()
        self._previous: EvalPoint | None = None
        self._points_by_version: dict[int, EvalPoint] = {}
        self._results: set[tuple[int, str]] = set()  # (step, set) of each result on record

    def restore(
        self,
        passes: Iterable[OpenPass],
        *,
        results: Iterable[Evaluated],
        sampling: Mapping[str, str],
        now: EvalPoint,
        passed_s: Mapping[int, float],
    ) -> None:
        """Continue passes that were open when the run stopped, unless the settings of their set have changed.

        `results` are on record, `sampling` has the earlier settings by set (`EvalConfig.sampling_by_set`), `now`
        replaces an unrecorded step or version of a pass, and `passed_s` has the seconds of RL by step.
        """
        self._results |= {(result.step, result.set_name) for result in results}
        for left in passes:
            name = set_of(left.id)
            if name not in self._sampling or self._sampling[name] != sampling.get(name):
                continue
            step = now.step if left.step is None else left.step
            version = now.version if left.version is None else left.version
            point = EvalPoint(version, step, passed_s.get(step, now.rl_s))
            self._running.add(
                self._begin(point, name, left.version, index=pass_number(left.id), answers=left.answers)
            )

    async def first(self, point: EvalPoint) -> None:
        """Wait for continued passes, then evaluate the first version on each set without a result."""
        if self._running:
            await asyncio.wait(self._running)
        under_way = [self._begin(point, name, point.version) for name in self._sets_without_result(point)]
        await asyncio.gather(*under_way)

    def note_version(self, point: EvalPoint) -> None:
        """Note the step and time of a new version; forget results of later steps, which a rollback has undone."""
        self._points_by_version.setdefault(point.version, point)
        for version in list(self._points_by_version)[:-POINTS_KEPT]:
            del self._points_by_version[version]
        self._results = {(step, name) for step, name in self._results if step <= point.step}

    async def stepped(self, point: EvalPoint, *, last: bool) -> None:
        """Begin or defer evaluations due after a step, except the last; raise the error of a failed evaluation."""
        self.note_version(point)
        previous, self._previous = self._previous or point, point
        due = [name for name, every in self._intervals.items() if point.step % every == 0]
        to_come = [mark_s for mark_s in self._marks_s if mark_s > point.rl_s]
        if to_come != self._marks_s:
            self._marks_s = to_come
            await self._schedule(previous, list(self._sets))
            due = due if self._config.deferred else []  # replicas would evaluate the same weights twice
        if due and not last:
            await self._schedule(point, due)
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()

    async def finish(self, last: EvalPoint) -> None:
        """Wait for running evaluations, then run the deferred ones and evaluate the last version on all sets."""
        if not self._sets:
            return
        await asyncio.gather(*self._running)
        rest = self._sets_without_result(last)
        held = [one for one in self._deferred if one[0].version != last.version]
        under_way = [
            self._begin(point, name, point.version) for point, names in [*held, (last, rest)] for name in names
        ]
        self._running |= set(under_way)
        if held:
            self._replicas.restart()
        for evaluation in under_way:
            await evaluation

    def every_set(
        self, point: EvalPoint, *, done: Container[str], answers: Mapping[str, Mapping[str, EvalAnswer]]
    ) -> "list[asyncio.Task[None]]":
        """Begin a pass over each set and return its task; skip passes with an id in `done`."""
        begun = []
        for index, name in enumerate(self._sets):
            if (id := pass_id(index, name)) not in done:
                begun.append(self._begin(point, name, point.version, index=index, answers=answers.get(id)))
        self._running |= set(begun)
        return begun

    def abandon(self) -> None:
        """Cancel all evaluations, since the run stops."""
        for task in self._running:
            task.cancel()

    def has_left(self, last: EvalPoint) -> bool:
        """Return whether an evaluation is under way or deferred, or a set has no result of the `last` version."""
        under_way = any(not task.done() for task in self._running)
        return under_way or bool(self._deferred) or bool(self._sets_without_result(last))

    def _sets_without_result(self, point: EvalPoint) -> list[str]:
        """Return the names of the sets without a result at the step of `point`."""
        return [name for name in self._sets if (point.step, name) not in self._results]

    async def _schedule(self, point: EvalPoint, names: list[str]) -> None:
        """Begin evaluations of sets now; with `eval.deferred`, hold the version of `point` until after RL."""
        if not names:
            return
        if self._config.deferred:
            await self._hold(point.version)
            self._deferred.append((point, names))
            return
        self._running |= {self._begin(point, name, None) for name in names}

    def _begin(
        self,
        point: EvalPoint,
        name: str,
        version: int | None,
        *,
        index: int | None = None,
        answers: Mapping[str, EvalAnswer] | None = None,
    ) -> "asyncio.Task[None]":
        """Request a pass over set `name`, and return the task that publishes its result."""
        asked = self._scheduler.evaluations.request(
            self._sets[name],
            version,
            index=index,
            set_name=name,
            samples=self._config.sets[name].samples,
            answers=answers,
        )
        self._dispatch_loop.wake()
        return asyncio.create_task(self._finish(point, name, asked), name=f"evaluate-{name}-{point.step}")

    async def _finish(self, point: EvalPoint, name: str, requested: "asyncio.Future[Evaluation]") -> None:
        """Wait for a requested pass, and publish its result, or show that no answer has a score.

        If the version of a pass is lost, a training run logs and skips the pass; else raises `RunFailedError`.
        """
        try:
            evaluation = await requested
        except EvaluationLostError as error:
            if not self._trains:
                raise RunFailedError(f"evaluation of {name}: {error} is lost; continue with --resume") from None
            log.warning("evaluation of %s at step %d is skipped: %s is lost", name, point.step, error)
            return
        if evaluation.replica is not None and evaluation.version is not None:  # its replica chose the version
            point = self._points_by_version.get(evaluation.version, point)
        answers = list(evaluation.answers.values())
        figures = await asyncio.to_thread(
            set_figures, answers, samples=evaluation.samples, verdicts=self._verdicts
        )
        if figures is None:
            self._show_line(
                f"{name}: no figures at step {point.step}: none of {len(answers)} answers could be scored"
            )
            return
        version = evaluation.version
        assert version is not None, f"{evaluation.id} ended without a version"
        self._results.add((point.step, name))
        self._publish(
            Evaluated(
                pass_id=evaluation.id,
                set_name=name,
                version=version,
                step=point.step,
                rl_s=point.rl_s,
                figures=figures,
            )
        )
