"""A learner that rounds weights in its forward computes what an engine with rounded weights does."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from laminar_py.config.learner import Recompute
from laminar_py.engines.local import fp8
from laminar_py.learner.rounding import Rounding
from tests.learner.builders import (
    SETTINGS,
    assert_near,
    full_parameters,
    make_learner,
    make_model_folder,
    make_sequences,
    pack,
    record_gradients,
)

FP8 = Rounding(fp8.is_quantized, fp8.rounded)


def rounded_folder(folder: Path, out: Path) -> Path:
    shutil.copytree(folder, out)
    weights = load_file(folder / "model.safetensors")
    changed = {name: fp8.rounded(one) if fp8.is_quantized(name) else one for name, one in weights.items()}
    assert sum(not torch.equal(one, weights[name]) for name, one in changed.items()) == 2 * 7
    save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_log_probabilities_and_gradients_are_those_of_rounded_weights_and_updates_of_the_others(
    tmp_path, recompute
):
    folder = make_model_folder(tmp_path / "model")
    settings = SETTINGS.model_copy(update={"recompute": Recompute(recompute)})
    learner = make_learner(folder, settings=settings, rounding=FP8)
    other = make_learner(rounded_folder(folder, tmp_path / "rounded"))
    before, batch = full_parameters(learner), pack(make_sequences(), num_total=6)
    assert all(torch.equal(one, load_file(folder / "model.safetensors")[name]) for name, one in before.items())
    found, expected = record_gradients(learner), record_gradients(other)
    metrics, theirs = learner.step([batch]), other.step([batch])
    assert metrics.loss == theirs.loss
    assert_near(found[0], expected[0], rel=1e-6)
    moved = full_parameters(learner)
    assert all(0 < (one - before[name]).abs().max() < 0.03 for name, one in moved.items())
    learner.save(tmp_path / "checkpoint")
    again = make_learner(folder, rounding=FP8)
    again.load(tmp_path / "checkpoint")
    assert again.step([batch]).loss == learner.step([batch]).loss
