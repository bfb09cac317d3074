"""A run of many replicas that is stopped and resumed: what was in flight is shared by all that start."""

import json
import signal
from collections import Counter
from contextlib import suppress

import pytest

from laminar_lab.audit.queries import Filters, listing
from laminar_lab.audit.verify import verify
from laminar_py.config.section import ConfigError
from laminar_py.ledger.database import reading
from laminar_py.records.trajectory import Status
from tests.runs.runs import REPO, TrainProcess, journaled
from tests.runs.test_emulated_run import CONFIG

REPLICAS, BATCH, GROUP, VERSIONS = 16, 8, 2, 4
SETTINGS = (
    "steps=10000",
    f"rollout.replicas={REPLICAS}",
    f"rollout.batch_per_replica={BATCH}",
    f"rollout.max_batch={BATCH}",
    f"rollout.group_size={GROUP}",
    "rollout.prompts_per_step=16",  # a quarter of what the replicas have at once
    "rollout.max_len=1424",
    "rollout.sampling.max_new_tokens=1024",
    "rollout.partial_interval_s=0.5",
    "repack.planner=none",
    "relay.nodes=1",
    "rollout.engine.learner_devices=1",
    "rollout.engine.median_tokens=100",
    "rollout.engine.compression=3",
)


@pytest.fixture
def profile(tmp_path):
    """Times of a GPU whose learner is quick, so that weights change several times in a response."""
    text = (REPO / "configs/emulation/h100_7b.yaml").read_text()
    for slow, quick in (("optimizer_s: 2.0", "optimizer_s: 0.1"), ("per_s: 8675", "per_s: 1000000")):
        assert slow in text
        text = text.replace(slow, quick)
    (tmp_path / "quick.yaml").write_text(text)
    return tmp_path / "quick.yaml"


def rows(run, query, *values):
    """None while there is no ledger."""
    with suppress(ConfigError), reading(run) as connection:
        return connection.execute(query, values).fetchall()


def is_at_many_versions(run):
    running = {id for (id,) in rows(run, "SELECT id FROM trajectory WHERE status = 'running'") or []}
    versions = [versions for id, versions in journaled(run).items() if id in running]
    return len(set().union(*versions)) >= VERSIONS


def first_up(run, seq):
    """Number of the event since then with which the first replica is up; None before that."""
    up = "SELECT min(seq) FROM event WHERE seq > ? AND kind = 'partstarted' AND subject LIKE 'replica-%'"
    return rows(run, up, seq)[0][0]


def assigned(run, begin, end):
    """Trajectories and their replicas in the order in which they were handed out between these events."""
    query = "SELECT body FROM event WHERE seq BETWEEN ? AND ? AND kind = 'assigned' ORDER BY seq"
    events = [json.loads(body) for (body,) in rows(run, query, begin, end)]
    return [(event["trajectory_id"], event["replica"]) for event in events]


def test_trajectories_of_a_stopped_run_are_shared_by_all_replicas_that_start(tmp_path, profile):
    chosen = (*SETTINGS, f"rollout.engine.profile={profile}")
    with TrainProcess(tmp_path, *chosen, small=(), config=CONFIG) as train:
        train.wait_until(lambda: is_at_many_versions(train.run))
        train.send(signal.SIGINT)
        train.end_with(130)
    left = {row.id: row.newest_version for row in listing(train.run, Filters(status=Status.INTERRUPTED))}
    assert len(set(left.values())) >= VERSIONS
    ((end,),) = rows(train.run, "SELECT seq FROM head")
    with TrainProcess(tmp_path, *chosen, small=(), resume=True, config=CONFIG) as again:
        up = again.wait_until(lambda: first_up(again.run, end))
    given = assigned(again.run, end, up)
    load = Counter(replica for _, replica in given)
    assert len(given) >= len(left) // 2, "most are handed out before a replica is up"
    assert len(load) >= min(REPLICAS, len(given) // GROUP), "all that start have a share"
    assert max(load.values()) <= BATCH
    versions = [left[name] for name, _ in given]
    assert versions == sorted(versions), "oldest first"
    assert verify(again.run) == []
