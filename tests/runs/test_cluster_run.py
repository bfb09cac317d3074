"""Whole runs on a Ray cluster of two nodes that they join: embedded engines, real relays, a node that dies."""

import json
import os
from pathlib import Path

import pytest

from laminar_py.ledger.run_folder import RunFolder
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import TrainProcess, assert_laws


def titles(cluster: FakeCluster, node: int) -> list[str]:
    return sorted(title.split(":")[2].split(".")[0] for title in cluster.parts(node).values())


@pytest.mark.slow
def test_a_run_joins_a_cluster_survives_a_node_and_leaves_what_is_left_as_it_was(tmp_path):
    with FakeCluster(0, 0) as cluster:
        settings = ("steps=10", "learner.checkpoint_every=4", f"cluster.address={cluster.address}")
        with TrainProcess(tmp_path, *settings) as train:
            train.wait_for_step(2)
            here, there = titles(cluster, 0), titles(cluster, 1)
            cluster.kill(1)
            train.end_with(0)
        assert not RunFolder(train.run).shm(Path("/dev/shm")).exists()
        cluster.wait_until_empty()
    assert there == ["RelayActor", "ReplicaActor"]
    assert (here.count("RelayActor"), here.count("ReplicaActor")) == (1, 1)
    assert "LearnerActor" in here
    restarts = json.loads((train.run / "summary.json").read_text())["restarts"]
    assert any(part.startswith("replica-") for part in restarts), restarts
    assert_laws(train.run)


def test_a_cluster_that_is_not_there_is_one_line_and_leaves_no_run(tmp_path):
    with TrainProcess(tmp_path, "cluster.address=127.0.0.1:9") as train:
        output = train.end_with(2)
    *slow, line = output.splitlines()  # a slow machine says first what takes so long
    assert line.startswith("laminar: cluster.address=127.0.0.1:9: no Ray cluster to join there"), output
    assert len(slow) <= 1
    assert not os.path.exists(train.run)
