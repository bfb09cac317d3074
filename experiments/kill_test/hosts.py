"""The kill test on several hosts, each with a disk of its own: stores die and disks are lost, too.

`make kill-test-hosts [ARGS="--kills 12 --seed 0 ..."]` trains a short quickstart on simulated nodes: a Ray cluster
on this machine whose nodes see different folders at one path, which takes root or a user namespace. The run's
folder counts as one on NFS. Beside replicas, relays, learner, scorers and the controller it kills the stores of
hosts, deletes all that a host has stored, and ends a host for good. At the end every law holds and the accounting
closes: what was lost is dropped by name. Exit code 1 if it is not so.
"""

import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from run import CONTROLLER, Run, campaign, check, make_parser, proof

from laminar_lab.bench.report import Row, show
from laminar_py.ledger.audit.queries import Filters, accounting, listing
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
        """The live one."""
        return RunFolder(self.folder).live_folder(self._disk) / LEDGER_NAME

    def kill(self, victim: str) -> bool:
        """Kill a part, or a host for good, or delete what one has stored; False if there is nothing of it."""
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


def loss_rows(run: HostsRun) -> list[Row]:
    """What the record says of what was lost."""
    dropped = Counter(row.drop_reason for row in listing(run.folder, Filters()) if row.drop_reason)
    with reading(run.folder) as connection:
        named = "SELECT sum(json_array_length(body -> 'trajectory_ids')) FROM event WHERE kind = 'tokenslost'"
        lost = connection.execute(named).fetchone()[0] or 0
    told = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items()))
    return [
        Row("host_lost", dropped[DropReason.HOST_LOST], "trajectories dropped", told),
        Row(
            "tokens_lost",
            lost,
            "trajectories",
            "told to be gone with a disk, trained on or not",
        ),
    ]


def main() -> None:
    """Kill, delete, resume, prove."""
    args = make_parser(__doc__, victims=VICTIMS, steps=120).parse_args()
    if os.geteuid() and "LAMINAR_UNSHARED" not in os.environ:
        os.environ["LAMINAR_UNSHARED"] = "1"
        os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--mount", sys.executable, *sys.argv])
    with tempfile.TemporaryDirectory(prefix="kill-test-hosts-") as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        with FakeCluster(*[0] * HOSTS, disk=folder / "disk") as cluster:
            run = HostsRun(cluster, folder, [f"seed={args.seed}", f"steps={args.steps}", *args.settings])
            done = campaign(run, args.only, args.kills, args.pause, random.Random(args.seed))
            code = run.finish()
        check(code == 0, "the last incarnation did not finish")
        rows, holds = proof(run, done)
        show("kill_test_hosts", [*rows, *loss_rows(run)], as_json=args.json)
        check(holds and accounting(run.folder).balanced, "see the table")


if __name__ == "__main__":
    main()
