"""Table of an experiment while it goes on: live on a terminal, lines elsewhere. Fed by the queue.

Text that comes from runs is shown as text: no markup, and control characters as escapes.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import compress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_lab.launcher.standing import (
    RunState,
    Standing,
    experiment_left,
    format_duration,
    known_paces,
    read_standing,
    read_standings,
    seconds_left,
)
from laminar_py.records.host import visible

log = logging.getLogger(__name__)

LOOK_S = 1.0
LINE_EVERY_S = 60.0
QUIET_S, QUIET_STEPS = 300.0, 5  # without a step, and so many times as long as one takes, before that is told
WHOLE = 100  # columns of a terminal from which on the table is whole
AROUND = 6  # lines of a terminal that the rows of the table cannot have
ACTIVE = (RunState.RUNNING, RunState.HELD, RunState.RETRYING)
STYLES = {
    RunState.RUNNING: "bold",
    RunState.FINISHED: "green",
    RunState.FAILED: "red",
    RunState.RETRYING: "yellow",
}


class Board:
    """Standings of all runs, as the queue and the runs' folders tell them."""

    def __init__(
        self,
        experiment: Experiment,
        console: Console,
        *,
        slots: int = 1,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._experiment = experiment
        self._console = console
        self._slots = slots
        self._now = now  # seconds since the epoch, as of files
        self._standings = {one.run.name: _tried_again(one) for one in read_standings(experiment)}
        self._started_s = dict[str, float]()  # by run that goes on
        self._said_s = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    @property
    def standings(self) -> list[Standing]:
        """Every run, in the order of the experiment."""
        return list(self._standings.values())

    def note(self, run: PlannedRun, state: RunState, why: str) -> None:
        """Take in what the queue does with a run, e.g. that it runs on GPU 0."""
        before = self._standings[run.name]
        if (before.state, before.why) != (state, why):
            self._standings[run.name] = replace(before, state=state, why=why)
            self._started_s[run.name] = self._now()
            self._say(f"{run.name}: {state}{f' ({why})' if why else ''}")

    def settle(self, standing: Standing) -> None:
        """Take in how a run has ended, or stands after a stop."""
        self._standings[standing.run.name] = standing
        self._say(f"{standing.run.name}: {format_standing(standing, self._experiment)}")

    async def watch(self) -> None:
        """Look at all that runs, each second, until cancelled."""
        if self._live is not None:
            self._live.start()
        try:
            while True:
                active = [one.run for one in self.standings if one.state in ACTIVE]
                self._take_in(await asyncio.to_thread(self._look, active))
                if self._live is not None:
                    with _ignore_output_errors():
                        self._live.update(self._screen(), refresh=True)
                elif time.monotonic() - self._said_s > LINE_EVERY_S:
                    self._say_all()
                await asyncio.sleep(LOOK_S)
        finally:
            if self._live is not None:
                with _ignore_output_errors():
                    self._live.stop()

    def _look(self, runs: Sequence[PlannedRun]) -> list[Standing]:
        """Standings by what is on disk."""
        found = [read_standing(run) for run in runs]
        for standing in found:
            evaluation_of(standing, self._experiment)  # and their results, which the table then has at hand
        return found

    def _take_in(self, seen: Sequence[Standing]) -> None:
        for now in seen:
            known = self._standings[now.run.name]
            if known.state in ACTIVE and now.row is not None:  # it may have ended since the look
                self._standings[now.run.name] = replace(known, row=now.row, stepped_s=now.stepped_s)

    def _left(self) -> str:
        standings = self.standings
        ahead = [one for one in standings if one.state is not RunState.FAILED]
        left_s = experiment_left(ahead, known_paces(self._experiment, standings), slots=self._slots)
        counts = Counter(standing.state for standing in standings)
        told = ", ".join(f"{counts[state]} {state}" for state in RunState if counts[state])
        return f"{told}; of RL left: {format_duration(left_s)}"

    def shown(self) -> list[Standing]:
        """Standings, with a word on runs whose process has done no step for long."""
        return [self._with_stall_note(one) for one in self.standings]

    def _with_stall_note(self, standing: Standing) -> Standing:
        since_s = max(self._started_s.get(standing.run.name, 0.0), standing.stepped_s or 0.0)
        quiet_s = self._now() - since_s
        if standing.state is not RunState.RUNNING or quiet_s < max(
            QUIET_S, QUIET_STEPS * (standing.step_s or 0.0)
        ):
            return standing
        told = f"no step for {quiet_s / 60:.0f} min"
        return replace(standing, why="; ".join(filter(None, (told, standing.why))))

    def _screen(self) -> Group:
        room = self._console.height - AROUND
        shown = self.shown()
        if len(shown) > room:
            shown = [one for one in shown if one.state in (*ACTIVE, RunState.FAILED)][:room]
        return Group(standing_table(shown, self._experiment, width=self._console.width), Text(self._left()))

    def _say_all(self) -> None:
        for standing in self.shown():
            if standing.state in ACTIVE:
                self._say(f"{standing.run.name}: {format_standing(standing, self._experiment)}")
        self._say(self._left())

    def _say(self, line: str) -> None:
        self._said_s = time.monotonic()
        with _ignore_output_errors():
            self._console.print(visible(line), highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _ignore_output_errors() -> Iterator[None]:
    """Let runs go on where nobody can be shown how: a full disk, or a pipe that nobody reads any more."""
    try:
        yield
    except (OSError, SystemExit) as error:  # rich leaves at a broken pipe
        log.warning("the table cannot be shown: %s", error)


def _tried_again(standing: Standing) -> Standing:
    """A run that failed under an earlier launcher waits for this one."""
    failed = standing.state is RunState.FAILED
    return replace(standing, state=RunState.WAITING, why="") if failed else standing


def standing_table(standings: Sequence[Standing], experiment: Experiment, *, width: int) -> Table:
    """Rows of runs: how far each is; in a narrow terminal without figures that a report has, too."""
    paces = known_paces(experiment, standings)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    names = ("step", "reward", experiment.compared, "tokens/s", "stale", "RL left")
    shown = [width >= WHOLE or name in (experiment.compared, "step", "RL left") for name in names]
    for name in compress(names, shown):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for one in standings:
        left_s = seconds_left(one, step_s=paces.get(one.run.variant))
        left = "" if one.state in (RunState.FINISHED, RunState.FAILED) else format_duration(left_s)
        name = one.run.name.removeprefix(f"{experiment.settings.name}-")
        cells = (name, one.state, *compress((*_figures(one, experiment), left), shown))
        why = Text(visible(one.why), no_wrap=True, overflow="ellipsis")
        table.add_row(*(Text(cell) for cell in cells), why, style=STYLES.get(one.state))
    return table


def _figures(standing: Standing, experiment: Experiment) -> tuple[str, ...]:
    row, steps = standing.row, standing.run.config.steps
    if row is None:
        return (f"0/{steps}", "", "", "", "")
    value = evaluation_of(standing, experiment)
    return (
        f"{row.step}/{steps}",
        f"{row.reward:.3f}",
        "" if value is None else f"{value:.3f}",
        f"{row.trained_tokens / row.rl_s:,.0f}" if row.rl_s else "",
        f"{row.staleness_mean:.1f}",
    )


def format_standing(standing: Standing, experiment: Experiment) -> str:
    """Line on a run, without its name."""
    step, reward, value, rate, staleness = _figures(standing, experiment)
    figures = [f"step {step}", f"reward {reward}" if reward else ""]
    figures += [f"{experiment.compared} {value}" if value else "", f"trained {rate} tok/s" if rate else ""]
    figures += [f"staleness {staleness}" if staleness else "", standing.why]
    return "; ".join(filter(None, (str(standing.state), *figures)))


def evaluation_of(standing: Standing, experiment: Experiment) -> float | None:
    """The newest result on the set by which the experiment compares; None before the first."""
    points = standing.evaluations.get(experiment.compared, [])
    return points[-1].value if points else None
