"""Reports of a run whose environments answer turns: a stage of their own, apart from generation everywhere."""

import io
import json

import pytest
from rich.console import Console

from laminar_lab.advice import remedies, what_if_set
from laminar_lab.report.diagnosis import Bottleneck
from laminar_lab.report.metrics import metrics_text
from laminar_lab.report.page import make_page, write_page
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.terminal import run_tables
from laminar_lab.report.trace import write_trace
from laminar_py.config.loading import load_config
from tests.report.browser import browsing, slow_in_browser
from tests.report.scripted import TURNS, WITH_ENVIRONMENT, scripted
from tests.runs.runs import REPO

OPTIONS = "JSON.stringify([...document.querySelector('#{} select').options].map((one) => one.value))"


async def write_turns(run, *overrides):
    """Three steps of eight trajectories each, which are in their environments nine tenths of the time."""
    async with scripted(run, "rollout.replicas=1", *overrides) as script:
        has_environment = WITH_ENVIRONMENT in overrides
        for step in range(1, 4):
            at, ids = 10.0 * (step - 1), [f"g{step}.{sample}" for sample in range(8)]
            for id in ids:
                script.issue(at, id, index=step)
            for id in ids:
                turns = {"spans": TURNS, "environment_s": 8.1} if has_environment else {}
                script.finish(at + 9.0, id, **turns)
                script.score(at + 9.0, id)
            script.step(at + 10.0, step, *ids, waited_s=9.0)
    return RunReport(read_snapshot(run))


def told(report):
    console = Console(file=io.StringIO(), width=100)
    for table in run_tables(report):
        console.print(table)
    return console.file.getvalue()


async def test_a_run_whose_trajectories_mostly_wait_for_environments_is_told_what_to_change(tmp_path):
    report = await write_turns(tmp_path, WITH_ENVIRONMENT)
    found = report.diagnosis
    assert found.binding.bottleneck is Bottleneck.ENVIRONMENT
    assert found.mean_step.times.environment_s == pytest.approx(8.1)
    assert found.mean_step.times.generation_s == pytest.approx(0.9)
    assert found.mean_step.away == pytest.approx(8 * 0.81)
    first, *_ = remedies(Bottleneck.ENVIRONMENT, report.snapshot.config, found.mean_step)
    assert (first.key, first.new) == ("environment.at_once", "16")  # eight may work, and eight are away
    assert what_if_set(found.mean_step, Bottleneck.ENVIRONMENT, first) == pytest.approx(10.0 - 8.1 / 2)


async def test_the_terminal_has_turns_and_environments_where_there_are_some_and_else_no_word_of_them(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    text = told(await write_turns(tmp_path / "a", WITH_ENVIRONMENT))
    for line in ("ENVIRONMENT: replicas wait", "turns of the model", "\nenvironment  ", "generation 0.90 s"):
        assert line in text
    without = told(await write_turns(tmp_path / "b"))
    assert "environment" not in without.lower()
    assert "turns of the model" not in without
    assert "  of it, to the first tokens" in without


def panels(page):
    return {panel.id: panel for panel in page.panels}


async def test_page_trace_and_metrics_tell_environments_apart(tmp_path):
    report = await write_turns(tmp_path, WITH_ENVIRONMENT)
    page = make_page(report)
    assert [one.value for one in page.cards if one.name == "turns"] == ["2.00"]
    exported = metrics_text(report).decode()
    assert 'laminar_bottleneck{bottleneck="environment"} 1.0' in exported
    slices = [one for one in json.loads(write_trace(report).read_bytes())["traceEvents"] if one["ph"] == "X"]
    assert {one["args"]["environment_s"] for one in slices if "turns" in one.get("args", {})} == {8.1}


async def test_a_run_without_environments_has_none_in_page_trace_and_metrics(tmp_path):
    report = await write_turns(tmp_path)
    page = make_page(report)
    found = panels(page)
    assert "environment" not in [chart.name for chart in found["latencies"].charts]
    written = write_trace(report).read_bytes()
    assert b"environment_s" not in written
    assert b"in environments" not in written


@slow_in_browser
async def test_a_browser_draws_turns_and_environments_without_complaint(tmp_path):
    report = await write_turns(tmp_path, WITH_ENVIRONMENT)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(write_page(report).as_uri())
        await tab.until("document.querySelectorAll('#curves h3').length === 2")
        assert json.loads(await tab.look(OPTIONS.format("lengths"))) == ["response tokens", "turns of the model"]
        assert "environment" in json.loads(await tab.look(OPTIONS.format("latencies")))
        assert tab.errors == []


@slow_in_browser
async def test_a_browser_offers_no_turns_where_there_are_none(tmp_path):
    report = await write_turns(tmp_path)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(write_page(report).as_uri())
        assert await tab.look("document.querySelector('#lengths select').parentElement.hidden")
        assert tab.errors == []


async def test_emulated_environments_have_no_room_that_could_be_raised(tmp_path):
    found = (await write_turns(tmp_path, WITH_ENVIRONMENT)).diagnosis
    turns = "rollout.engine.turns={count: 8, median_s: 2.0, p95_s: 10.0}"
    config = load_config(REPO / "configs/emulation/paper_7b.yaml", [turns])
    told = [remedy.key for remedy in remedies(Bottleneck.ENVIRONMENT, config, found.mean_step)]
    assert told[0] == "rollout.batch_per_replica"
    assert not {"environment.at_once", "environment.workers"} & set(told)
