"""`laminar launch` as users have it: real runs, a launcher that is killed, and the page in a real browser."""

import io
import json
import os
import shutil
import signal
import subprocess
import time

import msgspec
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from laminar_lab.audit.verify import verify
from laminar_lab.curves import format_mean
from laminar_lab.launcher.experiment import read_experiment
from laminar_lab.launcher.page import format_duration, make_page, write_page
from laminar_lab.launcher.progress import (
    RunProgress,
    RunState,
    describe_progress,
    progress_table,
    read_all_progress,
)
from laminar_py.cli import app
from laminar_py.ledger.run_folder import new_run
from tests.launcher.experiments import (
    LAUNCH,
    make_experiment,
    small_settings,
    start_launcher,
    write_experiment,
)
from tests.launcher.test_loop import write_summary
from tests.report.browser import browsing, slow_in_browser
from tests.report.builders import make_step_row
from tests.runs.runs import PATIENCE_S, REPO, forget_versions

STEPS = 3
VARIANTS = [{"name": "low", "set": {"learner.lr": 1e-4}}, {"name": "high"}]
DRAWN = """JSON.stringify([...document.querySelectorAll('#charts .panel')].map((panel) => [
  panel.querySelector('h2').textContent, panel.querySelectorAll('.scatterlayer path.js-line').length]))"""


def wait_until(process, look):
    """What it finds, once it finds something while the process goes on."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """An experiment of four runs, two at a time, whose launcher was killed once; what a second one was told."""
    folder = tmp_path_factory.mktemp("launch")
    settings = small_settings(folder, steps=STEPS, **{"learner.checkpoint_every": 1, "eval.every_steps": 1})
    file = write_experiment(folder, set=settings, variants=VARIANTS, seeds=2, parallel=2)
    experiment = read_experiment(file)
    launchers = [start_launcher(file)]
    try:
        (first,) = launchers
        wait_until(first, lambda: list(folder.glob("runs/*/metrics.jsonl")))
        runs = psutil.Process(first.pid).children()
        second = subprocess.run([*LAUNCH, str(file)], cwd=REPO, capture_output=True, text=True, check=False)
        first.send_signal(signal.SIGKILL)
        first.wait()
        launchers.append(start_launcher(file))
        assert launchers[1].wait(timeout=PATIENCE_S) == 0, (folder / "launch.out").read_text()
        yield experiment, runs, second
    finally:
        for launcher in launchers:
            launcher.kill()
        for run in experiment.runs:
            forget_versions(run.config.runs / f"{run.name}-1")


@pytest.mark.slow
def test_every_run_ends_exactly_once_though_the_launcher_was_killed(launched):
    experiment, runs, _ = launched
    assert [one.state for one in read_all_progress(experiment)] == [RunState.FINISHED] * 4
    folders = sorted(path.parent.name for path in experiment.folder.glob("runs/*/summary.json"))
    assert folders == sorted(f"{run.name}-1" for run in experiment.runs)
    for run in experiment.runs:
        assert json.loads(run.folder.summary.read_text())["steps"] == STEPS
        assert verify(run.folder.path) == []
    assert not [run for run in runs if run.is_running()], "no run outlives its launcher"


@pytest.mark.slow
def test_a_second_launcher_is_refused_in_one_line(launched):
    _, _, second = launched
    assert second.returncode == 2
    (line,) = second.stderr.strip().splitlines()
    assert "another launcher runs there; wait for it" in line


@pytest.mark.slow
def test_the_same_command_finds_nothing_left_to_run(launched):
    experiment, _, _ = launched
    done = subprocess.run([*LAUNCH, str(experiment.file)], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "4 of 4 runs have finished" in done.stdout
    assert len(list(experiment.folder.glob("runs/*-1"))) == 4


def test_a_dry_run_lists_gpus_variants_and_runs_and_makes_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    gpus = {"cluster.learner_device": "cuda", "max_rl_seconds": 60.0}
    file = write_experiment(tmp_path, set=gpus, variants=VARIANTS, seeds=2)
    told = CliRunner().invoke(app, ["launch", str(file), "--dry-run"]).stdout
    assert "4 runs of 2 variants, 2 at a time on this machine (GPU 4 and GPU 5)" in told
    assert "learner.lr=0.0001" in told
    assert [line.split()[:2] for line in told.splitlines() if "low-s" in line] == [
        ["low-s0", "waiting"],
        ["low-s1", "waiting"],
    ]
    assert "data was prepared by experiments/quickstart/prepare.py" in told
    assert not (tmp_path / "runs").exists()


def test_the_table_and_the_lines_show_text_of_runs_as_text(tmp_path):
    experiment = make_experiment(tmp_path, set={"steps": 10}, seeds=2)
    row = make_step_row(5, 10.0, trained_tokens=5000)
    one = RunProgress(run=experiment.runs[0], state=RunState.RUNNING, row=row, stepped_s=time.time() - 720)
    failed = RunProgress(run=experiment.runs[1], state=RunState.FAILED, reason="[red]no[/red]\x1b[2J")
    out = io.StringIO()
    Console(file=out, width=120).print(progress_table(experiment, [one, failed]))
    assert [line.split()[:3] for line in out.getvalue().splitlines()[1:]] == [
        ["base-s0", "running", "5/10"],
        ["base-s1", "failed", "0/10"],
    ]
    assert "500" in out.getvalue(), "tokens a second"
    assert "[red]no[/red]\\x1b[2J" in out.getvalue()
    line = describe_progress(one, "heldout")
    assert line.startswith("running; step 5/10; reward ")
    assert line.endswith("; no step for 12 min")


@pytest.mark.parametrize(
    ("seconds", "text"), [(50, "50 s"), (61, "1 min 1 s"), (600, "10 min"), (3600 * 3 + 20 * 60, "3 h 20 min")]
)
def test_a_duration_is_in_units_that_suit(seconds, text):
    assert format_duration(seconds) == text


@slow_in_browser
@pytest.mark.parametrize("dark", [False, True])
async def test_the_page_has_a_curve_of_every_variant_and_asks_no_network(launched, tmp_path, dark):
    experiment, _, _ = launched
    async with browsing(tmp_path / "profile") as tab:
        await look_at(tab, experiment.report, dark=dark)
        drawn = dict(json.loads(await tab.look(DRAWN)))
        assert set(drawn) == {
            *(f"heldout over {x}" for x in ("process-hours of RL", "trained tokens", "step")),
            *("Reward", "Response length, p50", "Response length, p95", "Staleness", "Throughput"),
        }
        assert set(drawn.values()) == {2 * 3}, "mean, low and high of two variants"
        text = await tab.look("document.body.textContent")
        for word in ("e-low-s0", "e-high-s1", "learner.lr", "0.0001", "p99", "process-hours", "± "):
            assert word in text
        assert await tab.look("document.documentElement.scrollWidth <= innerWidth")
        assert tab.errors == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:", "blob:"))] == []


@slow_in_browser
async def test_what_a_run_said_is_text_on_the_page_whatever_it_is(tmp_path):
    experiment = make_experiment(tmp_path / "e")
    words = "</script><img src=x onerror=alert(1)>\x1b[31m"
    (run,) = experiment.runs
    run.log.parent.mkdir()
    run.log.write_text(f"laminar: {words}\n")
    async with browsing(tmp_path / "profile") as tab:
        await look_at(tab, write_page(experiment, read_all_progress(experiment)))
        shown = words.replace("\x1b", "\\x1b")
        assert shown in await tab.look("document.getElementById('first').textContent")
        assert await tab.look("document.querySelectorAll('img').length") == 0
        assert tab.errors == []


async def look_at(tab, page, *, dark=False):
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    await tab.do("Emulation.setEmulatedMedia", features=scheme)
    await tab.do("Page.navigate", url=page.as_uri())
    await tab.until("window.laminar !== undefined")


def test_a_page_can_be_drawn_before_any_run_and_of_runs_that_failed(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    experiment = make_experiment(tmp_path, seeds=2)
    experiment.runs[0].log.parent.mkdir()
    experiment.runs[0].log.write_text("laminar: x=1: no; mend it\n")
    told = CliRunner().invoke(app, ["launch", str(tmp_path), "--report"]).stdout
    assert "failed" in told
    assert "x=1: no; mend it" in experiment.report.read_text()


def test_a_run_that_cannot_be_read_is_a_row_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    experiment = make_experiment(tmp_path, seeds=3)
    torn, other, _ = (new_run(run.config) for run in experiment.runs)
    torn.ledger.write_text("no ledger")
    other.metrics.write_text('{"step": "one"}\n')
    done = CliRunner().invoke(app, ["launch", str(tmp_path), "--report"])
    assert done.exit_code == 0, done.output
    page = make_page(experiment, read_all_progress(experiment))
    (sheet,) = [one for one in page.first if one.title == "Runs that no figure counts"]
    assert [row[0] for row in sheet.rows] == ["e-base-s0", "e-base-s1"]
    assert "not a ledger" in sheet.rows[0][1] or "cannot be read" in sheet.rows[0][1]
    assert "metrics.jsonl: line 1" in sheet.rows[1][1]
    assert [row[-1] for row in page.last[-1].rows] == ["not counted", "not counted", "unfinished"]


def test_figures_are_of_finished_seeds_alone_once_there_is_one_and_say_of_how_many(tmp_path):
    experiment = make_experiment(tmp_path, seeds=3)
    for run, reward in zip(experiment.runs, (0.5, 0.9), strict=False):
        row = msgspec.structs.replace(make_step_row(5, 10.0, trained_tokens=5000), reward=reward)
        new_run(run.config).metrics.write_bytes(msgspec.json.encode(row) + b"\n")

    def drawn():
        page = make_page(experiment, read_all_progress(experiment))
        return page.counted, [row[4] for row in page.first[-1].rows]

    assert drawn() == (["2 of 3 seeds, not finished"], [format_mean([0.5, 0.9])])
    write_summary(tmp_path / "runs/e-base-s0-1")
    assert drawn() == (["1 of 3 seeds"], [format_mean([0.5])])


def test_a_page_never_mixes_runs_of_other_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    for run in make_experiment(tmp_path, set={"learner.lr": 1e-3}, seeds=1).runs:
        row = make_step_row(5, 10.0, trained_tokens=5000)
        new_run(run.config).metrics.write_bytes(msgspec.json.encode(row) + b"\n")
    changed = make_experiment(tmp_path, set={"learner.lr": 2e-3}, seeds=2)
    new_run(changed.runs[1].config)
    done = CliRunner().invoke(app, ["launch", str(tmp_path), "--report"])
    assert done.exit_code == 0, done.output
    page = make_page(changed, read_all_progress(changed))
    (sheet,) = [one for one in page.first if one.title == "Runs that no figure counts"]
    assert sheet.rows == [["e-base-s0", f"learner.lr=0.002: {tmp_path}/runs/e-base-s0-1 was made with 0.001"]]
    assert [row[-1] for row in page.last[-1].rows] == ["not counted", "unfinished"]
    assert all(band.x == [] for chart in page.charts for band in chart.bands), "no point of it is drawn"


@pytest.mark.slow
def test_ctrl_c_stops_runs_with_a_checkpoint_and_the_same_command_goes_on(tmp_path):
    settings = small_settings(tmp_path, steps=10_000)
    file = write_experiment(tmp_path, set=settings)
    launcher = start_launcher(file)
    try:
        wait_until(launcher, lambda: list(tmp_path.glob("runs/*/metrics.jsonl")))
        os.kill(launcher.pid, signal.SIGINT)
        assert launcher.wait(timeout=PATIENCE_S) == 130
    finally:
        launcher.kill()
        for run in tmp_path.glob("runs/*-1"):
            forget_versions(run)
    told = (tmp_path / "launch.out").read_text()
    assert f"stopped; continue with: laminar launch {file}" in told
    assert read_all_progress(read_experiment(file))[0].state is RunState.UNFINISHED
    assert list(tmp_path.glob("runs/*/checkpoints/*"))


def test_a_mistake_in_the_file_is_one_line_and_starts_nothing(tmp_path):
    file = write_experiment(tmp_path, grid={"learner.lrr": [1]})
    done = subprocess.run([*LAUNCH, str(file)], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "laminar: variant lrr-1: learner.lrr=1: unknown key; did you mean learner.lr? docs/config.md lists"
        " all settings\n"
    )
    assert not (tmp_path / "runs").exists()
    shutil.rmtree(tmp_path)
