"""The learner's step: what splits do not change, and what is refused."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from laminar_py.config.algorithm import PRESETS, AlgorithmConfig, Divergence
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.learner.export import WeightExporter, full_tensors
from laminar_py.learner.losses.loss import make_loss_inputs, policy_loss, trained_rows
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from laminar_py.records.columns import ACTORS, PLACES, TEACHER_LOGPROBS
from laminar_py.records.pieces import SamplingMask
from laminar_py.records.trajectory import MicroBatch
from tests.learner.builders import (
    VOCAB,
    full_parameters,
    make_learner,
    make_model_folder,
    make_sequences,
    pack,
)


def test_accumulated_step_equals_the_step_in_one_batch(model_folder: Path):
    sequences = make_sequences()
    whole, split = make_learner(model_folder), make_learner(model_folder)
    one = whole.step([pack(sequences, num_total=6)])
    many = split.step([pack(sequences[:2], num_total=6), pack(sequences[2:], num_total=6)])
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert asdict(many.tokens) == pytest.approx(asdict(one.tokens), rel=1e-5)
    for name, tensor in full_parameters(whole).items():
        torch.testing.assert_close(full_parameters(split)[name], tensor, rtol=1e-4, atol=1e-5)
    assert whole.steps_taken == 1


def test_on_policy_step_has_ratio_one(model_folder: Path):
    learner = make_learner(model_folder)
    sequences = [dataclasses.replace(s, advantage=1.0) for s in make_sequences()]
    batch = pack(sequences, num_total=6)
    logprobs, _ = policy_logprobs(learner.model, batch)
    metrics = learner.step([msgspec.structs.replace(batch, behaviour_logprobs=logprobs.detach().numpy())])
    assert metrics.tokens.ratio_deviation == pytest.approx(0.0, abs=1e-6)
    assert metrics.tokens.clip_fraction == metrics.tokens.importance_capped_fraction == 0.0
    assert metrics.mismatch.max < 1e-6
    assert metrics.tokens.effective_share == pytest.approx(1.0)
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
    metrics = learner.step([broken])
    assert metrics.skipped == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in full_parameters(learner).items())
    assert learner.step([batch]).skipped == 0
    assert learner.steps_taken == 2


def test_from_scratch_weights_come_from_the_seed(model_folder: Path):
    scratch = ModelConfig(path=model_folder, from_scratch=True)
    first, again, other = (
        full_parameters(Learner(scratch, LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=seed))
        for seed in (1, 1, 2)
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
        Learner(ModelConfig(path=model_folder), LearnerConfig(), AlgorithmConfig(), temperature=0.0, seed=0)


def test_every_update_of_a_step_learns_from_its_own_part(model_folder: Path):
    """Two updates from the same start: as two steps on the parts, each with weights that sum to 1."""
    sequences = make_sequences()
    whole = make_learner(model_folder, algorithm=AlgorithmConfig(updates_per_step=2))
    whole.step([pack(sequences[:2], num_total=6), pack(sequences[2:], num_total=6)])
    parts = make_learner(model_folder)
    parts.step([pack(sequences[:2], num_total=2)])
    parts.step([pack(sequences[2:], num_total=4)])
    for name, tensor in full_parameters(parts).items():
        torch.testing.assert_close(full_parameters(whole)[name], tensor, rtol=1e-4, atol=1e-5)


def test_an_update_that_is_not_finite_leaves_the_others_of_its_step(model_folder: Path):
    sequences = make_sequences()
    good, bad = pack(sequences[:2], num_total=6), pack(sequences[2:], num_total=6)
    broken = msgspec.structs.replace(bad, advantages=np.full_like(bad.advantages, np.inf))
    learner = make_learner(model_folder, algorithm=AlgorithmConfig(updates_per_step=2))
    alone = make_learner(model_folder)
    metrics = learner.step([good, broken])
    assert all(np.isfinite(value) for value in asdict(metrics.tokens).values())
    assert metrics.tokens.num_tokens == np.count_nonzero(good.loss_weights)
    alone.step([pack(sequences[:2], num_total=2)])
    assert metrics.skipped == 1
    assert np.isfinite(metrics.loss)
    for name, tensor in full_parameters(alone).items():
        torch.testing.assert_close(full_parameters(learner)[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_recomputed_policy_is_that_of_the_start_of_the_step(model_folder: Path):
    algorithm = AlgorithmConfig(name="decoupled_ppo", updates_per_step=2)
    learner = make_learner(model_folder, algorithm=algorithm)
    sequences = make_sequences()
    metrics = learner.step([pack(sequences[:3], num_total=6), pack(sequences[3:], num_total=6)])
    assert metrics.tokens.ratio_deviation > 0.0, "the second update's policy is another than the first one's"
    assert metrics.tokens.kl_behaviour_k3 > metrics.tokens.kl_proximal_k3 > 0.0


@pytest.mark.parametrize("name", PRESETS)
def test_every_algorithm_takes_a_step(model_folder: Path, name: str):
    learner = make_learner(model_folder, algorithm=AlgorithmConfig(name=name))
    batch = pack(make_sequences(), num_total=6)
    if name == "tba":
        rewards, groups = np.array([0, 1, 0, 1, 0, 1], np.float32), np.array([0, 0, 1, 1, 1, 1], np.int32)
        batch = msgspec.structs.replace(batch, rewards=rewards, groups=groups)
    if name == "distill":
        teacher = {TEACHER_LOGPROBS: np.full_like(batch.advantages, -1.0)}
        batch = msgspec.structs.replace(batch, columns=teacher)
    if name == "ppo":
        places = {PLACES: np.arange(len(batch.labels), dtype=np.int32), ACTORS: np.zeros_like(batch.labels)}
        batch = msgspec.structs.replace(batch, columns=places)
    before = full_parameters(learner)
    metrics = learner.step([batch])
    assert metrics.grad_norm > 0.0
    assert any(not torch.equal(tensor, before[n]) for n, tensor in full_parameters(learner).items())


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo", "cispo"])
def test_the_gradients_of_a_reward_and_a_teacher_add_up(model_folder: Path, name: str):
    """On data of the policy itself, where every objective is linear in the advantages."""
    learner = make_learner(model_folder)
    batch = pack(make_sequences(), num_total=6)
    rows = torch.tensor(np.flatnonzero(batch.loss_weights))
    own = policy_logprobs(learner.model, batch, rows)[0].detach()
    behaviour = batch.behaviour_logprobs.copy()
    behaviour[rows] = own
    teacher = {TEACHER_LOGPROBS: np.linspace(-3.0, 0.0, len(batch.advantages), dtype=np.float32)}
    batch = msgspec.structs.replace(batch, behaviour_logprobs=behaviour, columns=teacher)
    unrewarded = msgspec.structs.replace(batch, advantages=np.zeros_like(batch.advantages))

    def slopes(batch: MicroBatch, coef: float) -> torch.Tensor:
        logprobs = own.clone().requires_grad_()
        algorithm = AlgorithmConfig(name=name, teacher_coef=coef)
        loss = policy_loss(make_loss_inputs(batch, rows, logprobs, algorithm), algorithm)
        return torch.autograd.grad(loss, logprobs)[0]

    expected = slopes(batch, 0.0) + slopes(unrewarded, 0.3)
    assert slopes(unrewarded, 0.3).abs().max() > 0.0
    torch.testing.assert_close(slopes(batch, 0.3), expected)


@pytest.mark.parametrize("estimator", list(Divergence))
def test_a_policy_is_held_near_its_reference(model_folder: Path, estimator: Divergence):
    """Without a reward, the divergence alone teaches: from another model back to the reference."""
    start = make_model_folder(model_folder.parent / f"start-{estimator}", seed=3)
    algorithm = AlgorithmConfig(kl_coef=1.0, kl_estimator=estimator, reference=model_folder)
    learner = make_learner(start, algorithm=algorithm)
    sequences = [dataclasses.replace(s, advantage=0.0) for s in make_sequences()]
    reference = full_parameters(make_learner(model_folder))
    divergences = [learner.step([pack(sequences, num_total=6)]).tokens.kl_reference_k3 for _ in range(4)]
    assert divergences[-1] < divergences[0]
    exporter = WeightExporter(learner._reference.model)
    frozen = dict(full_tensors(exporter.sources(dtype=torch.float32, gather=True)))
    assert all(torch.equal(tensor, reference[name]) for name, tensor in frozen.items())


def test_a_reference_with_another_vocabulary_is_refused(model_folder: Path, tmp_path: Path):
    other = make_model_folder(tmp_path / "other", vocab=VOCAB + 1)
    with pytest.raises(ValueError, match=f"algorithm.reference={other}: has a vocabulary of {VOCAB + 1}"):
        make_learner(model_folder, algorithm=AlgorithmConfig(kl_coef=0.1, reference=other))


@pytest.mark.parametrize("masked", [False, True])
def test_log_probabilities_of_chosen_rows_are_those_of_all_rows_gradients_included(
    model_folder: Path, masked: bool
):
    model = make_learner(model_folder).model
    batch = pack(make_sequences(), num_total=6)
    if masked:
        counts = np.arange(batch.num_tokens, dtype=np.int32) % 3
        ids = np.concatenate(
            [[label, (label + 1) % VOCAB][:count] for label, count in zip(batch.labels, counts, strict=True)]
        )
        batch = msgspec.structs.replace(batch, support=SamplingMask(counts, ids.astype(np.int32)))
    rows = trained_rows(batch, torch.device("cpu"))
    assert 0 < len(rows) < batch.num_tokens
    results = []
    for logprobs, entropy in (
        [x[rows] for x in policy_logprobs(model, batch)],
        policy_logprobs(model, batch, rows),
    ):
        gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), list(model.parameters()))
        results.append([logprobs, entropy, *gradients])
    for chosen, expected in zip(*results, strict=True):
        torch.testing.assert_close(chosen, expected, rtol=1e-5, atol=1e-5)


def test_a_microbatch_without_trained_rows_has_gradients_of_zero(model_folder: Path):
    model = make_learner(model_folder).model
    batch = pack(make_sequences(), num_total=6)
    logprobs, _ = policy_logprobs(model, batch, torch.empty(0, dtype=torch.long))
    logprobs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
