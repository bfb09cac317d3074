"""The kill test on several hosts, each with a disk of its own: stores die and disks are lost too.

`make kill-test-hosts [ARGS="--kills 12 --seed 0 ..."]` trains a short quickstart on simulated nodes: a Ray cluster
on this machine whose nodes see different folders at one path, which takes root or a user namespace. The run's
folder counts as one on NFS. Beside replicas, relays, learner, scorers and the controller it kills the stores of
hosts, deletes the stored tokens of a host, and ends a host for good. At the end every law must hold and the
accounting close: lost trajectories are dropped by name. Otherwise the exit code is 1.
"""

import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from run import CONTROLLER, Run, kill_and_prove, make_arguments, run_settings

from laminar_lab.audit.queries import Filters, listing
from laminar_lab.bench.report import Row
from laminar_py.ledger.database import LEDGER_NAME, reading
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.ledger.segments.writer import segments_in
from laminar_py.records.trajectory import DropReason
from tests.runs.fake_cluster import FakeCluster

HOSTS = 3
DISK, HOST = "disk-", "host-"
VICTIMS = (
    f"{HOST}{HOSTS - 1}",
    *(f"{DISK}{host}" for host in range(HOSTS)),
    *(f"store-{host}" for host in range(HOSTS)),
    *(f"replica-{host}" for host in range(HOSTS)),
    "relay-1",
    "learner-0",
    "scorer-1",
    CONTROLLER,
)
SMALL = (
    "warm_start.steps=20",
    "rollout.replicas=3",
    "rollout.max_batch=64",
    "rollout.batch_per_replica=64",
    "rollout.prompts_per_step=8",
    "rollout.partial_interval_s=0.5",
    "rollout.without_signal=train",
    "reward.workers=3",
    "learner.checkpoint_every=4",
    "eval.sets={}",
    "supervisor.max_restarts=100",
)


class HostsRun(Run):
    """A run on simulated hosts, whose live ledger and segments are on their disks."""

    def __init__(self, cluster: FakeCluster, folder: Path, settings: list[str]) -> None:
        self._cluster = cluster
        self._disk = cluster.disk_of(0)
        self._network = folder / "net"
        self._network.mkdir()
        self._dead: set[int] = set()  # hosts
        where = (f"runs={self._network}", f"runs_local={self._disk}", f"cluster.address={cluster.address}")
        super().__init__(Path("configs/quickstart.yaml"), [*SMALL, *where, *settings], runs=self._network)

    def command(self) -> list[str]:
        """`laminar` for which the run's folder lies on NFS."""
        return [sys.executable, "-m", "tests.runs.over_network", str(self._network)]

    @property
    def ledger(self) -> Path:
        """The live ledger."""
        return RunFolder(self.folder).live_folder(self._disk) / LEDGER_NAME

    def kill(self, victim: str) -> bool:
        """Kill a part, end a host for good, or delete its stored tokens.

        Return False if there is no such victim.
        """
        if victim.startswith(HOST):
            host = int(victim.removeprefix(HOST))
            if host in self._dead:
                return False
            self._dead.add(host)
            self._cluster.kill(host)
            self.kill(f"{DISK}{host}")
            return True
        if not victim.startswith(DISK):
            return super().kill(victim)
        place = RunFolder(self.folder).local_segments(self._disk).name
        folder = self._cluster.disk_of(int(victim.removeprefix(DISK))) / place
        there = bool(segments_in(folder))
        shutil.rmtree(folder, ignore_errors=True)
        return there


def loss_rows(run: HostsRun) -> tuple[list[Row], bool]:
    """Make the rows of the losses on record."""
    dropped = Counter(row.drop_reason for row in listing(run.folder, Filters()) if row.drop_reason)
    with reading(run.folder) as connection:
        named = "SELECT sum(json_array_length(body -> 'trajectory_ids')) FROM event WHERE kind = 'tokenslost'"
        lost = connection.execute(named).fetchone()[0] or 0
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    rows = [
        Row("host_lost", dropped[DropReason.HOST_LOST], "trajectories dropped", reasons),
        Row("tokens_lost", lost, "trajectories", "whose tokens a disk lost, trained on or not"),
    ]
    return rows, True


def main() -> None:
    """Kill, delete, resume, prove."""
    args = make_arguments(__doc__, victims=VICTIMS, steps=120).parse_args()
    if os.geteuid() and "LAMINAR_UNSHARED" not in os.environ:
        os.environ["LAMINAR_UNSHARED"] = "1"
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--mount", sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="kill-test-hosts-") as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        with FakeCluster(*[0] * HOSTS, disk=folder / "disk") as cluster:
            run = HostsRun(cluster, folder, run_settings(args))
            kill_and_prove(run, args, name="kill_test_hosts", judge=loss_rows)


if __name__ == "__main__":
    main()
