"""The lr_factor of the learning rate, and what an update refuses."""

import math
from pathlib import Path

import msgspec
import pytest
import torch

from laminar_py.config.learner import Decay, LearnerConfig
from laminar_py.learner.schedule import lr_factor
from laminar_py.learner.step import Optimizer
from tests.learner.builders import SETTINGS, make_learner, make_sequences, pack


def factors(*, total_steps: int, **settings) -> list[float]:
    return [lr_factor(step, LearnerConfig(**settings), total_steps=total_steps) for step in range(total_steps)]


def test_the_rate_rises_stays_and_falls_as_it_is_told():
    assert factors(total_steps=4) == [1.0] * 4
    assert factors(total_steps=4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert factors(total_steps=10, warmup_steps=2, decay=Decay.LINEAR)[:4] == [0.5, 1.0, 1.0, 0.875]
    cosine = factors(total_steps=8, decay=Decay.COSINE)
    assert cosine[4] == pytest.approx(0.5)
    assert cosine == sorted(cosine, reverse=True)
    assert lr_factor(99, LearnerConfig(decay=Decay.COSINE), total_steps=10) == pytest.approx(0.0)


def test_a_step_at_a_tenth_of_the_rate_goes_a_tenth_of_the_way():
    way = []
    for warmup in (0, 10):
        model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = Optimizer(model, LearnerConfig(lr=1e-2, warmup_steps=warmup), total_steps=20)
        model(torch.ones(1, 3)).sum().backward()
        assert optimizer.update(0, loss=3.0) == pytest.approx(math.sqrt(3))
        way.append(float((1 - model.weight).mean().detach()))
    assert way[1] == pytest.approx(way[0] / 10, rel=1e-3)


def test_decay_rates_are_the_settings():
    optimizer = Optimizer(torch.nn.Linear(1, 1), LearnerConfig(betas=(0.8, 0.99)))
    assert optimizer.adamw.defaults["betas"] == (0.8, 0.99)
    assert LearnerConfig().betas == (0.9, 0.95)


def test_a_loss_that_is_not_finite_changes_nothing_whatever_its_gradient():
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = Optimizer(model, LearnerConfig(lr=1e-2))
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    assert optimizer.update(0, loss=math.inf) is None
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


@pytest.mark.parametrize("cause", ["no weight", "skipped"])
def test_a_step_that_trained_nothing_has_no_figures(model_folder: Path, cause):
    learner, batch = make_learner(model_folder), pack(make_sequences(), num_total=6)
    if cause == "skipped":
        batch = msgspec.structs.replace(batch, advantages=batch.advantages * math.inf)
    else:
        batch = msgspec.structs.replace(batch, loss_weights=batch.loss_weights * 0)
    metrics = learner.step([batch])
    assert metrics.skipped == (cause == "skipped")
    assert math.isnan(metrics.loss)
    assert math.isnan(metrics.grad_norm)
    assert all(math.isnan(value) for value in metrics.tokens.figures.values())
    assert metrics.by_staleness == {}
    trained = learner.step([pack(make_sequences(), num_total=6)])
    assert all(math.isfinite(value) for value in (trained.loss, *trained.tokens.figures.values()))


def test_a_resumed_learner_has_the_rate_of_its_step(model_folder: Path, tmp_path: Path):
    settings = SETTINGS.model_copy(update={"decay": Decay.LINEAR, "warmup_steps": 1})
    batch = pack(make_sequences(), num_total=6)
    first = make_learner(model_folder, settings=settings, total_steps=5)
    first.step([batch])
    first.save(tmp_path / "checkpoint")
    resumed = make_learner(model_folder, settings=settings, total_steps=5)
    resumed.load(tmp_path / "checkpoint")
    for learner in (first, resumed):
        learner.step([batch])
    pairs = zip(first.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
