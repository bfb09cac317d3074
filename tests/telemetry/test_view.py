"""What a run says of itself while it goes on: what everything waits for, and what the user has to know at once."""

import io
import re

import pytest
from rich.console import Console

from laminar_py.observe.live import (
    Pace,
    ShownSample,
    Speed,
    View,
    Waits,
    _replica_table,
    evaluation_line,
    format_time_left,
    text_end,
)
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import LearnerProgress
from tests.builders import make_evaluated
from tests.control.fleet import ManualClock
from tests.telemetry.rows import make_rows

NOTES = ["learner waits 35 s", "12 of 480 responses could not be scored (reward_failed 12)"]


def make_waits(**changes) -> Waits:
    given = {
        "phase": "",
        "step": 3,
        "learner_idle_s": 35.4,
        "ready": 0,
        "wanted": 32,
        "generating": 0,
        "scores": "scores of 64 responses, the oldest 35 s",
        "current": 4,
        "replicas": 4,
    }
    return Waits(**(given | changes))


def make_stats(*, rl_s: float = 0.0) -> Stats:
    return Stats(SystemClock(), replicas=2, totals=Totals(rl_s=rl_s))


def make_console(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=200), file


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "learner waits 35 s for a batch (0 of 32 groups ready); waiting for: scores of 64 responses, the"
            " oldest 35 s",
        ),
        (
            {"scores": "", "generating": 40, "current": 2},
            "learner waits 35 s for a batch (0 of 32 groups ready); waiting for: 40 responses being generated,"
            " weights at 2 of 4 replicas",
        ),
        ({"learner_idle_s": None, "scores": ""}, "learner at work on step 4"),
        (
            {"phase": "evaluation of version 0", "step": 0},
            "evaluation of version 0; waiting for: scores of 64 responses, the oldest 35 s",
        ),
        ({"phase": "replicas load version 0, 4 s so far", "scores": ""}, "replicas load version 0, 4 s so far"),
    ],
)
def test_a_line_says_what_everything_waits_for(changes, line):
    assert make_waits(**changes).line == line


@pytest.mark.parametrize(
    ("step", "rl_s", "max_rl_s", "words"),
    [
        (0, 5.0, None, ""),
        (10, 100.0, None, "about 15 min left"),
        (10, 100.0, 280.0, "about 3 min left"),
        (0, 100.0, 280.0, "about 3 min left"),
        (98, 98.0, None, "about 2 s left"),
    ],
)
def test_time_left_is_of_the_steps_or_of_the_limit_whichever_is_less(step, rl_s, max_rl_s, words):
    assert format_time_left(step=step, steps=100, rl_s=rl_s, max_rl_s=max_rl_s) == words


def test_plain_output_says_a_line_a_minute_with_the_time_left():
    console, file = make_console()
    clock = ManualClock()
    view = View(console, clock=clock, steps=100)
    for _ in range(500):  # looks at half a second each
        view.refresh(make_stats(rl_s=100.0), 10, 3, NOTES)
        clock.time += 0.5
    lines = file.getvalue().splitlines()
    assert len(lines) == 4, "in 250 s"
    assert set(lines) == {f"step 10/100, 100 s of RL; about 15 min left; {NOTES[0]}; {NOTES[1]}"}


@pytest.mark.parametrize("terminal", [False, True])
def test_a_notice_is_printed_at_once_and_as_it_is(terminal):
    console, file = make_console(terminal=terminal)
    view = View(console, clock=SystemClock(), steps=100)
    view.notice("reward.use=mine.py:score: KeyError: '[red]' " + "x" * 300)
    view.close()
    assert "KeyError: '[red]' " + "x" * 300 in file.getvalue()


def test_a_view_that_draws_nothing_as_that_of_an_evaluation_leaves_the_cursor_alone():
    console, file = make_console(terminal=True)
    View(console, clock=SystemClock(), steps=0).notice("math: 3 of 8")
    assert file.getvalue() == "math: 3 of 8\n"


def test_the_live_view_shows_what_is_waited_for_before_the_first_step_and_no_learner_that_has_long_started():
    console, file = make_console(terminal=True)
    view = View(console, clock=SystemClock(), steps=100)
    view.progress(LearnerProgress("loading the model", 0, 1, 0.0))
    view.refresh(make_stats(), 0, -1, NOTES)
    assert "learner: loading the model, 0 s so far" in file.getvalue()
    assert "none yet" in file.getvalue(), "the version of a replica without weights"
    assert NOTES[0] not in file.getvalue()
    view._progressed_s -= 60.0
    before = len(file.getvalue())
    view.refresh(make_stats(), 0, 0, NOTES)
    drawn = file.getvalue()[before:]
    view.close()
    assert [note in drawn for note in NOTES] == [True, True]
    assert "loading" not in drawn


def test_every_step_leaves_a_line_above_the_live_screen_that_fits_80_columns():
    console, file = make_console(terminal=True)
    view = View(console, clock=SystemClock(), steps=1000)
    for row in make_rows(*[1.0] * 12):
        view.step(row)
    view.close()
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {step}/1000" for step in range(1, 13)]
    assert max(map(len, lines)) <= 80


def test_without_a_terminal_the_first_step_and_every_tenth_are_printed():
    console, file = make_console()
    view = View(console, clock=SystemClock(), steps=1000)
    for row in make_rows(*[1.0] * 12):
        view.step(row)
    assert [line.split("  ")[0] for line in file.getvalue().splitlines()] == ["step 1/1000", "step 10/1000"]


def test_a_warm_start_has_a_count_and_the_time_left():
    console, file = make_console()
    clock = ManualClock()
    view = View(console, clock=clock, steps=100)
    for step in (0, 10, 20, 30):
        clock.time += 6.0
        view.progress(LearnerProgress("warm start", step, 100, 2.5))
    assert file.getvalue().splitlines()[::3] == [
        "learner: warm start 0/100  loss 2.500",
        "learner: warm start 30/100  loss 2.500, about 42 s left",
    ]


def test_lines_on_a_phase_without_steps_come_soon_and_then_at_longer_intervals():
    console, file = make_console()
    clock = ManualClock()
    view = View(console, clock=clock, steps=100)
    for tick in range(120):  # a minute
        clock.time += 0.5
        phase = "replicas load version 0" if tick < 20 else "evaluation of version 0, before RL"
        view.refresh(make_stats(), 0, 0, [f"{phase}, {tick}"], phase=phase)
    lines = file.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines[:2]] == ["replicas load version 0", "evaluation of version 0"]
    assert len(lines) == 5
    assert "step" not in file.getvalue()


def test_an_evaluation_is_told_with_its_set_its_interval_and_the_count_of_what_has_no_score():
    line = evaluation_line(make_evaluated(0.5, problems=300, unscored=12, rl_s=10.0))
    assert line.startswith("heldout: accuracy 0.500 (0.4")
    assert line.endswith(") on 300 problems, 12 answers not scored: version 3, step 3, 10.0 s of RL")


def test_a_step_that_trained_nothing_shows_no_loss_of_zero():
    stats = Stats(SystemClock(), replicas=1, totals=Totals(rl_s=9.0))
    facts = {"version": 1, "batch": [], "staleness": [], "generated_tokens": 0, "versions_alive": 1}
    row = stats.step_row(step=10, metrics=None, stall_s=0.0, **facts)
    console, file = make_console()
    View(console, clock=SystemClock(), steps=100).step(row)
    assert "  nothing to train  " in file.getvalue()
    console, file = make_console(terminal=True)
    view = View(console, clock=SystemClock(), steps=100)
    view.step(row)
    view.refresh(make_stats(rl_s=9.0), 10, 3, [])
    view.close()
    assert re.search(r"loss +- ", file.getvalue())
    assert "nan" not in file.getvalue()


def test_a_view_hides_the_cursor_from_its_first_drawing_until_it_closes():
    console, file = make_console(terminal=True)
    view = View(console, clock=SystemClock(), steps=100)
    view.notice("heldout: accuracy 0.500")  # an evaluation prints lines alone
    assert "\x1b[?25l" not in file.getvalue()
    view.refresh(make_stats(), 0, -1, NOTES)
    view.close()
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1


def test_the_live_screen_shows_the_ends_of_a_sample_until_the_next_and_leaves_no_trace_in_a_pipe():
    console, file = make_console(terminal=True)
    view = View(console, clock=SystemClock(), steps=100)
    view.refresh(make_stats(), 1, 1, [])
    assert "reward" not in file.getvalue()
    view.sample(ShownSample("Add.\n" * 90 + "What is 2+2?", "[red]\x1b[2J" + "so " * 90 + "4", 0.5))
    view.refresh(make_stats(), 1, 1, [])
    drawn = file.getvalue()
    assert re.search(r"prompt +\x1b\[2m\.\.\..* Add\. What is 2\+2\?", drawn)
    assert re.search(r"reward 0\.5 +\x1b\[2m\.\.\..*so so 4", drawn)
    view.sample(ShownSample("2+3=", "[red]\x1b[2J5", 1.0))
    before = len(drawn)
    view.refresh(make_stats(), 1, 1, [])
    view.close()
    assert r"[red]\x1b[2J5" in file.getvalue()[before:], "no markup, and nothing that a terminal obeys"
    assert "so so" not in file.getvalue()[before:]
    assert not View(make_console()[0], clock=SystemClock(), steps=1).shows_samples


@pytest.mark.parametrize(
    ("text", "shown"), [("a\n b", "a b"), ("x" * 30 + "end", "...xxxxend"), ("\u4e2d" * 30, "..." + "\u4e2d" * 3)]
)
def test_the_end_of_a_text_fits_its_columns(text, shown):
    assert text_end(text, 10) == shown


def test_time_left_is_by_the_pace_since_the_count_was_first_seen():
    clock = ManualClock()
    pace = Pace(clock)
    assert pace.describe("heldout", 100, 300) == "", "answers of an earlier controller have no pace"
    clock.time = 10.0
    assert pace.describe("heldout", 150, 300) == ", about 30 s left"


def test_the_start_of_a_learner_is_never_silent_for_long():
    console, file = make_console()
    clock = ManualClock()
    view = View(console, clock=clock, steps=100)
    for tick in range(48):
        clock.time += 0.5
        if tick == 24:
            view.progress(LearnerProgress("loading the model", 0, 1, 0.0))
        view.refresh(make_stats(), 0, -1, [])
    assert file.getvalue().splitlines() == [
        "learner: its processes start, 6 s so far",
        "learner: its processes start, 11 s so far",
        "learner: loading the model, 4 s so far",
        "learner: loading the model, 10 s so far",
    ]


def test_a_resumed_run_keeps_the_last_evaluation_on_the_live_screen():
    console, file = make_console(terminal=True)
    view = View(console, clock=SystemClock(), steps=6)
    view.recall([make_evaluated(step=0, mean=0.3), make_evaluated(step=2, mean=0.5)])
    assert file.getvalue() == "", "lines of an earlier controller are not printed again"
    view.step(*make_rows(1.0))
    view.refresh(make_stats(), 3, 3, NOTES)
    assert "heldout 0.500 (step 2)" in file.getvalue()
    view.close()


def test_a_replica_is_never_a_negative_number_of_versions_behind():
    """Right after a resume the learner has published nothing yet, and replicas may serve what relays kept."""
    stats = make_stats()
    stats.replicas[0].version, stats.replicas[1].version = 2, 5
    for version, behind in ((-1, ["-", "-"]), (3, ["1", "0"])):
        assert list(_replica_table(stats, version).columns[2].cells) == behind


def test_the_speed_of_generation_is_of_the_last_seconds():
    clock = ManualClock()
    speed, told = Speed(clock), []
    for count in (0, 100, 200, 300, 300, 300, 300):
        told.append(round(speed.note(count), 1))
        clock.time += 5.0
    assert told == [0.0, 20.0, 20.0, 20.0, 13.3, 6.7, 0.0]
