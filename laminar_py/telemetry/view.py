"""View of a run while it goes on: a live screen on a terminal, plain lines elsewhere."""

import time
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import LearnerProgress, StepRow
from laminar_py.telemetry.stats import Stats

LINE_EVERY_STEPS = 10
LINE_EVERY_S = 5.0


class View(Protocol):
    """Takes in what happens and shows it."""

    def progress(self, progress: LearnerProgress) -> None:
        """Show how far a starting learner is."""
        ...

    def step(self, row: StepRow) -> None:
        """A committed step."""
        ...

    def evaluated(self, result: Evaluated) -> None:
        """A held-out accuracy."""
        ...

    def refresh(self, stats: Stats, step: int, version: int) -> None:
        """A look at all parts, twice a second."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class PlainView:
    """A line every ten steps, for files and pipes."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._said_s = 0.0

    def progress(self, progress: LearnerProgress) -> None:
        """Print a line every few seconds."""
        if time.monotonic() - self._said_s > LINE_EVERY_S:
            self._said_s = time.monotonic()
            self._console.print(progress_line(progress), highlight=False, soft_wrap=True)

    def step(self, row: StepRow) -> None:
        """Print a line every ten steps."""
        if row.step % LINE_EVERY_STEPS == 0 or row.step == self._steps or row.step == 1:
            self._console.print(
                f"step {row.step}/{self._steps}  reward {row.reward:.3f}  tokens p50 {row.length_p50} p95"
                f" {row.length_p95}  staleness {row.staleness_mean:.1f} max {row.staleness_max}  trained"
                f" {row.trained_tokens / row.rl_s:.0f} tok/s  learner waiting {row.learner_waiting_share:.0%}"
                f"  {row.rl_s:.1f} s",
                highlight=False,
                soft_wrap=True,
            )

    def evaluated(self, result: Evaluated) -> None:
        """Print a line."""
        self._console.print(evaluation_line(result), highlight=False, soft_wrap=True)

    def refresh(self, stats: Stats, step: int, version: int) -> None:
        """Nothing: a file needs no live view."""

    def close(self) -> None:
        """Nothing to close."""


class LiveView:
    """A screen that is drawn anew twice a second."""

    def __init__(self, console: Console, *, steps: int) -> None:
        self._steps = steps
        self._row: StepRow | None = None
        self._note = "starting"
        self._accuracy = "-"
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def progress(self, progress: LearnerProgress) -> None:
        """Shown below the numbers."""
        self._note = progress_line(progress)
        self._live.update(Panel(self._note, title="laminar"), refresh=True)

    def step(self, row: StepRow) -> None:
        """Kept for the next refresh."""
        self._row = row
        self._note = ""

    def evaluated(self, result: Evaluated) -> None:
        """Printed above the screen and kept."""
        self._accuracy = f"{result.accuracy:.3f} (step {result.step})"
        self._live.console.print(evaluation_line(result), highlight=False)

    def refresh(self, stats: Stats, step: int, version: int) -> None:
        """Draw."""
        if self._row is not None:
            body = Group(_numbers(self._row, self._steps, self._accuracy), _replicas(stats, version), self._note)
            self._live.update(Panel(body, title="laminar", expand=False), refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._live.stop()


def make_view(console: Console, *, steps: int) -> View:
    """Live on a terminal, plain elsewhere."""
    return LiveView(console, steps=steps) if console.is_terminal else PlainView(console, steps=steps)


def progress_line(progress: LearnerProgress) -> str:
    """Line on a starting learner."""
    loss = f"  loss {progress.loss:.3f}" if progress.loss else ""
    return f"learner: {progress.phase} {progress.done}/{progress.total}{loss}"


def evaluation_line(result: Evaluated) -> str:
    """Line on an accuracy."""
    return (
        f"held-out accuracy {result.accuracy:.3f} on {result.num_prompts} problems: version {result.version},"
        f" step {result.step}, {result.rl_s:.1f} s of RL"
    )


def _numbers(row: StepRow, steps: int, accuracy: str) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_row("step", f"{row.step}/{steps}", "RL time", f"{row.rl_s:.0f} s")
    table.add_row("reward", f"{row.reward:.3f}", "held-out accuracy", accuracy)
    table.add_row("response tokens", f"p50 {row.length_p50}  p95 {row.length_p95}", "loss", f"{row.loss:+.4f}")
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
    for index, replica in enumerate(stats.replicas):
        table.add_row(
            str(index),
            str(replica.version),
            str(version - replica.version),
            str(replica.running),
            str(replica.waiting),
            f"{replica.kv_used / replica.kv_capacity:.0%}",
        )
    return table
