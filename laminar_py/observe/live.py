"""View of a run while it goes on, live on a terminal and plain lines elsewhere; and what it waits for."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from laminar_py.observe.stats import Stats
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import LearnerProgress, StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """State of a run's stages, e.g. a learner without a batch while 64 responses wait for a reward that hangs."""

    in_rl: bool
    step: int
    learner_idle_s: float | None  # since it has no batch; None while it has one
    ready: int  # groups that it could have
    wanted: int  # of them for a step
    generating: int  # responses
    scores: str  # that are awaited, in words
    current: int  # replicas that serve the newest version
    replicas: int

    @property
    def line(self) -> str:
        """E.g. "learner waits 35 s for a batch (0 of 32 groups ready); waiting for: scores of 64 responses"."""
        parts = [self.scores] if self.scores else []
        if self.generating:
            parts.append(f"{self.generating} responses being generated")
        if self.current < self.replicas:
            parts.append(f"weights at {self.current} of {self.replicas} replicas")
        return f"{self._learner}; waiting for: {', '.join(parts) or 'nothing'}"

    @property
    def _learner(self) -> str:
        if not self.in_rl:
            return f"after step {self.step}, RL is over" if self.step else "before RL"
        if self.learner_idle_s is None:
            return f"learner at work on step {self.step + 1}"
        return (
            f"learner waits {self.learner_idle_s:.0f} s for a batch ({self.ready} of {self.wanted} groups ready)"
        )


def tell_time_left(*, step: int, steps: int, rl_s: float, max_rl_s: float | None) -> str:
    """Time left at the pace so far, within the limit; "" before the first step."""
    left = [] if not step else [rl_s / step * (steps - step)]
    if max_rl_s is not None:
        left.append(max(0.0, max_rl_s - rl_s))
    if not left:
        return ""
    minutes = min(left) / 60
    return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"


LINE_EVERY_STEPS = 10
PROGRESS_EVERY_S = 5.0
LINE_EVERY_S = 60.0


class View:
    """Prints what happens, for files and pipes: a line every ten steps and at least one a minute."""

    def __init__(self, console: Console, *, steps: int, max_rl_s: float | None = None) -> None:
        self._console = console
        self._steps = steps
        self._max_rl_s = max_rl_s
        self._said_s = time.monotonic()  # that or longer ago

    def progress(self, progress: LearnerProgress) -> None:
        """Print a line every few seconds."""
        if time.monotonic() - self._said_s > PROGRESS_EVERY_S:
            self._say(progress_line(progress))

    def step(self, row: StepRow) -> None:
        """Print a line every ten steps."""
        if row.step % LINE_EVERY_STEPS == 0 or row.step == self._steps or row.step == 1:
            self._say(
                f"step {row.step}/{self._steps}  reward {row.reward:.3f}  tokens p50 {row.length_p50} p95"
                f" {row.length_p95}{_turns(row)}  staleness {row.staleness_mean:.1f} max {row.staleness_max}"
                f"  trained {row.trained_tokens / row.rl_s:.0f} tok/s  learner waiting"
                f" {row.learner_waiting_share:.0%}  {row.rl_s:.1f} s"
            )

    def evaluated(self, result: Evaluated) -> None:
        """Print a line."""
        self._say(evaluation_line(result))

    def notice(self, line: str) -> None:
        """Print it."""
        self._say(line)

    def refresh(self, stats: Stats, step: int, version: int, notes: Sequence[str]) -> None:
        """Look at all parts, twice a second; `notes` say what they wait for and what failed, "" nothing.

        Prints a line when there was none for a minute.
        """
        if version >= 0 and time.monotonic() - self._said_s > LINE_EVERY_S:
            left = tell_time_left(step=step, steps=self._steps, rl_s=stats.rl_s, max_rl_s=self._max_rl_s)
            done = f"step {step}/{self._steps}, {stats.rl_s:.0f} s of RL"
            self._say("; ".join(part for part in (done, left, *notes) if part))

    def close(self) -> None:
        """Nothing to close."""

    def _say(self, line: str) -> None:
        self._said_s = time.monotonic()
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class LiveView(View):
    """A screen that is drawn anew twice a second."""

    def __init__(self, console: Console, *, steps: int, max_rl_s: float | None = None) -> None:
        super().__init__(console, steps=steps, max_rl_s=max_rl_s)
        self._row: StepRow | None = None
        self._starting = "starting"  # how far the learner is, and when it said so
        self._started_s = time.monotonic()
        self._means: dict[str, str] = {}  # of the last evaluation, by set
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def progress(self, progress: LearnerProgress) -> None:
        """Shown while it is new."""
        self._starting, self._started_s = progress_line(progress), time.monotonic()

    def step(self, row: StepRow) -> None:
        """Kept for the next refresh."""
        self._row = row

    def evaluated(self, result: Evaluated) -> None:
        """Printed above the screen and kept."""
        self._means[result.set_name] = f"{result.set_name} {result.figures.mean.value:.3f} (step {result.step})"
        self.notice(evaluation_line(result))

    def refresh(self, stats: Stats, step: int, version: int, notes: Sequence[str]) -> None:
        """Draw."""
        left = tell_time_left(step=step, steps=self._steps, rl_s=stats.rl_s, max_rl_s=self._max_rl_s)
        lines = [left, *notes] if version >= 0 else []
        if version < 0 or time.monotonic() - self._started_s < PROGRESS_EVERY_S:
            lines.append(self._starting)
        numbers = (
            [] if self._row is None else [_numbers(self._row, self._steps, ", ".join(self._means.values()) or "-")]
        )
        body = Group(*numbers, _replicas(stats, version), *(Text(line) for line in lines if line))
        self._live.update(Panel(body, title="laminar", expand=False), refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()


def make_view(console: Console, *, steps: int, max_rl_s: float | None) -> View:
    """Live on a terminal, plain elsewhere; steps and seconds of RL after which the run is done."""
    kind = LiveView if console.is_terminal else View
    return kind(console, steps=steps, max_rl_s=max_rl_s)


def progress_line(progress: LearnerProgress) -> str:
    """Line on a starting learner."""
    loss = f"  loss {progress.loss:.3f}" if progress.loss else ""
    return f"learner: {progress.phase} {progress.done}/{progress.total}{loss}"


def evaluation_line(result: Evaluated) -> str:
    """Line on an evaluation."""
    where = f"version {result.version}, step {result.step}, {result.rl_s:.1f} s of RL"
    return f"{result.set_name}: {result.figures.describe()}: {where}"


def _turns(row: StepRow) -> str:
    """Words on turns after those on tokens; none in a run without an environment."""
    turns = row.turns
    return f"  turns {turns.mean:.1f}, environments p95 {turns.environment_p95_s:.2f} s" if turns.mean else ""


def _numbers(row: StepRow, steps: int, evaluated: str) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row("step", f"{row.step}/{steps}", "RL time", f"{row.rl_s:.0f} s")
    table.add_row("reward", f"{row.reward:.3f}", "evaluation", evaluated)
    table.add_row("response tokens", f"p50 {row.length_p50}  p95 {row.length_p95}", "loss", f"{row.loss:+.4f}")
    if (turns := row.turns).mean:
        times = f"p50 {turns.environment_p50_s:.2f} s  p95 {turns.environment_p95_s:.2f} s"
        table.add_row("turns", f"mean {turns.mean:.1f}", "environments", times)
    table.add_row(
        "staleness",
        f"mean {row.staleness_mean:.1f}  max {row.staleness_max}",
        "clipped",
        f"{row.clip_fraction:.1%}",
    )
    table.add_row(
        "generated",
        f"{row.generated_tokens / row.rl_s:,.0f} tok/s",
        "trained",
        f"{row.trained_tokens / row.rl_s:,.0f} tok/s",
    )
    table.add_row(
        "learner", f"waits {row.learner_waiting_share:.0%}", "publish stall", f"{row.publish_stall_s * 1e3:.1f} ms"
    )
    return table


def _replicas(stats: Stats, version: int) -> Table:
    table = Table("replica", "version", "behind", "running", "waiting", "KV used")
    for index, replica in stats.replicas.items():
        table.add_row(
            str(index),
            str(replica.version),
            str(version - replica.version),
            str(replica.running),
            str(replica.waiting),
            f"{replica.kv_used / replica.kv_capacity:.0%}",
        )
    return table
