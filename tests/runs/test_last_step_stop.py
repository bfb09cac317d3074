"""A signal in the last step, and the resume of a run that has made its steps: both end, and soon."""

import json
import os
import signal

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.ledger.rows import read_events
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import PartStarted, RunEnded
from laminar_py.runtime.cluster.forked import SHARED
from tests.runs.runs import REPO, TrainProcess
from tests.runs.test_emulated_run import CONFIG, SETTINGS
from tests.runs.test_stops import SLOW_DISK

RUN = (*SETTINGS, "rollout.replicas=2")


@pytest.mark.slow
def test_a_run_that_is_stopped_in_its_last_step_is_finished_and_its_resume_has_nothing_to_do(
    tmp_path, monkeypatch
):
    (tmp_path / "sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{REPO}")
    monkeypatch.delenv(SHARED)  # its own fork server, whose processes see the slow disk
    with TrainProcess(tmp_path, *RUN, "steps=1", config=CONFIG) as train:
        train.wait_until(lambda: list(train.run.glob("checkpoints/step-1-*.tmp")))
        train.send(signal.SIGTERM)
        output = train.end_with(0)
    assert (
        "stopping: waiting for the checkpoint of step 1; a second signal ends at once: step 1 would be" in output
    )
    assert "stopped at step" not in output
    assert json.loads((train.run / "summary.json").read_text())["finished"]
    with TrainProcess(tmp_path, *RUN, "steps=1", config=CONFIG, resume=True) as train:
        output = train.end_with(0)
    assert "has made its 1 step, and nothing is left to do" in output
    with reading(RunFolder(train.run).ledger) as record:
        assert [event.reason for event in read_events(record, RunEnded)] == ["finished", "finished"]
        starts = [event for event in read_events(record, PartStarted) if event.part.startswith("learner")]
    assert len(starts) == 1, "the resume starts no part"
    assert verify(train.run) == []


@pytest.mark.slow
def test_the_resume_of_a_run_whose_last_evaluation_is_left_makes_it_and_draws_nothing(tmp_path):
    settings = ("steps=1", "warm_start.steps=3", "rollout.replicas=1", "relay.nodes=1")
    with TrainProcess(tmp_path, *settings) as train:
        train.wait_for_step(1)
        train.send(signal.SIGTERM)
        output = train.end_with(130)
    assert "stopped at step 1, its last; its evaluation is left; resume with: " in output
    issued = count_training(train.run)
    with TrainProcess(tmp_path, *settings, resume=True) as train:
        output = train.end_with(0)
    assert "has made its 1 step, and only evaluations are left" in output
    assert count_training(train.run) == issued
    evaluations = json.loads((train.run / "summary.json").read_text())["evaluations"]
    assert [one["step"] for one in evaluations] == [0, 1]
    assert verify(train.run) == []


def count_training(run) -> int:
    with reading(RunFolder(run).ledger) as record:
        return record.execute("SELECT count(*) FROM trajectory WHERE kind = 'train'").fetchone()[0]
