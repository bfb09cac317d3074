"""The table of an experiment, and the time that is left."""

import asyncio
import io
import shutil
from dataclasses import replace

import pytest
from rich.console import Console

from laminar_lab.launcher.board import Board, standing_table
from laminar_lab.launcher.standing import (
    RunState,
    Standing,
    assign_slots,
    experiment_left,
    format_duration,
    known_paces,
    read_standing,
    seconds_left,
)
from tests.analytics.builders import make_step_row
from tests.launcher.experiments import make_experiment
from tests.launcher.test_queue import write_summary


def standings_of(experiment, *found):
    """Standings of runs that have these rows; None for one that has not begun."""
    return [
        Standing(run=run, state=RunState.RUNNING if one else RunState.WAITING, row=one)
        for run, one in zip(experiment.runs, found, strict=True)
    ]


class Screen(io.StringIO):
    """A terminal that tells when some words are drawn."""

    def __init__(self, words):
        super().__init__()
        self._words, self.drawn = words, asyncio.Event()

    def write(self, text):
        if self._words in text:
            self.drawn.set()
        return super().write(text)


def show(table):
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def test_runs_that_have_not_begun_take_as_long_as_their_variant_and_slots_share_the_work(tmp_path):
    experiment = make_experiment(tmp_path, set={"steps": 10}, grid={"learner.lr": [1e-3, 2e-3]}, seeds=2)
    standings = standings_of(
        experiment,
        make_step_row(5, 10.0, trained_tokens=5000),
        make_step_row(5, 20.0, trained_tokens=5000),
        None,
        None,
    )
    paces = known_paces(experiment, standings)
    assert paces == {"lr-0.001": 2.0, "lr-0.002": 4.0}
    assert [seconds_left(one, step_s=paces[one.run.variant]) for one in standings] == [10, 20, 20, 40]
    assert experiment_left(standings, paces, slots=1) == 90
    assert experiment_left(standings, paces, slots=2) == 60
    assert assign_slots(standings, paces, slots=2) == [0, 1, 0, 1]
    assert assign_slots(standings, {}, slots=1) == [0, 0, 0, None], "nobody knows when the third ends"


def test_a_limit_in_seconds_bounds_what_is_left_and_is_known_without_any_pace(tmp_path):
    experiment = make_experiment(tmp_path, set={"steps": 1000, "max_rl_seconds": 30.0}, seeds=2)
    begun, waiting = standings_of(experiment, make_step_row(5, 10.0, trained_tokens=5000), None)
    assert seconds_left(begun, step_s=None) == 20
    assert seconds_left(waiting, step_s=None) == 30


def test_a_run_that_failed_is_ahead_of_the_next_launch(tmp_path):
    (run,) = make_experiment(tmp_path, set={"steps": 10}).runs
    failed = Standing(run=run, state=RunState.FAILED, row=make_step_row(5, 10.0, trained_tokens=5000))
    assert experiment_left([failed], {}, slots=1) == 10


def test_a_run_whose_process_does_no_step_for_long_is_told(tmp_path):
    experiment, out = make_experiment(tmp_path), io.StringIO()
    clock = iter([1000.0, 1000.0 + 720, 1000.0 + 60])
    board = Board(experiment, Console(file=out, width=100), now=lambda: next(clock))
    board.note(experiment.runs[0], RunState.RUNNING, "GPU 3")
    assert [one.why for one in board.shown()] == ["no step for 12 min; GPU 3"]
    assert [one.why for one in board.shown()] == ["GPU 3"]


def test_without_any_step_the_time_is_unknown(tmp_path):
    experiment = make_experiment(tmp_path, seeds=1)
    assert experiment_left(standings_of(experiment, None), {}, slots=1) is None
    assert format_duration(None) == "unknown"


@pytest.mark.parametrize(
    ("seconds", "told"), [(50, "50 s"), (61, "1 min 1 s"), (600, "10 min"), (3600 * 3 + 20 * 60, "3 h 20 min")]
)
def test_a_duration_is_told_in_units_that_suit(seconds, told):
    assert format_duration(seconds) == told


def test_the_table_says_how_far_each_run_is_and_shows_what_it_said_as_text(tmp_path):
    experiment = make_experiment(tmp_path, set={"steps": 10}, seeds=2)
    running, waiting = standings_of(experiment, make_step_row(5, 10.0, trained_tokens=5000), None)
    failed = Standing(run=waiting.run, state=RunState.FAILED, why="[red]no[/red]\x1b[2J")
    told = show(standing_table([running, failed], experiment, width=120))
    assert "base-s0  running  5/10" in told
    assert "500" in told, "tokens a second"
    assert "[red]no[/red]\\x1b[2J" in told


def test_a_narrow_terminal_shows_which_run_how_far_and_whether_it_does_steps(tmp_path):
    experiment = make_experiment(tmp_path, grid={"learner.lr": [1e-3], "algorithm.name": ["grpo"]}, seeds=2)
    (one, _) = standings_of(experiment, make_step_row(5, 10.0, trained_tokens=5000), None)
    out = io.StringIO()
    why = replace(one, why="no step for 12 min; GPU 3,4")
    Console(file=out, width=80).print(standing_table([why], experiment, width=80))
    told = out.getvalue()
    assert "lr-0.001_algorithm" in told
    assert "-s0" in told
    assert "5/120" in told
    assert "no step for 12 min" in told


async def test_a_terminal_has_a_live_table_that_leaves_nothing_behind(tmp_path):
    (run,) = make_experiment(tmp_path).runs
    out = Screen("unknown")
    console = Console(file=out, force_terminal=True, width=100, height=30)
    board = Board(make_experiment(tmp_path), console, slots=1)
    board.note(run, RunState.RUNNING, "GPU 3")
    async with asyncio.timeout(60):
        watching = asyncio.create_task(board.watch())
        await out.drawn.wait()
        watching.cancel()
        await asyncio.wait([watching])
    assert "e-base-s0: running (GPU 3)" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue(), "the cursor is back"


def test_a_finished_run_of_the_base_tells_the_pace_of_an_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base.yaml"
    shutil.copy(make_experiment(tmp_path).settings.base, base)
    experiment = make_experiment(tmp_path / "e", base=str(base))
    standings = [read_standing(run) for run in experiment.runs]
    assert known_paces(experiment, standings) == {}
    done = tmp_path / "runs/quickstart-4"
    done.mkdir(parents=True)
    write_summary(done, rl_seconds=12.0, steps=4)
    assert known_paces(experiment, standings) == {"base": 3.0}
