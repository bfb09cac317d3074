"""Rows of steps: what is not finite is told once, and every reader reads the row."""

import io
import json
import logging
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from laminar_lab.curves import reward_curve
from laminar_lab.report.snapshot import read_samples
from laminar_py.config import load_config
from laminar_py.ledger.row_files import append_row, open_rows
from laminar_py.observe.live import View
from laminar_py.observe.stats import Stats, Totals, read_totals
from laminar_py.observe.trackers import flat_row
from laminar_py.records.engine import DraftCounts, EngineStatus
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import Mismatch, TurnFigures
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.scoring import GroupRewards, TermValue
from tests.telemetry.rows import make_rows


def test_a_metric_that_is_not_finite_is_named_once_and_the_run_resumes_and_reports(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), (tmp_path / "metrics.jsonl").open("ab") as file:
        for row in make_rows(1.0, math.nan, math.inf):
            append_row(file, row)
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: not finite, so null in metrics.jsonl: entropy"
    ]
    assert read_totals(tmp_path / "metrics.jsonl", 3).versions_alive_max == 1
    found = read_samples(tmp_path).steps
    assert [row.step for row in found] == [1, 2, 3]
    assert [math.isfinite(row.entropy) for row in found] == [True, False, False]
    assert math.isnan(found[1].by_staleness["9+"].entropy)
    assert found[0].mfu == found[1].mfu == 0.25
    assert math.isnan(flat_row(found[1])["tokens/entropy"])


NOTHING = (
    "loss",
    "grad_norm",
    "entropy",
    "clip_fraction",
    "mismatch_mean",
    "staleness_mean",
    "learner_tokens_per_s",
)


def test_a_step_that_trained_nothing_has_null_in_place_of_figures_and_trackers_get_none(tmp_path, caplog):
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    facts = {"version": 1, "batch": [], "staleness": [], "generated_tokens": 0, "versions_alive": 1}
    with caplog.at_level(logging.WARNING), (tmp_path / "metrics.jsonl").open("ab") as file:
        row = stats.step_row(step=1, metrics=None, stall_s=0.0, **facts)
        append_row(file, row)
    assert caplog.records == []
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert [line[name] for name in NOTHING] == [None] * len(NOTHING)
    assert line["trajectories"] == line["learner_s"] == 0
    (again,) = read_samples(tmp_path).steps
    assert not again.trained
    told = flat_row(again)
    assert not any(math.isnan(value) for value in told.values())
    assert not {f"run/{name}" for name in NOTHING} & set(told)
    assert "tokens/entropy" not in told


def test_a_row_has_the_drafts_of_all_replicas_and_their_mean_speed_up(tmp_path):
    stats = Stats(SystemClock(), replicas=2, totals=Totals())
    for replica, speedups in enumerate(({1: 2.0, 4: 1.5}, {1: 3.0})):
        status = EngineStatus(
            running=0,
            waiting=0,
            kv_used=0,
            kv_capacity=1,
            version=0,
            drafts=DraftCounts(drafted_own=9, accepted_own=6, verified=8, near=1),
            speedups=speedups,
        )
        stats.on_report(ReplicaReport(replica=replica, status=status, admissible=0, received=0))
    facts = {"version": 1, "batch": [], "staleness": [], "generated_tokens": 0, "versions_alive": 1}
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        append_row(file, stats.step_row(step=1, metrics=None, stall_s=0.0, **facts))
    (row,) = read_samples(tmp_path).steps
    assert row.drafts == DraftCounts(drafted_own=18, accepted_own=12, verified=16, near=2)
    assert row.drafts.accepted_per_pass == 3.0
    assert row.draft_speedups == {1: 2.5, 4: 1.5}
    told = flat_row(row)
    assert (told["drafts/near"], told["drafts/speedup_1"], told["drafts/speedup_4"]) == (2, 2.5, 1.5)


def test_a_mismatch_without_fresh_tokens_is_unknown_and_no_fault():
    (row,) = make_rows(1.0)
    old = msgspec.structs.replace(row, **Mismatch().figures)
    assert old.not_finite == []
    assert "run/mismatch_max" not in flat_row(old)
    assert msgspec.structs.replace(row, mismatch_max=math.inf).not_finite == ["mismatch_max"]


def test_lengths_of_a_row_are_those_since_the_one_before_and_else_unknown():
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    for lengths, told in (([5, 6, 7], (6, 7)), ([100], (100, 100)), ([], (None, None))):
        for length in lengths:
            stats.add_score(1.0, [], length, cut=False)
        row = stats.step_row(
            step=1,
            version=1,
            batch=[],
            staleness=[],
            metrics=None,
            generated_tokens=0,
            versions_alive=1,
            stall_s=0.0,
        )
        assert (row.length_p50, row.length_p95) == told


def test_a_step_after_a_resume_without_a_scored_response_has_no_reward_of_zero(tmp_path):
    stats = Stats(SystemClock(), replicas=1, totals=Totals(rl_s=390.0, trained_tokens=900))  # of two steps before
    facts = {"version": 3, "batch": [], "staleness": [2], "metrics": None, "generated_tokens": 0}
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        append_row(file, stats.step_row(step=3, versions_alive=1, stall_s=0.0, **facts))
        stats.add_score(0.5, [TermValue(name="math", value=0.5)], 12, cut=False)
        append_row(file, stats.step_row(step=4, versions_alive=1, stall_s=0.0, **facts))
        append_row(file, stats.step_row(step=5, versions_alive=1, stall_s=0.0, **facts))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward"] for line in lines] == [None, 0.5, None]
    assert [line.get("length_p95") for line in lines] == [None, 12, None]
    steps = read_samples(tmp_path).steps
    assert "run/reward" not in flat_row(steps[0])
    points = reward_curve(load_config(Path("configs/quickstart.yaml"), []), steps)
    assert [(point.step, point.value) for point in points] == [(4, 0.5)], "what charts and `compare` draw"
    file = io.StringIO()
    view = View(Console(file=file, width=100), clock=SystemClock(), steps=5)
    view.step(msgspec.structs.replace(steps[0], step=1))
    assert file.getvalue().startswith("step 1/5  reward -  tokens p50 - p95 -  ")


def test_a_row_has_spread_and_cut_share_and_terms_of_what_came_since_the_one_before():
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    facts = {
        "version": 1,
        "batch": [],
        "staleness": [],
        "metrics": None,
        "generated_tokens": 0,
        "versions_alive": 1,
    }
    for value, cut in ((1.0, False), (0.0, True), (0.0, False), (0.0, False)):
        stats.add_score(2 * value, [TermValue(name="math", value=value)], 5, cut=cut)
    for rewards in ((2.0, 0.0), (0.0, 0.0), (0.0,), (1.0, 1.0)):
        stats.add_group(GroupRewards(0, "p0", rewards))
    row = stats.step_row(step=1, stall_s=0.0, **facts)
    assert (row.clipped_ratio, row.frac_reward_zero_std) == (0.25, 0.75)
    assert row.reward_std == pytest.approx(math.sqrt(2) / 4)
    assert row.reward_terms == {"math": 0.25}
    later = stats.step_row(step=2, stall_s=0.0, **facts)
    assert math.isnan(later.reward_std)
    assert math.isnan(later.frac_reward_zero_std)
    assert math.isnan(later.clipped_ratio)
    assert later.reward_terms == {}


def test_turns_of_a_row_are_those_since_the_one_before_and_a_run_without_environments_has_none():
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    facts = {"version": 1, "batch": [], "staleness": [], "metrics": None, "generated_tokens": 0}
    for found, told in (
        ([(1, 0.1), (3, 0.2), (2, 0.9)], TurnFigures(mean=2.0, environment_p50_s=0.2, environment_p95_s=0.9)),
        ([(4, 0.5)], TurnFigures(mean=4.0, environment_p50_s=0.5, environment_p95_s=0.5)),
        ([], TurnFigures()),
    ):
        for turns, environment_s in found:
            stats.add_turns(turns, environment_s)
        row = stats.step_row(step=1, versions_alive=1, stall_s=0.0, **facts)
        assert row.turns == told
    assert not [name for name in flat_row(row) if name.startswith("turns/")]


def test_a_row_that_was_torn_costs_itself_alone_when_a_run_resumes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first, second, third = make_rows(1.0, 1.0, 1.0)
    with open_rows(path) as file:
        append_row(file, first)
        file.write(b'{"step": 2, "rl')
    assert read_totals(path, 2) == read_totals(path, 1)
    for row in (second, third):
        with open_rows(path) as file:
            append_row(file, row)
    assert [row.step for row in read_samples(tmp_path).steps] == [1, 2, 3]
    assert path.read_bytes().count(b"\n") == 4


def test_steps_that_were_undone_are_none_though_none_was_done_in_their_place(tmp_path):
    rows = make_rows(1.0, 1.0, 1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        for row in (*rows, rows[1]):
            append_row(file, row)
    assert [row.step for row in read_samples(tmp_path).steps] == [1, 2]


def test_a_line_has_its_own_fields_first_and_none_that_is_not_known(tmp_path):
    (row,) = make_rows(1.0)
    with (tmp_path / "rows").open("ab") as file:
        append_row(file, msgspec.structs.replace(row, mfu=None))
    line = (tmp_path / "rows").read_text()
    assert line.startswith('{"step":1,"version":1,')
    assert "mfu" not in line
