"""Whole runs whose replicas die, disks fill and segments are deleted: tokens are kept, or lost by name."""

import os
import resource
import signal

import pytest

from laminar_lab.audit.checks import Rule
from laminar_lab.audit.queries import Filters, accounting, listing
from laminar_lab.audit.verify import verify
from laminar_py.ledger.database import reading
from laminar_py.records.trajectory import DropReason
from tests.runs.runs import TrainProcess, assert_laws, journaled
from tests.runs.test_emulated_run import CONFIG, SETTINGS
from tests.runs.test_lost_node import interrupted
from tests.runs.test_train import starts_of

SLOW = (*SETTINGS, "rollout.engine.compression=4", "repack.planner=none", "learner.checkpoint_every=2")
FEW_BYTES = 4096


def pid_of(train, part):
    """Process of a part, once it has something in its journal."""
    train.wait_until(lambda: len(journaled(train.run)) > 0 and list(train.run.glob(f"segments/{part}-*.journal")))
    return starts_of(train.run)[part][-1]


def assert_whole(run):
    assert_laws(run)


def events(run, kind):
    with reading(run) as connection:
        return [body for (body,) in connection.execute("SELECT body FROM event WHERE kind = ?", (kind,))]


def test_what_a_killed_replica_had_begun_goes_on_where_its_journal_ends(tmp_path):
    with TrainProcess(tmp_path, *SLOW, config=CONFIG) as train:
        os.kill(pid_of(train, "replica-1"), signal.SIGKILL)
        train.end_with(0)
    kept = interrupted(train.run, "replica_crashed")
    assert any(length > 0 for length in kept.values()), "nobody was told of these tokens"
    assert_whole(train.run)
    assert not list(train.run.glob("segments/*.journal"))


@pytest.mark.slow
def test_a_replica_whose_disk_is_full_is_replaced_and_costs_nobody_else(tmp_path):
    with TrainProcess(tmp_path, *SLOW, config=CONFIG) as train:
        resource.prlimit(pid_of(train, "replica-1"), resource.RLIMIT_FSIZE, (FEW_BYTES, FEW_BYTES))
        train.end_with(0)
    assert any("StoreFullError" in body for body in events(train.run, "partcrashed"))
    assert '"restarts": {}' in (train.run / "summary.json").read_text(), "a full disk is no death that counts"
    assert not list(listing(train.run, Filters(reason=DropReason.TOKENS_LOST)))
    assert_whole(train.run)


def delete_segments(run):
    """Delete the segments of replica 1; those that there were."""
    found = list(run.glob("segments/replica-1-*.segment"))
    for path in found:
        path.unlink()
    return found


def lose(run):
    """Delete the segments of replica 1; the trajectories that have lost tokens by now."""
    delete_segments(run)
    return list(listing(run, Filters(reason=DropReason.TOKENS_LOST)))


@pytest.mark.slow
def test_what_lay_in_deleted_segments_is_dropped_by_name_and_its_prompts_are_issued_anew(tmp_path):
    with TrainProcess(tmp_path, *SLOW, config=CONFIG) as train:
        replica = pid_of(train, "replica-1")
        train.wait_until(lambda: delete_segments(train.run))
        os.kill(replica, signal.SIGKILL)  # readers may have had its segment open; the next one is new to them
        train.wait_until(lambda: lose(train.run))
        train.end_with(0)
    assert len((train.run / "metrics.jsonl").read_text().splitlines()) == 4, "all steps are made"
    assert {one.rule for one in verify(train.run)} <= {Rule.SPANS, Rule.ROWS}, "of trajectories that ended before"
    assert accounting(train.run).balanced
