"""What the panels draw is what the record says, also where a step brought nothing."""

import re
from contextlib import asynccontextmanager
from math import isnan

import pytest

from laminar_lab.report.diagnosis import MEANINGS, Bottleneck
from laminar_lab.report.figures import headline
from laminar_lab.report.page import (
    bottleneck_panel,
    curves_panel,
    distribution_panels,
    learner_panel,
    rewards_panel,
    timeline_panel,
    tokens_panel,
)
from laminar_lab.report.run_report import RunReport, read_report
from laminar_lab.report.snapshot import read_snapshot
from laminar_py.ledger.database import reading
from laminar_py.records.events import RunEnded, RunStarted, SealBroken
from laminar_py.records.trajectory import DropReason
from tests.builders import make_evaluated
from tests.report.builders import make_step_row, write_rows
from tests.report.scripted import scripted
from tests.report.synthetic import simulate

STARTED = {"host": "h", "pid": 1, "schema": 1, "config_digest": "", "drain": True, "max_staleness": None}


@asynccontextmanager
async def three_steps(run):
    """Rewards 1 and 0 are scored before the first step, none before the second, 0.5 before the third."""
    write_rows(run / "metrics.jsonl", [make_step_row(step, 10.0 * step) for step in (1, 2, 3)])
    async with scripted(run) as script:
        for id, scored_s, reward in (("g1.0", 3, 1.0), ("g2.0", 4, 0.0), ("g3.0", 25, 0.5)):
            script.issue(0, id)
            script.finish(scored_s - 1, id)
            script.score(scored_s, id, reward=reward)
            if id == "g2.0":
                script.step(10, 1, "g1.0")
                script.step(20, 2, "g2.0")
        script.step(30, 3, "g3.0")
        yield script


async def test_a_step_in_whose_time_nothing_was_scored_has_no_reward_and_not_the_reward_0(tmp_path):
    async with three_steps(tmp_path):
        pass
    (reward,) = curves_panel(read_snapshot(tmp_path)).charts[0].series
    first, second, third = reward.y
    assert (first, third) == (0.5, 0.5)
    assert isnan(second)


async def test_the_bar_of_a_step_has_the_reward_of_what_it_trained_on(tmp_path):
    async with three_steps(tmp_path):
        pass
    steps = timeline_panel(read_snapshot(tmp_path)).charts[0].series[0]
    assert [words.rpartition(" ")[2] for words in steps.words] == ["1", "0", "0.5"]


async def test_drops_are_counted_by_reason(tmp_path):
    async with scripted(tmp_path) as script:
        for group in range(6):
            script.issue(0, f"g{group}.0")
            script.drop(1 + group, f"g{group}.0", DropReason.NO_SIGNAL if group < 4 else DropReason.STALE)
    (table,) = tokens_panel(RunReport(read_snapshot(tmp_path))).tables
    rows = {name: trajectories for name, _, _, trajectories, _ in table.rows}
    assert rows == {"issued": "6", "- no signal: all alike": "4", "- dropped as stale": "2", "= useful": "0"}


async def test_curves_of_the_learner_are_over_steps_and_lengths_those_of_what_each_trained_on(tmp_path):
    rows = [
        make_step_row(
            step,
            10.0 * step,
            loss=0.1 * step,
            learning_rate=1e-4,
            grad_norm=1.0,
            kl_behaviour_k3=0.02,
            clip_fraction=0.3,
            effective_share=0.5,
        )
        for step in (1, 2)
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    async with scripted(tmp_path) as script:
        for step, lengths in ((1, (4, 8)), (2, (10,))):
            ids = [f"g{step}.{place}" for place in range(len(lengths))]
            for id, length in zip(ids, lengths, strict=True):
                script.issue(10 * step - 9, id)
                script.finish(10 * step - 5, id, length=length)
                script.score(10 * step - 4, id)
            script.step(10 * step, step, *ids)
    charts = learner_panel(read_snapshot(tmp_path)).charts
    assert all(chart.series[0].x == [1, 2] for chart in charts)
    loss, norm, rate, length, kl, clipped, effective = (chart.series[0].y for chart in charts)
    assert rate == [1e-4, 1e-4]
    assert (loss, length) == ([0.1, 0.2], [6.0, 10.0])
    assert (norm, kl, clipped, effective) == ([1.0, 1.0], [0.02, 0.02], [0.3, 0.3], [0.5, 0.5])


async def test_the_panel_of_rewards_has_groups_and_cuts_and_each_term_with_gaps_where_a_step_has_none(tmp_path):
    given = {"reward_std": 0.4, "frac_reward_zero_std": 0.25, "clipped_ratio": 0.5}
    rows = [
        make_step_row(1, 10.0, **given, reward_terms={"math": 0.5, "/home/me/reward.py:short": 0.1}),
        make_step_row(2, 20.0),
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    async with scripted(tmp_path) as script:
        for step in (1, 2):
            script.step(10 * step, step)
    charts = {chart.name: chart.series[0].y for chart in rewards_panel(read_snapshot(tmp_path)).charts}
    assert {name: values[0] for name, values in charts.items()} == {
        "standard deviation within a group": 0.4,
        "share of groups whose rewards are all equal": 0.25,
        "share of answers cut by a cap": 0.5,
        "mean of math": 0.5,
        "mean of short": 0.1,
    }
    assert all(isnan(values[1]) for values in charts.values())


async def test_a_run_has_ended_when_it_says_so_and_is_heard_until_its_last_event(tmp_path):
    async with three_steps(tmp_path) as script:
        script.at(31, RunEnded(1, "finished"))
    with reading(tmp_path) as connection:
        (last,) = connection.execute("SELECT max(wall) FROM event").fetchone()
    assert not read_snapshot(tmp_path).history.live
    assert read_snapshot(tmp_path).heard_s == last
    killed = tmp_path / "killed"
    killed.mkdir()
    async with three_steps(killed):
        pass
    assert read_snapshot(killed).history.live


@pytest.mark.parametrize(("unscored", "words"), [(0, ""), (2, "; 2 not scored")])
async def test_answers_without_a_score_stand_beside_the_accuracy_that_they_are_left_out_of(
    tmp_path, unscored, words
):
    async with three_steps(tmp_path) as script:
        script.at(31, make_evaluated(0.25, rl_s=31.0))
        script.at(32, make_evaluated(0.5, rl_s=32.0, index=1, unscored=unscored))
    (found,) = (one for one in headline(RunReport(read_snapshot(tmp_path))) if one.name == "heldout: accuracy")
    assert found.value == "0.500"
    assert re.fullmatch(rf"95 % interval 0\.\d+ to 0\.\d+, was 0\.250{words}", found.note)


@pytest.mark.parametrize("ended", [[RunEnded(1, "interrupted")], []], ids=["stopped", "killed"])
async def test_a_stop_is_marked_on_the_charts_over_time_and_takes_no_room_there(tmp_path, ended):
    async with three_steps(tmp_path) as script:
        script.issue(32, "g4.0")
        script.at(33, *ended)
        stop_s = 33.0 if ended else 32.0
        script.at(9_033, SealBroken(""), RunStarted(**STARTED, incarnation=2, resumed_step=2))
        script.finish(9_040, "g4.0")
        script.score(9_041, "g4.0")
        script.step(9_050, 4, "g4.0")
    write_rows(tmp_path / "metrics.jsonl", [make_step_row(step, 10.0 * step) for step in (1, 2, 3, 4)])
    snapshot = read_snapshot(tmp_path)
    (timeline,), (rewards, entropy) = timeline_panel(snapshot).charts, curves_panel(snapshot).charts
    assert timeline.marks == [("stopped for 2.5 h", stop_s)]
    assert rewards.marks == entropy.marks == [("stopped for 2.5 h", 20.0)], (
        "at the step that the resume began with"
    )
    assert timeline.series[0].base[-1] + timeline.series[0].x[-1] == pytest.approx(stop_s + 17.0)
    assert timeline.heat.x[-1] < stop_s + 17.0


async def test_the_latencies_open_on_generation(tmp_path):
    async with three_steps(tmp_path):
        pass
    _, latencies = distribution_panels(read_snapshot(tmp_path).trajectories)
    assert [chart.name for chart in latencies.charts[:2]] == ["generation", "wait for a replica"]


async def test_the_page_names_the_wall_that_the_triage_found(tmp_path):
    async with scripted(tmp_path) as script:
        for step in range(1, 4):
            at, id = 10.0 * step, f"g{step}.0"
            script.issue(at, id)
            script.finish(at + 1, id)
            script.score(at + 1.5, id)
            script.step(at + 9.5, step, id, waited_s=1.0)
    diagnosis = read_report(tmp_path).diagnosis
    panel = bottleneck_panel(diagnosis, [])
    assert panel.lead == str(diagnosis.binding.bottleneck)
    assert panel.note == MEANINGS[diagnosis.binding.bottleneck]
    assert diagnosis.binding.evidence in panel.lines[0]
    assert diagnosis.mean_step.measured_s > 0


def test_every_wall_has_its_meaning():
    assert set(MEANINGS) == set(Bottleneck)


async def test_a_folder_without_a_config_has_no_diagnosis(tmp_path):
    await simulate(tmp_path, steps=2)
    assert RunReport(read_snapshot(tmp_path)).diagnosis is None


async def test_the_headline_has_the_time_from_the_command_to_the_first_response_and_the_overrides_of_a_resume(
    tmp_path,
):
    overrides = ("steps=8", "repack.planner=none")
    again = RunStarted(**STARTED, incarnation=2, resumed_step=1, overrides=overrides)
    async with scripted(tmp_path, command_s=8.0) as script:
        script.load(12, 0)
        script.issue(20, "g1.0")
        script.finish(25, "g1.0")
        script.score(26, "g1.0")
        script.step(30, 1, "g1.0")
        script.at(40, again)
    cards = {card.name: (card.value, card.note) for card in headline(read_report(tmp_path))}
    parts = "from the command: 8 s of checks, 12 s until a replica has weights, 13 s more"
    assert cards["first response"] == ("33 s", parts)
    assert cards["resumed"] == ("step 1", "with steps=8 repack.planner=none")
