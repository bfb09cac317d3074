"""A whole run of emulated replicas and learner: real processes, relays and ledger, and the time of GPUs."""

import json
import os
import signal
import subprocess

import pytest

from laminar_lab.audit.queries import Filters, listing
from laminar_py.records.trajectory import Kind, Status
from tests.runs.runs import LAMINAR, REPO, TrainProcess, assert_laws
from tests.runs.test_train import starts_of

CONFIG = REPO / "configs/emulation/repack.yaml"
SETTINGS = (
    "warm_start=null",  # of the small settings, which are for the quickstart
    "eval.sets={}",
    "steps=4",
    "rollout.replicas=3",
    "rollout.max_batch=8",
    "rollout.batch_per_replica=24",
    "rollout.prompts_per_step=18",
    "rollout.max_len=1424",
    "rollout.sampling.max_new_tokens=1024",
    "rollout.partial_interval_s=0.5",
    "rollout.engine.median_tokens=300",
    "rollout.engine.learner_devices=1",
)


def test_an_emulated_run_repacks_and_keeps_the_laws(tmp_path):
    with TrainProcess(tmp_path, *SETTINGS, config=CONFIG) as train:
        train.wait_for_step(1)
        replicas = [process for process in train.family() if process.name().startswith("replica-")]
        assert len(replicas) == 3
        replicas[0].kill()
        train.end_with(0)
    rows = list(listing(train.run, Filters(status=Status.CONSUMED, kind=Kind.TRAIN)))
    assert len(rows) == 4 * 18 * 4
    assert 16 <= min(row.length for row in rows) < max(row.length for row in rows) == 1024
    assert all(row.oldest_version == row.newest_version for row in rows), "they drain"
    assert max(row.newest_version for row in rows) > 0, "they take new weights"
    first = json.loads((train.run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["learner_s"] >= (2 + first["trained_tokens"] / 8675) / 20, "prompts come on top"
    moved = json.loads((train.run / "summary.json").read_text())["repack"]
    assert moved["running"] + moved["waiting"] > 0, "they repack"
    assert_laws(train.run)


@pytest.mark.slow
def test_relays_that_hang_are_replaced_while_the_run_goes_on(tmp_path):
    hanging = ("relay-0", "relay-2")
    with TrainProcess(
        tmp_path, *SETTINGS, "steps=10000", "supervisor.heartbeat_timeout_s=10", config=CONFIG
    ) as train:
        train.wait_for_step(1)
        for part in hanging:
            os.kill(starts_of(train.run)[part][-1], signal.SIGSTOP)
        train.wait_until(lambda: all(len(starts_of(train.run)[part]) > 1 for part in hanging))
        train.wait_for_step(len((train.run / "metrics.jsonl").read_bytes().splitlines()) + 2)
        train.send(signal.SIGINT)
        train.end_with(130)
    assert_laws(train.run)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("rollout.engine.profile=nowhere.yaml", "rollout.engine.profile=nowhere.yaml: no such file"),
        (
            "rollout.engine.compression=21",
            "rollout.engine.compression=21: input should be less than or equal to 20",
        ),
        ("learner.world_size=2", "learner.world_size=2 cluster.learner_device=None: an emulated learner"),
        ("warm_start.data=w.jsonl", "warm_start.kind=supervised: an emulated learner has no model"),
    ],
)
def test_what_cannot_be_emulated_is_refused_in_one_line(tmp_path, setting, line):
    done = subprocess.run(
        [LAMINAR, "train", str(CONFIG), f"runs={tmp_path}", setting],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"laminar: {line}")
    assert len(done.stderr.strip().splitlines()) == 1
