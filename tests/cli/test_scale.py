"""`laminar scale` against a controller that is a test's own: what it says, and how it ends."""

import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from laminar_py.cli import main
from laminar_py.config.loading import load_config
from laminar_py.ledger.run_folder import RunFolder, new_run
from laminar_py.ledger.scaling import ScaleAnswer, answer_request, read_request
from tests.runs.runs import LAMINAR, REPO


@pytest.fixture
def run(tmp_path):
    config = load_config(REPO / "configs/quickstart.yaml", [f"runs={tmp_path}", "rollout.replicas=2"])
    return new_run(config)


@contextmanager
def asking(run: RunFolder, *fleet):
    """The command, and the request that it makes."""
    command = [LAMINAR, "scale", str(run.path), *fleet]
    with subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as asked:
        while (request := read_request(run.path)) is None:
            assert asked.poll() is None, asked.stderr.read()
            time.sleep(0.05)
        yield asked, request
        asked.kill()


def test_it_says_what_the_controller_answers(run):
    run.lock()
    with asking(run, "replicas=6") as (asked, request):
        assert request.replicas == 6
        answer_request(run.path, request, ScaleAnswer(True, "replicas 2 -> 6: 4 join; 6 have a place"))
        out, _ = asked.communicate(timeout=30)
    assert (asked.returncode, out) == (0, f"{run.path}: replicas 2 -> 6: 4 join; 6 have a place\n")


def test_a_refusal_of_the_controller_is_bad_input(run):
    run.lock()
    with asking(run, "replicas=6") as (asked, request):
        answer_request(run.path, request, ScaleAnswer(False, "replicas=6: no room"))
        _, error = asked.communicate(timeout=30)
    assert (asked.returncode, error) == (2, "laminar: replicas=6: no room\n")


def test_a_controller_that_ends_before_it_answers_is_told(run):
    run.lock()
    with asking(run, "replicas=6") as (asked, _):
        run.unlock()
        _, error = asked.communicate(timeout=30)
    assert asked.returncode == 2
    assert error.startswith(f"laminar: run={run.path}: no controller runs it; resume it by `laminar train")
    assert len(error.splitlines()) == 1


def test_an_evaluation_has_no_fleet_to_change(run):
    run.lock()
    run.source.write_text("{}")
    command = [LAMINAR, "scale", str(run.path), "replicas=6"]
    asked = subprocess.run(command, cwd=REPO, text=True, capture_output=True, check=False, timeout=60)
    assert (asked.returncode, asked.stderr) == (
        2,
        f"laminar: run={run.path}: an evaluation, whose replicas cannot change; name a run of training\n",
    )


@pytest.mark.parametrize(
    ("fleet", "message"),
    [
        ("replicas=many", "replicas=many: not a whole number; write for example replicas=6"),
        ("gpus=3", "gpus=3: neither replicas=N nor urls=[...]"),
    ],
)
def test_a_fleet_that_is_none_is_refused_before_the_controller_reads_it(run, monkeypatch, capsys, fleet, message):
    assert refusal(monkeypatch, capsys, run.path, fleet).startswith(f"laminar: {message}")


def test_a_folder_without_a_run_is_refused(tmp_path, monkeypatch, capsys):
    line = refusal(monkeypatch, capsys, tmp_path, "replicas=2")
    assert line.startswith(f"laminar: run={tmp_path}: no config.yaml in it")


def refusal(monkeypatch, capsys, folder, fleet):
    """The line with which the command ends in this process, with exit code 2."""
    monkeypatch.setattr(sys, "argv", [LAMINAR, "scale", str(folder), fleet])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line
