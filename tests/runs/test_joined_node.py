"""A node that Ray adds to a run that waits for one: a replica starts there, and nobody else stops."""

import pytest

from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import TrainProcess, assert_laws
from tests.runs.test_elastic_run import events_of, left, scale, serving
from tests.runs.test_lost_node import SETTINGS, installed  # noqa: F401 - a fixture
from tests.runs.test_train import starts_of


@pytest.mark.slow
def test_a_replica_that_waits_for_a_node_starts_on_one_that_ray_adds(tmp_path, installed):  # noqa: F811
    more = ("rollout.replicas=1", "steps=10000")
    with (
        FakeCluster(1) as cluster,
        TrainProcess(tmp_path, *SETTINGS, *more, f"cluster.address={cluster.address}") as train,
    ):
        train.wait_for_step(1)
        scale(train.run, 2)
        train.wait_until(lambda: len(events_of(train.run, "scaled")) == 2)
        cluster.add(1)
        train.wait_until(lambda: serving(train.run) == {0, 1})
        assert "ray::ReplicaActor" in {title.split(".")[0] for title in cluster.parts(1).values()}
        scale(train.run, 1)
        train.wait_until(lambda: left(train.run))
        train.wait_for_step(len((train.run / "metrics.jsonl").read_bytes().splitlines()) + 1)
        train.process.send_signal(2)
        train.end_with(130)
    assert_laws(train.run)
    assert not events_of(train.run, "partcrashed")
    starts = starts_of(train.run)
    assert {part: len(pids) for part, pids in starts.items() if "re" in part and len(pids) > 1} == {}
