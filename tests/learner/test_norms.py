"""Norms that a GPU computes in one kernel: the same models, and no norm of another kind."""

from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from laminar_py.learner.norms import fuse_norms

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
NUM_NORMS: dict[Callable[..., PretrainedConfig], int] = {
    LlamaConfig: 5,
    Qwen2Config: 5,
    Qwen3Config: 9,  # with those of queries and keys
    DeepseekV3Config: 9,
    Gemma3TextConfig: 0,  # they add one to their weight
}


def made(kind: Callable[..., PretrainedConfig], device: str = "cpu") -> torch.nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(kind(**SIZES), dtype=torch.float32)
    if device == "cpu":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) / 4)
    return model.eval()


@pytest.mark.parametrize("kind", NUM_NORMS)
def test_outputs_and_gradients_stay(kind: Callable[..., PretrainedConfig]) -> None:
    ids = torch.arange(20)[None]
    results = []
    for fuses in (False, True):
        model = made(kind)
        assert not fuses or fuse_norms(model) == NUM_NORMS[kind]
        logits = model(ids).logits
        logits.square().sum().backward()
        results.append([logits, *(parameter.grad for parameter in model.parameters())])
    for found, expected in zip(*reversed(results), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_model_without_weights_yet_is_tried_as_well() -> None:
    assert fuse_norms(made(Qwen3Config, "meta")) == NUM_NORMS[Qwen3Config]
    assert fuse_norms(made(Gemma3TextConfig, "meta")) == 0
