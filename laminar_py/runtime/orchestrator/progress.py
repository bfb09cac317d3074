"""Words on what a run does now: its phase, evaluations with their counts, and what the learner waits for.

The controller names the phases and calls `refresh` at intervals; lines and screen are the view's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

from laminar_py.control.evaluation import PassCount
from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.observe.live import Pace, Speed, View, Waits
from laminar_py.observe.stats import Stats
from laminar_py.records.evaluations import set_of
from laminar_py.records.host import counted
from laminar_py.runtime.orchestrator.scoring import Scoring
from laminar_py.runtime.orchestrator.trainer import Trainer
from laminar_py.runtime.workers.incarnation import Incarnation

SLOW_S = 3.0
EVALUATION_S = 15.0  # between lines on an evaluation without a learner


@contextmanager
def named_if_slow(phase: str, show: Callable[[str], object]) -> Iterator[None]:
    """Show the name of a phase without other output if it takes longer than `SLOW_S`."""
    timer = Timer(SLOW_S, show, [phase])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class RunProgress:
    """Shows in `view` what a run does."""

    def __init__(
        self, incarnation: Incarnation, *, view: View, scheduler: TrajectoryScheduler, scoring: Scoring
    ) -> None:
        self._clock = incarnation.clock
        self._stats: Stats = incarnation.stats
        self._wanted = incarnation.config.fresh_groups
        self._view, self._scheduler, self._scoring = view, scheduler, scoring
        self._pace, self._speed = Pace(self._clock), Speed(self._clock)
        self._phase = "the first version is published and saved"
        self._named, self._named_s = "", 0.0  # the phase of the last `refresh`, and when it was first seen
        self._shown, self._shown_s = "", 0.0  # the last line on an evaluation without a learner
        self._lost = self._lost_shown = 0  # trajectories without their version: at the last look, and with a line

    def enter(self, phase: str) -> None:
        """Name the phase that begins, e.g. "evaluation of version 0, before RL"; the RL phase needs no name."""
        self._phase = phase

    def refresh(self, trainer: Trainer | None) -> None:
        """Show the present state; an evaluation has no trainer."""
        counts = self._scheduler.evaluations.counts
        self._pace.keep([count.pass_id for count in counts])
        passes = ", ".join(self._describe(count) for count in counts)
        if trainer is None:
            self._show_evaluation(passes)
            return
        self._show_lost(self._scheduler.state.num_version_lost)
        stats, version, phase = self._stats, trainer.version, self._present_phase(trainer)
        now = self._clock.now()
        if phase != self._named:
            self._named, self._named_s = phase, now
        waits = Waits(
            phase=f"{phase}, {now - self._named_s:.0f} s so far" if phase else "",
            step=trainer.step,
            learner_idle_s=stats.learner_idle_s,
            ready=len(self._scheduler.consumption.buffer),
            wanted=self._wanted,
            generating=self._scheduler.views.in_flight,
            scores=self._scoring.waits,
            current=sum(replica.version == version for replica in stats.replicas.values()),
            replicas=len(stats.replicas),
        )
        evaluated = f"evaluating {passes}" if passes else ""
        under_way = "" if phase else self._describe_step(trainer.step + 1)
        notes = [under_way, waits.line, evaluated, self._scoring.failures.text]
        self._view.refresh(stats, trainer.step, version, notes, phase=phase)

    def _describe_step(self, step: int) -> str:
        """E.g. "step 3: 41 s so far, 52,400 tokens generated, 1,240 a second now"."""
        stats, generated = self._stats, self._scheduler.state.generated_tokens
        tokens, speed = stats.generated_in_step(generated), self._speed.note(generated)
        so_far = f"step {step}: {stats.since_step_s:.0f} s so far"
        return f"{so_far}, {counted(tokens, 'token')} generated, {speed:,.0f} a second now"

    def _show_lost(self, lost: int) -> None:
        """Print how many trajectories have lost their version, as after a stop, once the number has settled."""
        if lost == self._lost > self._lost_shown:
            number = counted(lost - self._lost_shown, "response")
            self._view.notice(
                f"begun again: {number} under way, whose weights no relay has any more (version_lost)"
            )
            self._lost_shown = lost
        self._lost = lost

    def _present_phase(self, trainer: Trainer) -> str:
        """Return the phase; "" in RL. Nothing runs before a replica has weights."""
        if self._stats.in_rl:
            return ""
        if all(replica.version < 0 for replica in self._stats.replicas.values()):
            return f"replicas load version {trainer.version}"
        return self._phase

    def _describe(self, count: PassCount) -> str:
        """E.g. "aime: 37 of 240 answers, about 2 min left"."""
        left = self._pace.describe(count.pass_id, count.answers, count.members)
        return f"{set_of(count.pass_id)}: {count.answers} of {counted(count.members, 'answer')}{left}"

    def _show_evaluation(self, line: str) -> None:
        """Print the state of an evaluation without a learner if it has changed, at intervals."""
        now = self._clock.now()
        if line and line != self._shown and now - self._shown_s > EVALUATION_S:
            self._shown, self._shown_s = line, now
            self._view.notice(line)
