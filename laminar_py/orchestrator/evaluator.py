"""Held-out evaluation: when, under which version, and what comes of it. Owned by the controller.

An evaluation during RL runs on whichever replica is idle next, among the training trajectories. A deferred one
has its version held by the root relay and runs when RL is over.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from laminar_py.control.evaluation import Evaluation, EvaluationLostError
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.events import Evaluated
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.replicas import Replicas

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Moment:
    """A version, the step it came from, and when in the RL phase that was, in seconds."""

    version: int
    step: int
    rl_s: float


class Evaluator:
    """Evaluates held-out prompts; `hold` makes the relays keep a version, `publish` takes results, `say` lines.

    A resumed run does not repeat the marks of the RL phase that is over.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        scheduler: TrajectoryScheduler,
        replicas: Replicas,
        hold: Callable[[int], Awaitable[None]],
        publish: Callable[[Evaluated], None],
        say: Callable[[str], None],
    ) -> None:
        self._config = incarnation.config.eval
        self._inputs = incarnation.inputs
        self._prompts = incarnation.inputs.heldout
        self._scheduler = scheduler
        self._hold = hold
        self._replicas = replicas
        self._publish = publish
        self._say = say
        to_come = (mark for mark in self._config.at_seconds if mark > incarnation.stats.rl_s)
        self._marks_s = sorted(to_come, reverse=True)
        self._held: list[Moment] = []
        self._running: set[asyncio.Task[None]] = set()
        self._previous: Moment | None = None

    async def first(self, moment: Moment) -> None:
        """Evaluate this version, and have one response scored of each task that no held-out prompt is of.

        What a reward makes of a task is known before RL; only the held-out answers make the accuracy.
        """
        tasks = {prompt.task for prompt in self._prompts}
        others = [prompt for prompt in self._inputs.first_of_tasks if prompt.task not in tasks]
        scored = [self._scheduler.evaluations.request(others, moment.version)] if others else []
        if self._prompts:
            await self._begin(moment, moment.version)
        await asyncio.gather(*scored, return_exceptions=True)

    async def stepped(self, moment: Moment, *, last: bool) -> None:
        """A step was committed: evaluate if it is time to. The last one is evaluated anyway, by `finish`."""
        previous, self._previous = self._previous, moment
        while self._marks_s and moment.rl_s >= self._marks_s[-1]:
            self._marks_s.pop()
            await self._schedule(previous or moment)  # the weights that were in force at the mark
        every = self._config.every_steps
        if every is not None and moment.step % every == 0 and not last:
            await self._schedule(moment)
        for task in [task for task in self._running if task.done()]:
            self._running.discard(task)
            task.result()

    async def finish(self, last: Moment) -> None:
        """RL is over and the replicas are idle: do what was deferred, then the last version."""
        if not self._prompts:
            return
        await asyncio.gather(*self._running)
        moments = [*(moment for moment in self._held if moment.version != last.version), last]
        under_way = [self._begin(moment, moment.version) for moment in moments]
        if len(moments) > 1:
            self._replicas.restart()  # an engine's versions never go back
        for evaluation in under_way:
            await evaluation

    def abandon(self) -> None:
        """The run stops: nothing more will be evaluated."""
        for task in self._running:
            task.cancel()

    async def _schedule(self, moment: Moment) -> None:
        if not self._prompts:
            return
        if self._config.deferred:
            await self._hold(moment.version)
            self._held.append(moment)
            return
        task = self._begin(moment, None)
        self._running.add(task)

    def _begin(self, moment: Moment, version: int | None) -> "asyncio.Task[None]":
        """Ask for it now; the task ends with its result."""
        asked = self._scheduler.evaluations.request(self._prompts, version)
        return asyncio.create_task(self._finish(moment, asked), name=f"evaluate-{moment.step}")

    async def _finish(self, moment: Moment, asked: "asyncio.Future[Evaluation]") -> None:
        try:
            evaluation = await asked
        except EvaluationLostError as error:
            log.warning("evaluation at step %d is left out: %s is lost", moment.step, error)
            return
        accuracy, count = evaluation.accuracy, len(evaluation.prompts)
        if accuracy is None:
            self._say(f"no held-out accuracy at step {moment.step}: none of {count} answers could be scored")
            return
        assert evaluation.version is not None, f"{evaluation.id} ended without a version"
        self._publish(
            Evaluated(
                version=evaluation.version,
                step=moment.step,
                num_prompts=count,
                accuracy=accuracy,
                rl_s=moment.rl_s,
                num_unscored=evaluation.num_unscored,
            )
        )
