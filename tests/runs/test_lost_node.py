"""A node dies for good, and with it the only GPU that a replica can have: the run goes on with the other one."""

import os
from contextlib import suppress

import pytest

from laminar_lab.audit.queries import Filters, listing
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import reading
from laminar_py.records.trajectory import DropReason
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import REPO, TrainProcess, assert_laws, journaled
from tests.runs.test_train import starts_of

TOKENS = (25, 300)  # of a response of replica 0, and of replica 1; 20 ms each
BACKEND = f"""
from pathlib import Path

from laminar_lab.emulation.settings import read_profile
from laminar_py.config.engine import Backend, EngineConfig


class GpuEngineConfig(EngineConfig):
    @property
    def gpus(self):
        return 1


async def open_engine(config, launch):
    from laminar_lab.emulation.engine import EmulatedEngine
    from laminar_lab.emulation.responses import Responses
    from laminar_py.engines.model_sizes import read_sizes

    vocab, rollout = read_sizes(launch.model_dir).vocab_size, config.rollout
    engine = EmulatedEngine(
        read_profile(Path("{REPO}/configs/emulation/h100_7b.yaml")).engine,
        Responses(vocab, max_len=rollout.max_len, median={TOKENS}[launch.index], sigma=0.0),
        vocab=vocab,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=rollout.kv_tokens,
        delta_interval_s=0.1,
    )
    await engine.start()
    return engine


ON_A_GPU = Backend(settings=GpuEngineConfig, open=open_engine)
"""
SETTINGS = (
    "rollout.engine.kind=on_a_gpu",
    "cluster.learner_device=cpu",
    "warm_start=null",
    "model.from_scratch=true",
    "eval.sets={}",
    "steps=8",
    "rollout.replicas=2",
    "rollout.max_batch=8",
    "rollout.batch_per_replica=8",
    "rollout.prompts_per_step=2",  # the batch of one replica
    f"rollout.sampling.max_new_tokens={max(TOKENS)}",
    "rollout.partial_interval_s=0.1",
    "learner.checkpoint_every=100",
    "alarms.probes=off",  # its tokens are of no model
    "alarms.sampling=off",
    "repack.planner=none",  # what moved to the node that is lost has its beginning on the other
)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A backend whose engines have a GPU each, of those that only Ray's accounting knows."""
    folder = tmp_path / "installed"
    info = folder / "on_a_gpu-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "on_a_gpu.py").write_text(BACKEND)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: on-a-gpu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[laminar_py.backends]\non_a_gpu = on_a_gpu:ON_A_GPU\n")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def num_behind(run):
    """How many responses replica 1 is in the midst of under a version that replica 0 has left."""
    begun = "SELECT id FROM trajectory WHERE status = 'running' AND replica = 1"
    loaded = "SELECT max(body ->> 'version') FROM event WHERE kind = 'versionloaded' AND body ->> 'replica' = 0"
    with suppress(ConfigError), reading(run) as connection:
        running = {id for (id,) in connection.execute(begun)}
        (newest,) = connection.execute(loaded).fetchone()
        return sum(id in running and max(versions) < newest for id, versions in journaled(run).items())


def interrupted(run, reason):
    """Length on record of each trajectory that was interrupted for this reason."""
    query = "SELECT body ->> 'trajectory_id', body ->> 'length' FROM event WHERE kind = 'interrupted'"
    with reading(run) as connection:
        return dict(connection.execute(f"{query} AND body ->> 'reason' = ?", (reason,)))


def lose_node(tmp_path):
    """A run of which a node dies for good in the midst of responses of a version that no other replica serves."""
    with (
        FakeCluster(1, 1) as cluster,
        TrainProcess(tmp_path, *SETTINGS, f"cluster.address={cluster.address}") as train,
    ):
        train.wait_until(lambda: num_behind(train.run))
        cluster.kill(1)
        train.end_with(0)
    assert len((train.run / "metrics.jsonl").read_text().splitlines()) == 8
    assert len(starts_of(train.run)["replica-1"]) == 1
    assert_laws(train.run)
    return train.run


def lost_by(run, reason):
    return {row.replica for row in listing(run, Filters(reason=reason))}


@pytest.mark.slow
def test_a_run_goes_on_without_a_node_and_drops_what_only_that_could_end(tmp_path, installed):
    run = lose_node(tmp_path)
    kept = interrupted(run, "replica_crashed")
    assert any(kept.values()), "the other host sees its journals, in the folder that they share"
    assert lost_by(run, DropReason.VERSION_LOST) == {1}
    assert not lost_by(run, DropReason.TOKENS_LOST)
