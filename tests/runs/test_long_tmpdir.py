"""A TMPDIR of 150 characters, usual on Slurm: no Unix socket fits in it, and runs start nevertheless."""

import os
import subprocess
import sys

import pytest

from laminar_lab.audit.verify import verify
from laminar_py.runtime.cluster.forked import SHARED
from tests.runs.fake_cluster import FakeCluster
from tests.runs.runs import ALONE, REPO, TrainProcess

LONGEST = 107  # bytes of a Unix socket's path
RAYS_LONGEST = "session_2026-11-29_23-59-59_123456_4194304/sockets/plasma_store.4"
RAY_FOLDER = """
import laminar_py.runtime.cluster.variables
from ray._common.utils import get_default_ray_temp_dir
print(get_default_ray_temp_dir())
"""
RAY_CLUSTER = """
from laminar_py.runtime.cluster.backend import nodes
from tests.runs.fake_cluster import FakeCluster, joined
with joined(FakeCluster(0)):
    print(len(nodes()))
"""


@pytest.fixture
def tmpdir(tmp_path):
    """A folder for temporary files whose path has 150 characters."""
    folder = tmp_path / ("x" * (149 - len(str(tmp_path))))
    folder.mkdir()
    assert len(str(folder)) == 150
    return folder


def output_of(code, tmpdir):
    """What a process prints that has this TMPDIR."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_TMPDIR"}
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPO,
        env=environment | {"TMPDIR": str(tmpdir)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize("length", [36, 37, 150])
def test_rays_sockets_fit_whatever_the_length_of_tmpdir(tmp_path, length):
    folder = "/tmp/".ljust(length, "x")
    ray = output_of(RAY_FOLDER, folder)
    assert ray == f"{folder if length <= 36 else '/tmp'}/ray"
    assert len(f"{ray}/{RAYS_LONGEST}") <= LONGEST


@pytest.mark.slow
def test_a_ray_cluster_starts_and_is_joined(tmpdir):
    assert output_of(RAY_CLUSTER, tmpdir) == "1"


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["alone", "ray"])
def test_a_run_trains_to_its_end(tmp_path, tmpdir, monkeypatch, cluster):
    monkeypatch.delenv(SHARED)  # so that the run alone has a fork server of its own
    if cluster == "alone":
        trains(tmp_path, tmpdir, monkeypatch)
    else:
        with FakeCluster(0) as ray:
            trains(tmp_path, tmpdir, monkeypatch, f"cluster.address={ray.address}")


def trains(folder, tmpdir, monkeypatch, *settings):
    monkeypatch.setenv("TMPDIR", str(tmpdir))
    with TrainProcess(folder, *ALONE, *settings) as train:
        train.end_with(0)
    assert verify(train.run) == []
    assert not list(tmpdir.glob("laminar-*"))
