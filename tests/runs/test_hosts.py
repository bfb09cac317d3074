"""Runs on hosts with disks of their own: what one stores is read on the others, and lost with its disk."""

import os
import shutil
import signal
import sys
from contextlib import suppress

import pytest

from laminar_lab.audit.queries import Filters, accounting, listing
from laminar_lab.audit.verify import prove
from laminar_py.ledger.database import LedgerError, reading
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.local import is_local
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.trajectory import DropReason
from tests import mounts
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import TrainProcess, forget_versions
from tests.runs.test_emulated_run import CONFIG, SETTINGS
from tests.runs.test_train import starts_of

pytestmark = pytest.mark.slow  # each run starts a Ray cluster of two hosts

SLOW = (
    *SETTINGS,
    "rollout.engine.compression=4",
    "repack.planner=none",
    "rollout.replicas=2",
    "learner.checkpoint_every=2",
    "steps=6",
)
DISK_BYTES = 32 * 2**20
SEVERAL = 6  # of one or two, a group might be dropped for another reason


class HostsRun:
    """A run on two hosts with a replica each; the disk of the second one is small."""

    def __init__(self, tmp_path):
        (tmp_path / "net").mkdir()
        (tmp_path / "disk").mkdir()
        self.small = tmp_path / "disk-1"
        self.small.mkdir()
        try:
            mounts.mount("tmpfs", str(self.small), "tmpfs", data=f"size={DISK_BYTES}")
        except PermissionError as error:
            pytest.skip(f"hosts cannot have disks of their own here: {error}")
        self.cluster = FakeCluster(0, 0, disk=tmp_path / "disk")
        self._tmp_path = tmp_path

    def train(self):
        net, disk = self._tmp_path / "net", self._tmp_path / "disk"
        network = (sys.executable, "-m", "tests.runs.over_network", str(net))
        where = (f"runs_local={disk}", f"cluster.address={self.cluster.address}")
        return TrainProcess(net, *SLOW, *where, config=CONFIG, laminar=network)

    @property
    def run(self):
        return RunFolder(self._tmp_path / "net/small-1")

    @property
    def live(self):
        """Folder of the ledger that the controller writes."""
        return self.run.live_folder(self._tmp_path / "disk")

    def segments_of(self, node):
        place = self.run.local_segments(self._tmp_path / "disk").name
        return segments_in(self.cluster.disk_of(node) / place)

    def starts(self, part):
        return starts_of(self.live).get(part, [])

    def num_waiting(self, node):
        """Trajectories of which a host has something, and that wait for a score or for the learner."""
        query = (
            "SELECT DISTINCT number, segment FROM piece JOIN trajectory ON trajectory = number"
            " WHERE status NOT IN ('consumed', 'dropped')"
        )
        segments = {path.stem for path in self.segments_of(node)}
        try:
            with reading(self.live) as connection:
                return len({number for number, segment in connection.execute(query) if segment in segments})
        except LedgerError:
            return 0  # it is being made

    def assert_whole(self, code, output):
        assert code == 0, output
        assert len((self.run.path / "metrics.jsonl").read_text().splitlines()) == 6, "all steps are made"
        assert not is_local(self.run.segments)
        proof = prove(self.run.path)
        assert proof.violations == []
        assert proof.notes[0].startswith("sealed"), "with what was on both hosts"
        assert accounting(self.run.path).balanced
        assert list(self.small.iterdir()) == [], "it is in the run's folder now"


@pytest.fixture
def hosts(tmp_path):
    made = HostsRun(tmp_path)
    with made.cluster:
        yield made
    mounts.unmount(str(made.small))
    forget_versions(made.run.path)


def events(run, kind):
    with reading(run) as connection:
        return [body for (body,) in connection.execute("SELECT body FROM event WHERE kind = ?", (kind,))]


def lost(run):
    return list(listing(run.path, Filters(reason=DropReason.HOST_LOST)))


def fill(path):
    """Take all room on a disk, to the last page."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(os.sysconf("SC_PAGE_SIZE"))):
            pass


def test_each_host_stores_what_it_made_and_a_store_that_dies_costs_nothing(hosts):
    with hosts.train() as train:
        train.wait_until(lambda: hosts.run.segments.is_symlink() and hosts.segments_of(1) and hosts.segments_of(0))
        labels = [{path.name.split("-")[1] for path in hosts.segments_of(node)} for node in (0, 1)]
        os.kill(train.wait_until(lambda: hosts.starts("store-1"))[-1], signal.SIGKILL)
        code, output = train.finish()
    hosts.assert_whole(code, output)
    assert labels[0].isdisjoint(labels[1])
    assert len(starts_of(hosts.run.path)["store-1"]) == 2
    assert not lost(hosts.run)


def test_what_a_disk_had_that_is_lost_is_dropped_by_name_and_its_prompts_are_issued_anew(hosts):
    with hosts.train() as train:
        train.wait_until(lambda: hosts.run.segments.is_symlink() and hosts.num_waiting(1) >= SEVERAL)
        shutil.rmtree(hosts.small / hosts.run.local_segments(hosts.small.parent / "disk").name)
        code, output = train.finish()
    hosts.assert_whole(code, output)
    assert lost(hosts.run)


def test_a_replica_on_a_full_disk_ends_others_go_on_and_it_comes_back_when_there_is_room(hosts):
    filler = hosts.small / "filler"
    with hosts.train() as train:
        train.wait_until(lambda: hosts.run.segments.is_symlink() and hosts.segments_of(1))
        fill(filler)
        (part,) = {"-".join(path.name.split("-")[:2]) for path in hosts.segments_of(1)}
        starts = len(train.wait_until(lambda: hosts.starts(part)))
        train.wait_until(lambda: any("StoreFullError" in body for body in events(hosts.live, "partcrashed")))
        filler.unlink()
        train.wait_until(lambda: len(hosts.starts(part)) > starts)
        code, output = train.finish()
    hosts.assert_whole(code, output)
    assert '"restarts": {}' in hosts.run.summary.read_text(), "a full disk is no death that counts"
    assert not lost(hosts.run)
