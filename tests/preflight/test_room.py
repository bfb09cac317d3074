"""A host without room for responses: one line before anything starts, with field, value and remedy."""

import os

import pytest

from laminar_py.config.loading import load_config
from laminar_py.ledger import live
from laminar_py.runtime.cluster.backend import nodes
from laminar_py.runtime.cluster.placement import Needs, Placement
from laminar_py.runtime.preflight.inputs import room_fault, store_field
from laminar_py.runtime.preflight.survey import faults
from laminar_py.sandbox.inside import kernel
from tests.runs.fake_cluster import FakeCluster, joined
from tests.runs.runs import REPO, quickstart_model
from tests.runs.test_bad_input import in_process


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    folder = tmp_path / "disk-1"  # which the second node of a cluster has for `disk`
    folder.mkdir()
    try:
        kernel.mount("tmpfs", str(folder), "tmpfs", data="size=4m")
    except PermissionError as error:
        pytest.skip(f"no disk can be made here: {error}")
    yield folder
    kernel.unmount(str(folder))


def test_a_disk_without_room_is_told_with_what_is_free_and_what_is_needed(small_disk):
    line = room_fault("runs", small_disk / "deeper" / "runs", where=" on node 10.0.0.4")
    assert line == (
        f"runs={small_disk}/deeper/runs: 4 MiB are free on node 10.0.0.4, and responses are stored there; make"
        " room for 16 MiB at least, or name another folder"
    )


async def test_a_host_of_a_cluster_without_room_is_named(small_disk, tmp_path, monkeypatch):
    (tmp_path / "net").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(live, "network_kind", lambda folder: "nfs4" if folder.name == "net" else None)
    quickstart_model()
    with joined(FakeCluster(0, 0, disk=tmp_path / "disk")):
        where = [f"runs={tmp_path}/net", f"runs_local={tmp_path}/disk"]
        config = load_config(REPO / "configs/quickstart.yaml", where)
        (line,) = await faults(config, Placement(Needs.from_config(config), nodes))
    assert line.startswith(
        f"runs_local={tmp_path}/disk: 4 MiB are free, and responses are stored there; make room"
    )
    assert "(on node " in line


def test_a_run_that_could_store_nothing_is_refused_with_one_line(small_disk, monkeypatch, capsys):
    quickstart_model()
    code, (line,) = in_process(monkeypatch, capsys, f"runs={small_disk}/runs")
    assert code == 2
    assert line.startswith(f"laminar: runs={small_disk}/runs: 4 MiB are free")
    assert list(small_disk.iterdir()) == []


def test_over_a_network_it_is_the_own_disk_that_needs_room(small_disk, tmp_path, monkeypatch, capsys):
    quickstart_model()
    (tmp_path / "net").mkdir()
    monkeypatch.setattr(live, "network_kind", lambda folder: "nfs4" if folder.name == "net" else None)
    code, (line,) = in_process(monkeypatch, capsys, f"runs={tmp_path}/net", f"runs_local={small_disk}")
    assert code == 2
    assert line.startswith(f"laminar: runs_local={small_disk}: 4 MiB are free")
    assert list((tmp_path / "net").iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "fixed").mkdir(mode=0o500)
    assert "cannot be written" in (room_fault("runs", tmp_path / "fixed" / "runs") or "")


def test_where_there_is_room_nothing_is_said(tmp_path):
    assert room_fault("runs", tmp_path / "runs") is None
    config = load_config(REPO / "configs/quickstart.yaml", [f"runs={tmp_path}"])
    assert store_field(config) == "runs"
