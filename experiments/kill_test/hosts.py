"""The kill test on several hosts: a host ends for good too.

`make kill-test-hosts [ARGS="--kills 12 --seed 0 ..."]` trains a short quickstart on simulated nodes: a Ray cluster
on this machine. Beside replicas, relays, learner, scorers and the controller it ends a host for good. At the end
every law must hold and the accounting close. Otherwise the exit code is 1.
"""

import tempfile
from pathlib import Path

from run import CONTROLLER, Run, kill_and_prove, make_arguments, run_settings

from tests.runs.fake_cluster import FakeCluster

HOSTS = 3
HOST = "host-"
VICTIMS = (
    f"{HOST}{HOSTS - 1}",
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
    """A run on simulated hosts, which all see its folder."""

    def __init__(self, cluster: FakeCluster, folder: Path, settings: list[str]) -> None:
        self._cluster = cluster
        self._dead: set[int] = set()  # hosts
        where = (f"runs={folder}", f"cluster.address={cluster.address}")
        super().__init__(Path("configs/quickstart.yaml"), [*SMALL, *where, *settings], runs=folder)

    def kill(self, victim: str) -> bool:
        """Kill a part, or end a host for good. Return False if there is no such victim."""
        if not victim.startswith(HOST):
            return super().kill(victim)
        host = int(victim.removeprefix(HOST))
        if host in self._dead:
            return False
        self._dead.add(host)
        self._cluster.kill(host)
        return True


def main() -> None:
    """Kill, resume, prove."""
    args = make_arguments(__doc__, victims=VICTIMS, steps=120).parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-test-hosts-") as name, FakeCluster(*[0] * HOSTS) as cluster:
        run = HostsRun(cluster, Path(name), run_settings(args))
        kill_and_prove(run, args, name="kill_test_hosts", judge=lambda run: ([], True))


if __name__ == "__main__":
    main()
