"""Layers that are compiled are compiled, also where their activations are computed again."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from laminar_py.config.learner import Attention, Recompute
from laminar_py.learner import attention
from laminar_py.learner.attention import register_kernel
from laminar_py.learner.layers import compile_layers, fuse_norms, recompute_activations
from laminar_py.learner.model import policy_logprobs
from tests.learner.builders import make_learner, make_sequences, pack


def one_sequence(q, k, v, segments, scale):
    """Attention that can be traced: lengths are no Python numbers, as in the kernels of a GPU."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Recompute))
def test_a_compiled_layer_is_traced_and_computes_the_same(monkeypatch, model_folder, kind):
    torch._dynamo.reset()
    batch = pack(make_sequences((9,)), num_total=1)
    plain, compiled = make_learner(model_folder), make_learner(model_folder)
    monkeypatch.setitem(attention.KERNELS, Attention.SDPA, one_sequence)  # after the check, which packs several
    register_kernel(Attention.SDPA)
    # the backward pass is traced too where parts of it are chosen by a policy; it takes ten times as long
    counter = CompileCounterWithBackend("aot_eager" if kind is Recompute.SELECTIVE else "eager")
    recompute_activations(compiled.model, kind)
    compile_layers(compiled.model, backend=counter)
    gradients = []
    for learner in (plain, compiled):
        policy_logprobs(learner.model, batch)[0].sum().backward()
        gradients.append([parameter.grad for parameter in learner.model.parameters()])
    assert counter.frame_count > 0
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


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
