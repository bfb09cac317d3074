"""A checkpoint continues bit by bit, or is refused."""

from pathlib import Path

import pytest
import torch

from laminar_py.learner.checkpoint import MARKER
from tests.learner.builders import full_parameters, make_learner, make_sequences, pack


def batch(seed: int):
    return [pack(make_sequences(seed=seed), num_total=6)]


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
    assert resumed.num_steps == 3
    metrics = resumed.step(batch(3))
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    for name, tensor in full_parameters(learner).items():
        assert torch.equal(full_parameters(resumed)[name], tensor)


def test_a_checkpoint_without_its_marker_is_refused(model_folder: Path, tmp_path: Path):
    learner = make_learner(model_folder)
    learner.save(tmp_path / "torn")
    (tmp_path / "torn" / MARKER).unlink()
    with pytest.raises(ValueError, match="torn"):
        learner.load(tmp_path / "torn")


def test_a_save_that_broke_off_leaves_the_older_checkpoint(model_folder: Path, tmp_path: Path, monkeypatch):
    learner = make_learner(model_folder)
    learner.step(batch(0))
    learner.save(tmp_path / "last")
    learner.step(batch(1))
    with monkeypatch.context() as patch:
        patch.setattr("laminar_py.learner.checkpoint.MARKER", "no/such/folder")
        with pytest.raises(FileNotFoundError):
            learner.save(tmp_path / "last")
    learner.load(tmp_path / "last")
    assert learner.num_steps == 1
    learner.save(tmp_path / "last")
    assert [path.name for path in tmp_path.iterdir()] == ["last"]
