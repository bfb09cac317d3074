"""A checkpoint continues bit by bit, or is refused; steps go on while it is written."""

import multiprocessing
import os
import resource
import time
from pathlib import Path

import pytest
import torch

from laminar_py.learner.checkpoint import Checkpointer
from laminar_py.learner.marker import MARKER, read_marker
from laminar_py.runtime.cluster.errors import why_unwritable
from tests.learner.builders import full_parameters, make_learner, make_model_folder, make_sequences, pack
from tests.learner.ranks import FORKSERVER, prepared

WIDE = 20_000  # words: what a child saves takes a while to write
PATIENCE_S = 120


def batch(seed: int):
    return [pack(make_sequences(seed=seed), num_total=6)]


def assert_equal(some, others):
    assert all(torch.equal(tensor, others[name]) for name, tensor in some.items())


def test_resumed_steps_are_bit_identical(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    for seed in range(3):
        learner.step(batch(seed))
    learner.save(tmp_path / "step-3")
    random_after = torch.rand(4)
    expected = learner.step(batch(3))
    resumed = make_learner(model_folder)
    resumed.load(tmp_path / "step-3")
    assert torch.equal(torch.rand(4), random_after)
    assert resumed.steps_taken == 3
    metrics = resumed.step(batch(3))
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    assert_equal(full_parameters(learner), full_parameters(resumed))


def test_saving_changes_nothing_even_before_the_first_step(model_folder: Path, tmp_path: Path):
    saves, plain = make_learner(model_folder), make_learner(model_folder)
    saves.save(tmp_path / "step-0")
    for learner in (saves, plain):
        learner.step(batch(0))
    assert_equal(full_parameters(saves), full_parameters(plain))


def test_steps_that_go_on_meanwhile_are_not_in_it(model_folder: Path, tmp_path: Path, monkeypatch):
    learner, write = make_learner(model_folder), Checkpointer._write
    going_on = multiprocessing.Event()

    def late(*arguments):
        assert going_on.wait(PATIENCE_S)
        write(*arguments)

    monkeypatch.setattr(Checkpointer, "_write", late)
    for step in range(2):  # the second copy goes into the pages of the first
        learner.step(batch(step))
        saved = full_parameters(learner)
        learner.begin_save(tmp_path / f"step-{step}")
        learner.step(batch(step + 2))
        assert not (tmp_path / f"step-{step}").exists()
        going_on.set()
        learner.finish_save()
        going_on.clear()
        resumed = make_learner(model_folder)
        resumed.load(tmp_path / f"step-{step}")
        assert_equal(full_parameters(resumed), saved)


def test_a_checkpoint_without_its_marker_is_refused(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "torn")
    (tmp_path / "torn" / MARKER).unlink()
    with pytest.raises(ValueError, match=r"torn: half written or damaged \(has no complete.json\); restore or"):
        learner.load(tmp_path / "torn")


def test_a_file_that_is_missing_or_cut_is_named(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "torn")
    for name, size in read_marker(tmp_path / "torn").files.items():
        file = tmp_path / "torn" / name
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        with pytest.raises(ValueError, match=rf"{name} has {size - 1:,} bytes of {size:,}"):
            learner.load(tmp_path / "torn")
        file.unlink()
        with pytest.raises(ValueError, match=f"{name} is missing"):
            learner.load(tmp_path / "torn")
        file.write_bytes(data)
    learner.load(tmp_path / "torn")


def test_a_checkpoint_of_another_model_is_refused_in_one_line(model_folder: Path, tmp_path: Path):
    make_learner(make_model_folder(tmp_path / "wider", vocab=62)).save(tmp_path / "saved")
    learner = make_learner(model_folder)
    before = full_parameters(learner)
    with pytest.raises(
        ValueError, match=r"saved: was saved of a qwen3 of 28,\d+ parameters .*; set model.path"
    ) as error:
        learner.load(tmp_path / "saved")
    assert "\n" not in str(error.value)
    assert_equal(full_parameters(learner), before)


def test_a_save_that_broke_off_leaves_the_older_checkpoint(model_folder: Path, tmp_path: Path, monkeypatch):
    learner = make_learner(model_folder)
    learner.step(batch(0))
    learner.save(tmp_path / "last")
    learner.step(batch(1))
    with monkeypatch.context() as patch:
        patch.setattr("laminar_py.learner.marker.MARKER", "no/such/folder")
        with pytest.raises(FileNotFoundError):
            learner.save(tmp_path / "last")
    learner.load(tmp_path / "last")
    assert learner.steps_taken == 1
    again = make_learner(model_folder)
    again.save(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_disk_that_is_full_is_an_error_that_says_so(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    learner.begin_save(tmp_path / "first")
    learner.finish_save()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(Exception) as full:  # noqa: PT011 - whatever of them torch raises
            learner.save(tmp_path / "next")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert why_unwritable(full.value)
    learner.load(tmp_path / "first")


def save_often(model_folder: Path, folder: Path) -> None:
    learner = make_learner(model_folder)
    for number in range(100):
        learner.save(folder / f"step-{number}")


def num_files(folder: Path) -> int:
    try:
        return len(os.listdir(folder))
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("files", [1, 2, 3])
def test_kill_9_at_any_moment_leaves_what_is_complete_or_refused(tmp_path: Path, files):
    """Killed once so many files of the second checkpoint are there, or it is complete."""
    source, folder = make_model_folder(tmp_path / "wide", vocab=WIDE), tmp_path / "checkpoints"
    prepared()
    child = multiprocessing.get_context(FORKSERVER).Process(target=save_often, args=(source, folder), daemon=True)
    child.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "step-1").exists() and num_files(folder / "step-1.tmp") < files:
            assert child.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        child.kill()
        child.join()
    learner = make_learner(source)
    learner.load(folder / "step-0")
    for path in folder.glob("step-1*"):
        if (path / MARKER).exists():
            learner.load(path)
        else:
            with pytest.raises(ValueError, match="half written"):
                learner.load(path)
