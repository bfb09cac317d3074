"""A real Ray cluster of several nodes on this machine, with GPUs that only Ray's accounting knows."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from laminar_py.runtime.cluster.backend import nodes, open_cluster
from tests import mounts

STORE_BYTES = 80 * 2**20
PATIENCE_S = 60.0
QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


class FakeCluster:
    """A node for each number of GPUs; the first is the head, where the controller runs.

    With `disk` each node has a folder of its own under this path, the head what everybody else sees there. That
    needs leave to mount: without it `PermissionError` is raised.
    """

    def __init__(self, *gpus: int, disk: Path | None = None) -> None:
        from ray.cluster_utils import Cluster  # after our own package, which sets what Ray reads at its import

        self._cluster = Cluster()
        self._disk = disk
        self._nodes = [self._add_node(index, count) for index, count in enumerate(gpus)]

    def _add_node(self, index: int, gpus: int):
        settings = {"include_dashboard": False, "_system_config": QUICK_TO_NOTICE} if index == 0 else {}
        settings |= {"num_cpus": 4, "num_gpus": gpus, "object_store_memory": STORE_BYTES}
        if self._disk is None or index == 0:
            return self._cluster.add_node(**settings)
        folder = self.disk_of(index)
        folder.mkdir(exist_ok=True)
        with seeing(folder, self._disk):
            return self._cluster.add_node(**settings)

    def disk_of(self, node: int) -> Path:
        """What a node sees under the path of its disk."""
        assert self._disk is not None, "nodes have no disks of their own"
        return self._disk.with_name(f"{self._disk.name}-{node}") if node else self._disk

    @property
    def address(self) -> str:
        return self._cluster.address

    def id_of(self, node: int) -> str:
        """Its id in Ray."""
        return self._nodes[node].node_id

    def __enter__(self) -> "FakeCluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self._nodes[0].get_session_dir_path(), ignore_errors=True)

    def parts(self, node: int) -> dict[int, str]:
        """Actor processes on a node, none on a dead one: process id and title, e.g. `ray::RelayActor`."""
        psutil.process_iter.cache_clear()  # whose process may be gone, and its number another's
        raylets = [
            process
            for process in psutil.process_iter(["name", "cmdline"], ad_value=())  # nothing is read of a zombie
            if process.info["name"] == "raylet" and f"--node_id={self.id_of(node)}" in process.info["cmdline"]
        ]
        titles = {}
        for child in [child for raylet in raylets for child in raylet.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                titles[child.pid] = " ".join(child.cmdline()).strip()
        return {pid: title for pid, title in titles.items() if title.startswith("ray::") and "Actor" in title}

    def wait_until_empty(self) -> None:
        """Until no node has an actor any more."""
        deadline = time.monotonic() + PATIENCE_S
        while any(self.parts(node) for node in range(len(self._nodes))):
            assert time.monotonic() < deadline, "actors outlive their run"
            time.sleep(0.1)

    def add(self, gpus: int) -> None:
        """A node joins, with so many GPUs."""
        self._nodes.append(self._cluster.add_node(num_cpus=4, num_gpus=gpus, object_store_memory=STORE_BYTES))

    def kill(self, node: int) -> None:
        """A node dies, with all that runs on it."""
        self._cluster.remove_node(self._nodes[node], allow_graceful=False)


@contextlib.contextmanager
def seeing(folder: Path, place: Path) -> Iterator[None]:
    """This thread, and for good what it starts meanwhile, sees a folder at another place."""
    here = os.getcwd()
    with Path("/proc/thread-self/ns/mnt").open() as before:
        mounts.unshare(mounts.CLONE_NEWNS)
        try:
            mounts.mount("", "/", flags=mounts.MS_REC | mounts.MS_PRIVATE)
            mounts.mount(str(folder), str(place), flags=mounts.MS_BIND)
            yield
        finally:
            mounts.unshare(mounts.CLONE_FS)  # with threads that were begun meanwhile it has one folder to work in
            mounts.enter(before.fileno(), mounts.CLONE_NEWNS)
            os.chdir(here)


@contextlib.contextmanager
def joined(cluster: FakeCluster) -> Iterator[None]:
    """This process is in the cluster."""
    with cluster, open_cluster(cluster.address):
        yield


def wait_for_a_death(alive: int) -> None:
    """Until Ray knows that only so many nodes live; called in the cluster."""
    deadline = time.monotonic() + PATIENCE_S
    while len(nodes()) > alive:
        assert time.monotonic() < deadline, "Ray does not notice the death of a node"
        time.sleep(0.1)
