"""Versions on their way onto the record, with a real ledger; and a learner that hangs while one is completed."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.codec import encode
from laminar_py.records.events import VersionLoaded
from laminar_py.records.metrics import RankPosition
from laminar_py.records.weights import Published
from laminar_py.relay.messages import FileEntry, Manifest
from laminar_py.relay.stored_version import NoRoomError
from laminar_py.runtime.cluster.backend import nodes
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.placement import Needs, Placement
from laminar_py.runtime.orchestrator.versions import Versions
from laminar_py.runtime.workers import learner as learner_link
from laminar_py.runtime.workers.learner import LearnerKeeper
from tests.builders import make_config
from tests.events import relayed
from tests.ledger.runs import begin, open_ledger
from tests.runs.fake_cluster import FakeCluster, joined
from tests.workers.fakes import make_incarnation

PATIENCE_S = 30.0


class Learner:
    """A learner's versions: each is complete once the test says so, or fails with what it says."""

    def __init__(self):
        self._answers = {}
        self.stored = []

    def _answer(self, version):
        return self._answers.setdefault(version, asyncio.get_running_loop().create_future())

    def complete(self, version):
        self._answer(version).set_result(Published(version, f"digest{version}", 10, 0.01))

    def fail(self, version, error):
        self._answer(version).set_exception(error)

    async def completed(self, version):
        return await self._answer(version)

    async def look(self):
        return self.stored


def make_versions(ledger, learner):
    return Versions(make_incarnation(ledger=ledger), completed=learner.completed, stored=learner.look)


@asynccontextmanager
async def recording(ledger, learner):
    """Versions that are being recorded."""
    versions = make_versions(ledger, learner)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        recorder = tasks.create_task(versions.run())
        yield versions
        recorder.cancel()


def stored(version):
    files = (FileEntry("model.safetensors", 10, "0" * 64),)
    return Manifest(version, f"digest{version}", 4096, files)


async def test_versions_go_on_record_in_order_each_once_it_is_complete(tmp_path):
    learner = Learner()
    async with open_ledger(tmp_path) as ledger, recording(ledger, learner) as versions:
        begin(ledger, versions=())
        for step in (0, 1):
            versions.copied(versions.next_number(), step=step, parent=None)
        learner.complete(1)
        await asyncio.sleep(0)
        assert (versions.newest, ledger.newest_published) == (1, -1)
        learner.complete(0)
        await versions.recorded()
        assert ledger.newest_published == 1
    assert verify(tmp_path) == []


async def test_a_version_that_cannot_be_completed_ends_the_run_with_its_reason(tmp_path):
    learner = Learner()
    async with open_ledger(tmp_path) as ledger:
        versions = make_versions(ledger, learner)
        versions.copied(versions.next_number(), step=1, parent=None)
        learner.fail(0, NoRoomError("relay.shm=/dev/shm: too small"))
        with pytest.raises(NoRoomError, match=r"relay\.shm"):
            await versions.run()


async def test_the_death_of_the_learner_over_a_version_is_told_and_its_number_is_gone(tmp_path):
    learner = Learner()
    async with open_ledger(tmp_path) as ledger, recording(ledger, learner) as versions:
        begin(ledger, versions=())
        versions.copied(versions.next_number(), step=1, parent=None)
        learner.fail(0, PartCrashedError("learner-0", "killed"))
        await versions.wait_until_lost()
        await versions.recorded()
        assert ledger.newest_published == -1
        assert versions.next_number() == 1
        versions.start_over()
        assert versions.lost is None


async def test_what_a_dead_learner_left_is_put_on_record_wherever_it_was_seen(tmp_path):
    learner = Learner()
    async with open_ledger(tmp_path) as ledger, recording(ledger, learner) as versions:
        begin(ledger, versions=(0,))
        ledger.append(relayed("relay-1", 1, digest="digest1", first_byte_s=0.1, elapsed_s=0.2))
        ledger.append(VersionLoaded(replica=0, version=2, digest="digest2", elapsed_s=0.1))
        learner.stored = [stored(0), stored(3)]
        await versions.adopt(step=7)
        assert (ledger.newest_published, versions.next_number()) == (3, 4)
        await versions.adopt(step=7)  # nothing is left to adopt
    assert verify(tmp_path) == []


class Stopped:
    """A learner process that stands still when it is asked for a version."""

    def position(self):
        return encode(RankPosition("idle", 45.0, 0, 0))

    def completed(self, version):
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(PATIENCE_S)  # the signal may stop another thread first


async def test_a_learner_that_hangs_while_it_completes_a_version_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(LearnerKeeper, "actor_class", Stopped)
    monkeypatch.setattr(learner_link, "WATCH_S", 0.1)
    config = make_config(learner={"world_size": 2}, supervisor={"heartbeat_timeout_s": 2.0})
    with joined(FakeCluster(0)):
        placement = Placement(Needs(ranks=2, rank_gpus=0, replicas=1, replica_gpus=0), nodes)
        incarnation = make_incarnation(config=config, run=RunFolder(tmp_path), placement=placement)
        learner = LearnerKeeper(incarnation, relays=None, show=print)
        learner.spawn()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(PartCrashedError, match="no answer to position in 2 s"):
                await learner.completed(0)
