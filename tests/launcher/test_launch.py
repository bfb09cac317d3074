"""`laminar launch` as users have it: real runs, a launcher that is killed, and the comparison."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from laminar_lab.audit.verify import verify
from laminar_lab.launcher.experiment import read_experiment
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
from tests.report.builders import make_step_row
from tests.runs.runs import PATIENCE_S, REPO, forget_versions, wait_until

STEPS = 3
VARIANTS = [{"name": "low", "set": {"learner.lr": 1e-4}}, {"name": "high"}]


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
    comparison = done.stdout[done.stdout.index("Sets at ") :]
    assert re.search(r"runs +seeds +heldout +0 +1", comparison)
    for name in ("low", "high"):
        assert re.search(rf"\n{name} +2 +\d\.\d+ ± .*●", comparison)
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


def test_a_report_names_the_reason_of_a_failure_before_any_run_has_finished(tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    experiment = make_experiment(tmp_path, seeds=3)
    experiment.runs[0].log.parent.mkdir()
    experiment.runs[0].log.write_text("laminar: x=1: no; mend it\n")
    new_run(experiment.runs[1].config).ledger.write_text("no ledger")
    done = CliRunner().invoke(app, ["launch", str(tmp_path), "--report"])
    assert done.exit_code == 0, done.output
    assert "x=1: no; mend it" in done.stdout
    assert "0 of 3 runs have finished" in done.stdout


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
