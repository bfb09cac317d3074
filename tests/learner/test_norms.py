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


class ShiftedRMSNorm(torch.nn.Module):
    """As large as `bias` says even where that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(values(8)) for values in (torch.ones, torch.zeros))
        self.eps = 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(states, (8,), self.weight, self.eps) + self.bias


class OutsideRMSNorm(torch.nn.Module):
    """Adds epsilon to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.weight * states / (states.square().mean(-1, keepdim=True).sqrt() + self.eps)


@pytest.mark.parametrize("kind", [ShiftedRMSNorm, OutsideRMSNorm])
def test_a_norm_of_another_kind_is_left_alone(kind: Callable[[], torch.nn.Module]) -> None:
    assert fuse_norms(torch.nn.Sequential(kind())) == 0
