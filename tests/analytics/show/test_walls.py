"""The wall on the page: what the triage says, and bars that end where the schedule's step does."""

import pytest

from laminar_py.config.staleness import Schedule
from laminar_py.observe.diagnosis import MEANINGS
from laminar_py.observe.mean_step import StageTimes, StepStage, compose
from laminar_py.observe.panels import stage_bars, wall_panel
from laminar_py.observe.record import read_snapshot
from laminar_py.observe.remedies import Wall
from laminar_py.observe.report import RunReport, read_report
from tests.analytics.scripted import scripted
from tests.analytics.synthetic import simulate

TIMES = StageTimes(
    generation_s=3.0, environment_s=1.5, reward_s=4.0, reference_s=1.0, learner_s=2.0, weights_s=0.5
)


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_last_bar_ends_when_the_step_does(schedule):
    bars = stage_bars(schedule, TIMES, Wall.LEARNER)
    assert max(bar.start_s + bar.seconds for bar in bars) == pytest.approx(compose(schedule, TIMES))
    assert {bar.name: bar.seconds for bar in bars} == {str(stage): TIMES.of(stage) for stage in StepStage}
    assert [bar.name for bar in bars if bar.binding] == ["learner"]


def test_a_run_without_environments_has_no_bar_of_them():
    times = StageTimes(generation_s=3.0, learner_s=2.0)
    assert [bar.name for bar in stage_bars(Schedule.ASYNC, times, Wall.LEARNER)] == ["generation", "learner"]


async def test_the_page_names_the_wall_that_the_triage_found(tmp_path):
    async with scripted(tmp_path) as script:
        for step in range(1, 4):
            at, id = 10.0 * step, f"g{step}.0"
            script.issue(at, id)
            script.finish(at + 1, id)
            script.score(at + 1.5, id)
            script.step(at + 9.5, step, id, waited_s=1.0)
    diagnosis = read_report(tmp_path).diagnosis
    panel = wall_panel(diagnosis)
    assert panel.lead == str(diagnosis.binding.wall)
    assert panel.note == MEANINGS[diagnosis.binding.wall]
    assert len(panel.lists[1]) == len(diagnosis.binding.remedies) > 0
    assert diagnosis.mean_step.measured_s > 0


def test_every_wall_has_its_meaning():
    assert set(MEANINGS) == set(Wall)


async def test_a_folder_without_a_config_has_no_diagnosis(tmp_path):
    await simulate(tmp_path, steps=2)
    assert RunReport(read_snapshot(tmp_path)).diagnosis is None
