"""Room for versions: laptop and cluster reckon alike."""

import os

import pytest

from laminar_py.config.section import ConfigError
from laminar_py.runtime.preflight.inputs import (
    MemoryShare,
    check_adapters,
    memory_fault,
    room_fault,
    version_bytes,
)
from tests import mounts
from tests.builders import make_config
from tests.learner.builders import SETTINGS, full_parameters, make_learner, make_model_folder
from tests.runs.runs import quickstart_model
from tests.runs.test_bad_input import in_process

SIZE = 2**20


def run_config(folder, *, deferred=False, keep=2):
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(SIZE)
    evaluation = {"sets": {"t": "t"}, "every_steps": 2, "deferred": deferred}
    return make_config(steps=6, model={"path": str(folder)}, eval=evaluation, relay={"keep_versions": keep})


@pytest.mark.parametrize(
    ("share", "deferred", "versions"),
    [
        (MemoryShare(3, 2, has_root=True), False, 3 * 4 + 2),
        (MemoryShare(3, 2, has_root=True), True, 3 * 4 + 2 + 3),
        (MemoryShare(1, 8, has_root=False), True, 4 + 8),
        (MemoryShare(0, 0, has_root=False), False, 0),
    ],
)
def test_a_host_needs_what_its_relays_keep_take_in_and_pass_on_and_what_is_held(
    tmp_path, share, deferred, versions
):
    config = run_config(tmp_path, deferred=deferred)
    assert memory_fault(config, share, free=versions * SIZE) is None
    if versions:
        fault = memory_fault(config, share, free=versions * SIZE - 1, where=" on node 10.0.0.4")
        assert fault.startswith("relay.shm=/dev/shm: ")
        assert (
            f" needed for {versions} versions (at each of {share.num_relays} relays relay.keep_versions=2, "
            in fault
        )
        assert " on node 10.0.0.4" in fault
        assert fault.endswith("; enlarge it, or lower one of these")


def with_adapters(folder):
    return make_config(model={"path": str(folder)}, learner={"lora": {"rank": 4}})


def test_versions_of_adapters_need_no_more_room_than_is_reckoned_with(tmp_path):
    folder = make_model_folder(tmp_path)
    config = with_adapters(folder)
    learner = make_learner(folder, settings=SETTINGS.model_copy(update={"lora": config.learner.lora}))
    published = sum(tensor.nbytes for tensor in full_parameters(learner).values())
    assert published <= version_bytes(config) <= 2 * published


def test_adapters_of_a_mixture_model_are_refused_before_anything_starts(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 61, "num_experts_per_tok": 2}')
    with pytest.raises(ConfigError, match=r"learner\.lora: the model in model\.path=.* has experts"):
        check_adapters(with_adapters(tmp_path))


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB."""
    folder = tmp_path / "disk-1"  # which the second node of a cluster has for `disk`
    folder.mkdir()
    try:
        mounts.mount("tmpfs", str(folder), "tmpfs", data="size=4m")
    except PermissionError as error:
        pytest.skip(f"no disk can be made here: {error}")
    yield folder
    mounts.unmount(str(folder))


def test_a_disk_without_room_is_told_with_what_is_free_and_what_is_needed(small_disk):
    line = room_fault(small_disk / "deeper" / "runs")
    assert line == (
        f"runs={small_disk}/deeper/runs: 4 MiB are free, and responses are stored there; make room"
        " for 16 MiB at least, or name another folder"
    )


def test_a_run_that_could_store_nothing_is_refused_with_one_line(small_disk, monkeypatch, capsys):
    quickstart_model()
    code, (line,) = in_process(monkeypatch, capsys, f"runs={small_disk}/runs")
    assert code == 2
    assert line.startswith(f"laminar: runs={small_disk}/runs: 4 MiB are free")
    assert list(small_disk.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "fixed").mkdir(mode=0o500)
    assert "cannot be written" in (room_fault(tmp_path / "fixed" / "runs") or "")


def test_where_there_is_room_nothing_is_said(tmp_path):
    assert room_fault(tmp_path / "runs") is None
