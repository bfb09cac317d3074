"""View of a running run for `laminar train`: a live screen below a line a step, plain lines in files and pipes.

The controller calls the view. `Waits` words the causes of a waiting learner.
"""

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from laminar_py.observe.stats import Stats
from laminar_py.records.events import Evaluated
from laminar_py.records.host import Clock, counted, visible
from laminar_py.records.metrics import LearnerProgress, StepRow

LINE_EVERY_STEPS = 10
PROGRESS_EVERY_S = 5.0  # between lines on a starting learner, and before the first line on a phase
PHASE_EVERY_S = 15.0  # between lines on a phase before or after RL
STEP_LINE_S = 10.0  # after so long the next step has a line
LINE_EVERY_S = 60.0  # without any other line, before `refresh` prints one
SPEED_S = 15.0  # over which the present speed of generation is a mean
MOST_SHOWN = 100  # columns of a sample's text


@dataclass(frozen=True, slots=True)
class ShownSample:
    """A response of training on the live screen, e.g. `ShownSample("2+2=", "4", 1.0)`; a text may be an end."""

    prompt: str
    response: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Text on the learner's wait, e.g. for a batch while 64 responses wait for a hanging reward."""

    phase: str  # before and after RL: what the run does, e.g. "replicas load version 0"; "" in RL
    step: int
    learner_idle_s: float | None  # since its last batch; None while it has a batch
    ready: int  # groups with advantages
    wanted: int  # groups of a step
    generating: int  # responses in flight
    scores: str  # words on awaited scores, "" for none
    current: int  # replicas with the newest version
    replicas: int

    @property
    def line(self) -> str:
        """E.g. "learner waits 35 s for a batch (0 of 32 groups ready); waiting for: scores of 64 responses"."""
        parts = [self.scores] if self.scores else []
        if self.generating:
            parts.append(f"{counted(self.generating, 'response')} being generated")
        if self.current < self.replicas:
            parts.append(f"weights at {self.current} of {counted(self.replicas, 'replica')}")
        return f"{self._learner}; waiting for: {', '.join(parts)}" if parts else self._learner

    @property
    def _learner(self) -> str:
        """State of the learner, e.g. "learner at work on step 4"; before and after RL the phase."""
        if self.phase:
            return self.phase
        if self.learner_idle_s is None:
            return f"learner at work on step {self.step + 1}"
        ready = f"{self.ready} of {counted(self.wanted, 'group')} ready"
        return f"learner waits {self.learner_idle_s:.0f} s for a batch ({ready})"


class Pace:
    """Tells the time left of counted work by its pace since the count was first seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._first: dict[str, tuple[float, int]] = {}  # by work: when it was first seen, with which count

    def keep(self, names: Container[str]) -> None:
        """Forget all work but `names`."""
        self._first = {name: seen for name, seen in self._first.items() if name in names}

    def describe(self, name: str, done: int, total: int) -> str:
        """Return the time left of the work `name`, e.g. ", about 40 s left"; "" before its count has grown."""
        now = self._clock.now()
        began_s, before = self._first.setdefault(name, (now, done))
        if done <= before:
            return ""
        return f", {format_left((now - began_s) / (done - before) * (total - done))}"


class Speed:
    """Tells tokens per second over the last `SPEED_S` from a growing count."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, int]] = deque()  # (time, count), the oldest first

    def note(self, count: int) -> float:
        """Note the present count, and return the tokens per second; 0 before the second count."""
        now = self._clock.now()
        while self._seen and now - self._seen[0][0] > SPEED_S:
            self._seen.popleft()
        self._seen.append((now, count))
        began_s, before = self._seen[0]
        return (count - before) / (now - began_s) if now > began_s else 0.0


class View:
    """Shows a run of `steps` learner steps or `max_rl_s` seconds of RL.

    Without a terminal it prints a line every ten steps, or every slow step, and at least one a minute.
    """

    def __init__(self, console: Console, *, clock: Clock, steps: int, max_rl_s: float | None = None) -> None:
        self._console = console
        self._clock = clock
        self._steps = steps
        self._max_rl_s = max_rl_s
        self._printed_s = clock.now()  # when the last line was printed
        self._stepped_s = clock.now()  # when the last line of a step was printed
        self._printed_phase = ""  # without numbers: the phase of the last printed line
        self._row: StepRow | None = None
        self._sample: ShownSample | None = None
        self._pace = Pace(clock)
        self._learner: LearnerProgress | None = None  # None until its processes run
        self._entered_s = self._progressed_s = clock.now()  # when that phase began, and when the learner last told
        self._evaluated: dict[str, str] = {}  # last mean by set
        # the first drawing starts it, which hides the cursor; an evaluation draws none
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    @property
    def shows_samples(self) -> bool:
        """Whether the view shows samples: on a terminal alone, since lines of a model do not belong in logs."""
        return self._live is not None

    def progress(self, progress: LearnerProgress) -> None:
        """Show the progress of a starting learner, as a line where there is no terminal."""
        self._progressed_s = self._clock.now()
        if progress.phase != self._phase_of_learner:
            self._entered_s = self._progressed_s
        self._learner = progress
        self._print_progress()

    @property
    def _phase_of_learner(self) -> str:
        return "its processes start" if self._learner is None else self._learner.phase

    def _describe_learner(self) -> str:
        """Return what the starting learner does, e.g. "learner: loading the model, 12 s so far"."""
        progress, phase = self._learner, self._phase_of_learner
        if progress is None or progress.total <= 1:
            return f"learner: {phase}, {self._clock.now() - self._entered_s:.0f} s so far"
        loss = f"  loss {progress.loss:.3f}" if progress.loss else ""
        left = self._pace.describe(phase, progress.done, progress.total)
        return f"learner: {phase} {progress.done}/{progress.total}{loss}{left}"

    def _print_progress(self) -> None:
        """Without a terminal, print what the starting learner does every `PROGRESS_EVERY_S`."""
        if self._live is None and self._clock.now() - self._printed_s > PROGRESS_EVERY_S:
            self.notice(self._describe_learner())

    def step(self, row: StepRow) -> None:
        """Print a step's figures: a short line above the live screen, or a long one of some steps.

        Without a terminal these are the first step, the last, and every `LINE_EVERY_STEPS`, or every step if steps
        take longer than `STEP_LINE_S`.
        """
        self._row = row
        reward, lengths = _known("{:.3f}", row.reward), f"tokens {_describe_lengths(row)}"
        short = f"step {row.step}/{self._steps}  reward {reward}  {lengths}"
        if self._live is not None:
            self.notice(f"{short}  {row.rl_s:.1f} s")
            return
        is_slow = self._clock.now() - self._stepped_s > STEP_LINE_S
        if is_slow or row.step % LINE_EVERY_STEPS == 0 or row.step in (1, self._steps):
            self._stepped_s = self._clock.now()
            turns = f"  turns {row.turns.mean:.1f}, environments p95 {row.turns.environment_p95_s:.2f} s"
            staleness = f"staleness {row.staleness_mean:.1f} max {row.staleness_max}"
            if (again := row.replay).trajectories:
                staleness += f", replayed {again.staleness_mean:.1f} max {again.staleness_max}"
            about = staleness if row.trained else "nothing to train"
            self.notice(
                f"{short}{turns if row.turns.mean else ''}  {about}"
                f"  trained {row.trained_tokens / max(row.rl_s, 1e-9):.0f} tok/s  learner waiting"
                f" {row.learner_waiting_share:.0%}  {row.rl_s:.1f} s"
            )

    def evaluated(self, result: Evaluated) -> None:
        """Print the result of an evaluation, and keep its mean for the live screen."""
        self.recall([result])
        self.notice(evaluation_line(result))

    def recall(self, results: Iterable[Evaluated]) -> None:
        """Keep the last mean of each set on record for the live screen, as after a resume; print nothing."""
        for result in results:
            self._evaluated[result.set_name] = _brief_mean(result)

    def sample(self, sample: ShownSample) -> None:
        """Show a sample on the live screen until the next one comes."""
        self._sample = sample

    def notice(self, line: str) -> None:
        """Print a line without markup; on a terminal it stands above the live screen."""
        self._printed_s = self._clock.now()
        # the terminal is closed, or the pipe: rich raises SystemExit, and prints nothing from then on
        with suppress(OSError, SystemExit):
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def refresh(self, stats: Stats, step: int, version: int, notes: Sequence[str], *, phase: str = "") -> None:
        """Draw the live screen; without a terminal, print a line if none was printed for some time.

        `version` is the learner's newest version, -1 before the first. `notes` are further lines; "" is skipped.
        `phase` names the phase before or after RL, whose lines come more often; "" in RL.
        """
        left = format_time_left(step=step, steps=self._steps, rl_s=stats.rl_s, max_rl_s=self._max_rl_s)
        if self._live is not None:
            self._draw(self._live, stats, version, ["" if phase else left, *notes])
            return
        if version < 0:
            self._print_progress()
            return
        every_s = LINE_EVERY_S
        if phase:
            every_s = PHASE_EVERY_S if phase == self._printed_phase else PROGRESS_EVERY_S
        if self._clock.now() - self._printed_s > every_s:
            done = () if phase else (f"step {step}/{self._steps}, {stats.rl_s:.0f} s of RL", left)
            self._printed_phase = phase
            self.notice("; ".join(part for part in (*done, *notes) if part))

    def close(self) -> None:
        """Remove the live screen from the terminal."""
        if self._live is not None:
            with suppress(OSError):  # as in `notice`
                self._live.stop()

    def _draw(self, live: Live, stats: Stats, version: int, lines: list[str]) -> None:
        """Redraw the view; before the first version it shows only the progress of the start."""
        shown = lines if version >= 0 else []
        if version < 0 or self._clock.now() - self._progressed_s < PROGRESS_EVERY_S:
            shown = [*shown, self._describe_learner()]
        evaluated = ", ".join(self._evaluated.values()) or "-"
        figures = [] if self._row is None else [_figure_table(self._row, self._steps, evaluated)]
        samples = [] if self._sample is None else [_sample_table(self._sample, width=self._console.width)]
        texts = (Text(line) for line in shown if line)
        body = Group(*figures, _replica_table(stats, version), *texts, *samples)
        with suppress(OSError):  # as in `notice`
            live.start()  # the first time only
            live.update(Panel(body, title="laminar", expand=False), refresh=True)


def format_time_left(*, step: int, steps: int, rl_s: float, max_rl_s: float | None) -> str:
    """Return the shorter of the time to the last step at the present pace and the time to `max_rl_s`."""
    left = [] if not step else [rl_s / step * (steps - step)]
    if max_rl_s is not None:
        left.append(max(0.0, max_rl_s - rl_s))
    return format_left(min(left)) if left else ""


def format_left(seconds: float) -> str:
    """Return a time left in words, e.g. "about 15 min left"."""
    return f"about {seconds / 60:.0f} min left" if seconds >= 60 else f"about {seconds:.0f} s left"


def evaluation_line(result: Evaluated) -> str:
    """Return a line with an evaluation's figures, version, step and time."""
    where = f"version {result.version}, step {result.step}, {result.rl_s:.1f} s of RL"
    return f"{result.set_name}: {result.figures.describe()}: {where}"


def _brief_mean(result: Evaluated) -> str:
    return f"{result.set_name} {result.figures.mean.value:.3f} (step {result.step})"


def _figure_table(row: StepRow, steps: int, evaluated: str) -> Table:
    """Return a table with the figures of a step; `evaluated` has the last means of all sets as text."""
    table = Table.grid(padding=(0, 3))
    table.add_row("step", f"{row.step}/{steps}", "RL time", f"{row.rl_s:.0f} s")
    table.add_row("reward", _known("{:.3f}", row.reward), "evaluation", evaluated)
    table.add_row("response tokens", _describe_lengths(row), "loss", _known("{:+.4f}", row.loss))
    if (turns := row.turns).mean:
        times = f"p50 {turns.environment_p50_s:.2f} s  p95 {turns.environment_p95_s:.2f} s"
        table.add_row("turns", f"mean {turns.mean:.1f}", "environments", times)
    staleness = f"mean {row.staleness_mean:.1f}  max {row.staleness_max}" if row.trajectories else "-"
    table.add_row("staleness", staleness, "clipped", _known("{:.1%}", row.clip_fraction))
    if (again := row.replay).trajectories:
        ages = f"mean {again.staleness_mean:.1f}  max {again.staleness_max}"
        table.add_row("replayed", f"{again.trajectories / row.trajectories:.0%} of the step", "staleness", ages)
    rl_s = max(row.rl_s, 1e-9)
    generated, trained = row.generated_tokens / rl_s, row.trained_tokens / rl_s
    table.add_row("generated", f"{generated:,.0f} tok/s", "trained", f"{trained:,.0f} tok/s")
    stall = f"{row.publish_stall_s * 1e3:.1f} ms"
    table.add_row("learner", f"waits {row.learner_waiting_share:.0%}", "publish stall", stall)
    return table


def _sample_table(sample: ShownSample, *, width: int) -> Table:
    """Return two lines with the ends of a sample's prompt and response; `width` is of the terminal."""
    table = Table.grid(padding=(0, 3))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="dim")
    names = "prompt", f"reward {sample.reward:.3g}"
    room = min(MOST_SHOWN, width - max(map(len, names)) - 8)  # beside padding and the panel's border
    for name, text in zip(names, (sample.prompt, sample.response), strict=True):
        table.add_row(name, Text(text_end(text, room)))
    return table


def text_end(text: str, room: int) -> str:
    """Return the end of a text on one line of at most `room` columns, e.g. "...and so the answer is 4"."""
    line = visible(" ".join(text[-4 * MOST_SHOWN :].split()))
    if cell_len(line) <= room:
        return line
    while line and cell_len(line) > room - 3:
        line = line[1:]
    return f"...{line.lstrip()}"


def _describe_lengths(row: StepRow) -> str:
    """Return quantiles of a step's responses, e.g. "p50 24 p95 31", or "p50 - p95 -" without any."""
    p50, p95 = ("-" if length is None else str(length) for length in (row.length_p50, row.length_p95))
    return f"p50 {p50} p95 {p95}"


def _known(form: str, value: float) -> str:
    """Return a figure as text; "-" for NaN, since the step had nothing to measure."""
    return "-" if math.isnan(value) else form.format(value)


def _replica_table(stats: Stats, version: int) -> Table:
    """Return a table with the last report of each replica; "behind" counts versions to the learner's `version`."""
    table = Table("replica", "version", "behind", "running", "waiting", "KV used")
    for index, replica in stats.replicas.items():
        load = str(replica.running), str(replica.waiting), f"{replica.kv_use:.0%}"
        behind = "-" if min(replica.version, version) < 0 else str(max(0, version - replica.version))
        served = ("none yet" if replica.version < 0 else str(replica.version)), behind
        table.add_row(str(index), *served, *load)
    return table
