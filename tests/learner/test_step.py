"""The learner's step: what splits do not change, and what is refused."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from laminar_py.config import LearnerConfig, ModelConfig
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from tests.learner.builders import full_parameters, make_learner, make_sequences, pack


def test_accumulated_step_equals_the_step_in_one_batch(model_folder: Path):
    sequences = make_sequences()
    whole, split = make_learner(model_folder), make_learner(model_folder)
    one = whole.step([pack(sequences, num_total=6)])
    many = split.step([pack(sequences[:2], num_total=6), pack(sequences[2:], num_total=6)])
    for field in ("loss", "grad_norm", "entropy", "ratio_deviation", "clip_fraction", "truncated_fraction"):
        assert getattr(many, field) == pytest.approx(getattr(one, field), rel=1e-5), field
    for name, tensor in full_parameters(whole).items():
        torch.testing.assert_close(full_parameters(split)[name], tensor, rtol=1e-4, atol=1e-5)
    assert whole.num_steps == 1


def test_on_policy_step_has_ratio_one(model_folder: Path):
    learner = make_learner(model_folder)
    sequences = [dataclasses.replace(s, advantage=1.0) for s in make_sequences()]
    batch = pack(sequences, num_total=6)
    logprobs, _ = policy_logprobs(learner.model, batch)
    metrics = learner.step([msgspec.structs.replace(batch, behaviour_logprobs=logprobs.detach().numpy())])
    assert metrics.ratio_deviation == pytest.approx(0.0, abs=1e-6)
    assert metrics.clip_fraction == metrics.truncated_fraction == 0.0
    assert metrics.loss == pytest.approx(-1.0, rel=1e-5)


def test_a_step_raises_the_objective(model_folder: Path):
    learner = make_learner(model_folder)
    batch = pack(make_sequences(), num_total=6)
    losses = [learner.step([batch]).loss for _ in range(4)]
    assert losses[-1] < losses[0]


def test_a_gradient_that_is_not_finite_changes_nothing(model_folder: Path):
    learner = make_learner(model_folder)
    before = full_parameters(learner)
    batch = pack(make_sequences(), num_total=6)
    broken = msgspec.structs.replace(batch, advantages=np.full_like(batch.advantages, np.nan))
    with pytest.raises(FloatingPointError, match="learner step 1"):
        learner.step([broken])
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_parameters(learner).items())
    assert learner.num_steps == 0


def test_from_scratch_weights_come_from_the_seed(model_folder: Path):
    scratch = ModelConfig(path=model_folder, from_scratch=True)
    first, again, other = (
        full_parameters(Learner(scratch, LearnerConfig(), temperature=1.0, seed=seed)) for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ([], "has no config.json"),
        (["config.json"], "has no tokenizer.json"),
        (["config.json", "tokenizer.json"], "model.from_scratch=true"),
    ],
)
def test_a_folder_that_cannot_serve_is_named(tmp_path: Path, files: list[str], remedy: str):
    folder = tmp_path / "model"
    with pytest.raises(ValueError, match=f"model.path={folder}: no such folder"):
        make_learner(folder)
    folder.mkdir()
    for name in files:
        (folder / name).write_text("{}")
    with pytest.raises(ValueError, match=f"model.path={folder}.*{remedy}"):
        make_learner(folder)


def test_temperature_zero_is_refused(model_folder: Path):
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        Learner(ModelConfig(path=model_folder), LearnerConfig(), temperature=0.0, seed=0)


def test_a_cap_below_the_clip_is_refused(model_folder: Path):
    settings = LearnerConfig(importance_cap=1.1)
    with pytest.raises(ValueError, match=r"importance_cap=1.1"):
        Learner(ModelConfig(path=model_folder), settings, temperature=1.0, seed=0)
