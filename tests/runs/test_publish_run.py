"""A whole run whose learner has two ranks, on one host or two: both publish, also after one was killed."""

import os
import signal
import sys

import pytest

from laminar_py.cli import main
from laminar_py.runtime.cluster import placement
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import ALONE, TrainProcess, assert_laws
from tests.runs.test_mixture_run import make_mixture
from tests.runs.test_train import starts_of

NO_SETS = ("eval.sets={}", "eval.every_steps=null")


@pytest.mark.slow
@pytest.mark.parametrize("mixture", [False, True])
def test_two_ranks_publish_what_engines_and_probes_agree_with(tmp_path, mixture):
    """Alarms compare the engine's digests, and its probes with the learner's (law 13); each would stop the run."""
    model = [f"model.path={make_mixture(tmp_path / 'data')}"] if mixture else []
    with TrainProcess(tmp_path, *ALONE, *NO_SETS, *model, "learner.world_size=2", "steps=6") as train:
        if not mixture:
            train.wait_for_step(2)
            os.kill(starts_of(train.run)["learner-1"][-1], signal.SIGKILL)
        output = train.end_with(0)
    assert ("goes back to step" in output) is not mixture
    assert_laws(train.run)


def train_on_two_nodes() -> None:
    """Is `laminar` with a rank on each node, as where one node has too few GPUs."""

    def place_ranks(room: placement._FreeGpus, count: int, *, beside=()) -> list[placement.NodeSlot]:
        nodes = sorted(room._nodes, key=lambda node: not node.here)
        return [placement.NodeSlot(node.id, 0) for node in nodes[:count]]

    placement._FreeGpus.place_ranks = place_ranks
    main()


@pytest.mark.slow
def test_two_ranks_on_two_hosts_publish_what_engines_and_probes_agree_with(tmp_path):
    laminar = (sys.executable, "-c", f"from {__name__} import train_on_two_nodes as run; run()")
    with FakeCluster(0, 0) as cluster:
        settings = (*NO_SETS, "rollout.replicas=1", "learner.world_size=2", f"cluster.address={cluster.address}")
        with TrainProcess(tmp_path, *settings, "steps=6", laminar=laminar) as train:
            train.wait_for_step(2)
            os.kill(starts_of(train.run)["learner-1"][-1], signal.SIGKILL)
            output = train.end_with(0)
    assert "goes back to step" in output
    log = (train.run / "logs" / "learner-1.log").read_text()
    assert "sends its rows" in log
    assert_laws(train.run)
