"""`report.html` in a real browser: drawn without network or complaint, near and far, whatever is in the run."""

import json
from pathlib import Path

import numpy as np
import pytest

from laminar_lab.report import page
from laminar_lab.report.diagnosis import MEANINGS
from laminar_lab.report.page import write_page
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot
from laminar_lab.report.trace import choose_residences
from laminar_py.config.loading import dump_config, load_config
from laminar_py.records.events import Dropped
from laminar_py.records.trajectory import DropReason
from tests.builders import make_evaluated
from tests.ledger.runs import begin, issue, open_ledger
from tests.report.browser import browsing, needs_browser, slow_in_browser
from tests.report.scripted import CONFIG
from tests.report.synthetic import simulate
from tests.samples.runs import encode, make_model, write_sample

MARKS = """JSON.stringify(Object.fromEntries(
  ['timeline', 'lengths', 'latencies', 'staleness', 'curves', 'learner'].map((id) => {
    const box = document.getElementById(id), size = box.querySelector('svg').getBoundingClientRect();
    const marks = box.querySelectorAll('.bars .point, .heatmaplayer image, .scatterlayer path.js-line').length;
    return [id, [size.width, size.height, marks]];
  })))"""


TEXT = "document.getElementById('{}').textContent"


@pytest.fixture
async def run(tmp_path):
    await simulate(tmp_path / "run", steps=12)
    return tmp_path / "run"


def write_report(run):
    return write_page(RunReport(read_snapshot(run)))


def local_only(tab):
    return [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []


def test_a_critic_has_charts_beside_the_learners(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = [chart.name for chart in page.learner_panel(read_snapshot(run)).charts]
    valued = [row | {"critic": {"value_loss": 0.5, "explained_variance": row["step"] / 100}} for row in rows]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in valued))
    charts = page.learner_panel(read_snapshot(run)).charts
    assert [chart.name for chart in charts[len(names) :]] == [
        "loss of the critic",
        "variance of targets that the critic explains",
    ]
    assert charts[-1].series[0].y == [row["step"] / 100 for row in rows]


TWO_STEPS = "drawChart(byId('two'), { x: 'step', y: '', series: [{ name: 'reward', x: [1, 2], y: [0.1, 0.4] }] })"


@needs_browser
@pytest.mark.parametrize("dark", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_all_panels_are_drawn_without_network_or_complaint(run, tmp_path, dark):
    (run / "config.yaml").write_text(dump_config(load_config(CONFIG, [])))
    binding = RunReport(read_snapshot(run)).diagnosis.binding
    report = write_report(run)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(report.as_uri(), dark=dark)
        await tab.until("document.querySelectorAll('#curves .js-line').length >= 2")
        for panel, (width, height, marks) in json.loads(await tab.look(MARKS)).items():
            assert width > 200, panel
            assert height > 150, panel
            assert marks > 0, panel
        assert await tab.look("document.querySelectorAll('#timeline .bars .point').length") == 12  # steps
        assert await tab.look("document.querySelectorAll('#tokens table').length") == 1
        assert await tab.look("document.querySelectorAll('#learner .js-line').length") == 7
        assert (
            await tab.look("document.querySelector('#config pre').textContent")
            == (run / "config.yaml").read_text()
        )
        assert await tab.look("document.querySelector('#wall .lead').textContent") == binding.bottleneck
        told = await tab.look("document.getElementById('wall').textContent")
        for words in (MEANINGS[binding.bottleneck], binding.evidence):
            assert words in told
        assert await tab.look("document.documentElement.scrollWidth <= innerWidth")
        await tab.look(f"(document.body.append(Object.assign(element('div'), {{ id: 'two' }})), {TWO_STEPS}, 0)")
        ticks = "[...document.querySelectorAll('#two .xtick text')].map((one) => one.textContent).join()"
        assert await tab.look(ticks) == "1,2", "a run of two steps has no step 1.5"
        await tab.screenshot(tmp_path / "report.png")
        assert tab.errors == []
        assert local_only(tab)
    assert (tmp_path / "report.png").stat().st_size > 50_000


async def test_the_timeline_counts_every_trajectory_however_many_there_are(tmp_path, monkeypatch):
    await simulate(tmp_path, replicas=4, slots=256, steps=20)
    monkeypatch.setattr(page, "MOST_CELLS", 400)
    residences = read_snapshot(tmp_path).residences
    heat = page.timeline_panel(read_snapshot(tmp_path)).charts[0].heat
    width = heat.x[1] - heat.x[0]
    assert (len(heat.y), len(heat.x)) == (4, 100)
    assert np.isclose(np.nansum(heat.z) * width, (residences.end_s - residences.start_s).sum(), rtol=1e-2)


async def test_what_is_drawn_is_chosen_the_same_each_time_and_whole(run):
    snapshot = read_snapshot(run)
    drawn, chosen = choose_residences(snapshot, 300)
    again, _ = choose_residences(read_snapshot(run), 300)
    assert 150 < len(drawn) < 450
    assert drawn.trajectory.tolist() == again.trajectory.tolist()
    assert len(drawn) == int(np.isin(snapshot.places(snapshot.residences), np.flatnonzero(chosen)).sum())


@slow_in_browser
async def test_nothing_from_a_run_becomes_markup(tmp_path):
    run, evil = tmp_path / "<img src=x onerror=alert(1)>", "</script><img src=x onerror='window.hit=1'>"
    run.mkdir()
    async with open_ledger(run) as ledger:
        begin(ledger)
        issue(ledger, "g0.0")
        ledger.append(Dropped("g0.0", DropReason.REWARD_FAILED, evil))
        write_sample(ledger, "g1.0", encode(make_model(tmp_path / "model"), evil), prompt=evil, verdict=evil)
    (run / "config.yaml").write_text(dump_config(load_config(CONFIG, [f"model.path={tmp_path / 'model'}"])))
    report = write_report(run)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(report.as_uri())
        assert await tab.look("document.querySelectorAll('img').length") == 0
        assert evil in await tab.look(TEXT.format("texts"))
        assert await tab.look("document.getElementById('name').textContent") == run.name
        assert await tab.look("window.hit") is None
        assert tab.errors == []


INJECT = """(() => {
  const script = document.createElement('script'), link = document.createElement('a');
  script.textContent = 'window.hit = 1';
  document.body.append(script);
  link.setAttribute('onclick', 'window.hit = 2');
  document.body.append(link);
  link.click();
  return window.hit;
})()"""


@slow_in_browser
async def test_the_browser_runs_no_script_but_the_pages_own_and_asks_nobody(run, tmp_path):
    report = write_report(run)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(report.as_uri())
        assert await tab.look("document.querySelectorAll('#curves .js-line').length") >= 2
        assert tab.errors == []
        assert await tab.look(INJECT) is None
        assert await tab.look("fetch('http://127.0.0.1:9/').then(() => 'came', () => 'refused')") == "refused"
        assert any("Content Security Policy" in error for error in tab.errors)
        assert local_only(tab)


@slow_in_browser
async def test_a_run_in_which_nothing_has_happened_has_a_page_too(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=())
    report = write_report(tmp_path)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(report.as_uri())
        assert await tab.look("document.querySelectorAll('.empty').length") >= 5
        assert tab.errors == []


@slow_in_browser
async def test_an_evaluation_before_the_first_step_has_its_curve(tmp_path):
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        ledger.append(make_evaluated(problems=2, length=7))
    report = write_report(tmp_path)
    async with browsing(tmp_path / "profile") as tab:
        await tab.open(report.as_uri())
        await tab.until("document.querySelectorAll('#curves .scatterlayer .point').length === 1")
        assert tab.errors == []


def test_the_page_is_one_file_with_all_that_it_needs():
    web = Path(page.__file__).parent / "web"
    for part in web.iterdir():
        text = part.read_text()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), part.name
        assert "innerHTML" not in text, part.name
