"""`laminar train --resume`: which run resumes, with which settings, and which changes of the file it names."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laminar_py.cli import app
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import new_run, run_at
from laminar_py.runtime.orchestrator import launch
from laminar_py.runtime.orchestrator.resume import record_overrides

SETTINGS = {
    "name": "mine",
    "steps": 60,
    "model": {"path": "mine/model"},
    "data": {"train": "mine/train.jsonl"},
    "reward": {"use": ["math"]},
}


@pytest.fixture
def resumed(tmp_path, monkeypatch):
    """Two runs `mine`, and what a resume of them has launched: the run and its config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(json.dumps(SETTINGS))
    for _ in range(2):
        new_run(load_config(tmp_path / "mine.yaml", []))
    begun = []

    def stop(config, *, resume, overrides, console):
        begun.append((resume and str(resume.path), config))
        raise ConfigError("enough")

    monkeypatch.setattr(launch, "launch", stop)
    return begun


def train(*arguments):
    """What is printed before anything starts, in one line."""
    done = CliRunner().invoke(app, ["train", "mine.yaml", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert len(done.output.splitlines()) <= 1
    return done.output.strip(), str(done.exception)


def test_a_resume_without_edits_says_nothing(resumed):
    assert train("--resume", "learner.lr=1e-3") == ("", "enough")
    ((run, config),) = resumed
    assert (run, config.learner.lr) == ("runs/mine-2", 1e-3)


def test_a_resume_says_what_does_not_count_of_an_edited_file(resumed, tmp_path):
    edited = SETTINGS | {"steps": 126, "learner": {"lr": 1e-4, "checkpoint_every": 3}, "eval": {"every_steps": 7}}
    (tmp_path / "mine.yaml").write_text(json.dumps(edited))
    told, _ = train("--resume", "learner.lr=1e-3")
    begin = "runs/mine-2 resumes with its own settings; it ignores these changes in mine.yaml:"
    assert told.startswith(f"{begin} steps 60 -> 126, learner.checkpoint_every ")
    assert told.endswith("; add them as key=value, or start a new run")
    again = ["steps=126", "learner.checkpoint_every=3", "eval.every_steps=7"]
    assert train("--resume", "learner.lr=1e-3", *again) == ("", "enough")
    assert [config.steps for _, config in resumed] == [60, 126]


def test_overrides_of_a_resume_stay_in_the_runs_config(resumed):
    run = run_at(Path("runs/mine-2"))
    record_overrides(run, ["steps=80", "repack.planner=none"])
    told, _ = train("--resume")
    ((_, config),) = resumed
    assert "steps 80 -> 60" in told, "the file has the settings of before"
    assert (config.steps, config.repack.planner) == (80, "none")


def test_a_resume_of_a_run_that_is_named_takes_that(resumed):
    assert train("--resume", "--run", "runs/mine-1") == ("", "enough")
    assert [run for run, _ in resumed] == ["runs/mine-1"]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--run", "runs/mine-1"], "--run=runs/mine-1: names a run to resume; add --resume, or"),
        (["--resume", "--run", "runs"], "run=runs: no config.yaml in it; name a run's folder"),
    ],
)
def test_what_names_no_run_to_go_on_with_is_refused(resumed, arguments, fault):
    told, error = train(*arguments)
    assert (told, error[: len(fault)], resumed) == ("", fault, [])


def test_a_resume_does_not_list_what_only_its_own_override_moved(resumed):
    """`rollout.batch_per_replica` follows from the size of a step, and the user changed the step alone."""
    recorded = load_config(Path("runs/mine-2/config.yaml"), []).rollout.batch_per_replica
    assert load_config(Path("mine.yaml"), ["rollout.prompts_per_step=2"]).rollout.batch_per_replica != recorded
    assert train("--resume", "rollout.prompts_per_step=2") == ("", "enough")
