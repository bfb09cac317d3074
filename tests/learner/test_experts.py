"""Experts on a packed row: their order, results and gradients, also compiled and with recorded experts."""

import msgspec
import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from laminar_py.config.learner import Attention, Recompute
from laminar_py.learner import attention
from laminar_py.learner.attention import register_kernel
from laminar_py.learner.experts import packed_experts, sort_by_expert
from laminar_py.learner.layers import compile_layers, recompute_activations
from laminar_py.learner.model import policy_logprobs
from tests.learner.builders import (
    assert_near,
    make_learner,
    make_mixture_folder,
    make_sequences,
    pack,
    with_experts,
)
from tests.learner.test_layers import one_sequence

CHOICES = {
    "spread": [[0, 3], [3, 1], [2, 0], [1, 2], [3, 0]],
    "some experts idle": [[4, 1], [1, 4], [4, 1]],
    "all to two": [[5, 0]] * 7,
    "one token": [[2, 5]],
}


def test_copies_lie_by_expert_and_then_by_token():
    order = sort_by_expert(torch.tensor([[1, 0], [0, 2]]), num_experts=4)
    assert [part.tolist() for part in order] == [[1, 2, 0, 3], [0, 1, 0, 1], [[2, 0], [1, 3]], [2, 3, 4, 4]]


def test_each_copy_is_in_the_range_of_its_expert_and_finds_its_token_again():
    chosen = torch.tensor(np.random.default_rng(0).random((500, 128)).argsort(-1)[:, :8])
    order = sort_by_expert(chosen, num_experts=128)
    ends = [0, *order.ends.tolist()]
    for expert in range(128):
        tokens = order.tokens[ends[expert] : ends[expert + 1]]
        assert torch.equal(tokens, (chosen == expert).any(-1).nonzero()[:, 0])
    assert torch.equal(order.tokens[order.places], torch.arange(500)[:, None].expand(500, 8))


def made_experts(dtype: torch.dtype, *, hidden: int = 16, width: int = 24) -> Qwen3MoeExperts:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(num_experts=6, hidden_size=hidden, moe_intermediate_size=width, hidden_act="silu")
    config._experts_implementation = "eager"  # transformers' own loop over experts
    experts = Qwen3MoeExperts(config).to(dtype)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 4)
    return experts


def passed(forward, experts, chosen, *, dtype) -> dict[str, torch.Tensor]:
    """Result and all gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(len(chosen), experts.hidden_dim, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(chosen.shape, generator=generator).to(dtype).requires_grad_()
    experts.zero_grad()
    output = forward(hidden, chosen, weights)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    gradients = {name: one.grad.float() for name, one in experts.named_parameters()}
    return gradients | {
        "output": output.detach().float(),
        "hidden": hidden.grad.float(),
        "weights": weights.grad.float(),
    }


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_results_and_gradients_are_a_loop_over_experts(choice, dtype, rel):
    experts, chosen = made_experts(dtype), torch.tensor(CHOICES[choice])
    found = passed(lambda *given: packed_experts(experts, *given), experts, chosen, dtype=dtype)
    assert_near(found, passed(experts, experts, chosen, dtype=dtype), rel=rel)


@pytest.mark.parametrize(("hidden", "width"), [(16, 22), (18, 24), (16, 7), (32, 4), (9, 5)])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_experts_of_any_width_are_computed_though_torch_takes_multiples_of_16_bytes(hidden, width, dtype, rel):
    experts, chosen = made_experts(dtype, hidden=hidden, width=width), torch.tensor(CHOICES["some experts idle"])
    found = passed(lambda *given: packed_experts(experts, *given), experts, chosen, dtype=dtype)
    assert_near(found, passed(experts, experts, chosen, dtype=dtype), rel=rel)


def test_experts_with_biases_are_computed_with_them():
    experts, chosen = made_experts(torch.float32), torch.tensor(CHOICES["spread"])
    experts.has_bias = True
    experts.gate_up_proj_bias, experts.down_proj_bias = torch.zeros(6, 48), torch.ones(6, 16)
    hidden, weights = torch.randn(5, 16), torch.ones(5, 2)
    without = experts(hidden, chosen, weights)
    torch.testing.assert_close(packed_experts(experts, hidden, chosen, weights), without + 2.0)


def test_experts_without_a_gate_of_any_width_are_computed_by_their_own_loop():
    experts, chosen = made_experts(torch.float32, width=22), torch.tensor(CHOICES["spread"])
    experts.has_gate = False  # which the class's own loop does not ask
    hidden, weights = torch.randn(5, 16), torch.ones(5, 2)
    assert torch.equal(packed_experts(experts, hidden, chosen, weights), experts(hidden, chosen, weights))


def backward(learner, batch) -> dict[str, torch.Tensor]:
    logprobs, _ = policy_logprobs(learner.model, batch)
    logprobs.sum().backward()
    found = {name: one.grad.clone() for name, one in learner.model.named_parameters()}
    learner.model.zero_grad()
    return found | {"logprobs": logprobs.detach()}


@pytest.mark.parametrize(
    "kind", [kind if kind is Recompute.ALL else pytest.param(kind, marks=pytest.mark.slow) for kind in Recompute]
)
def test_compiled_layers_of_a_mixture_replay_experts_and_compute_the_same(monkeypatch, tmp_path, kind):
    torch._dynamo.reset()
    folder = make_mixture_folder(tmp_path / "mixture")
    plain, compiled = make_learner(folder), make_learner(folder)
    monkeypatch.setitem(attention.KERNELS, Attention.SDPA, one_sequence)
    register_kernel(Attention.SDPA)
    counter = CompileCounterWithBackend("aot_eager")
    recompute_activations(compiled.model, kind)
    compile_layers(compiled.model, backend=counter)
    free = [pack(make_sequences((length,)), num_total=1) for length in (9, 17, 12)]
    forced = [pack(with_experts(make_sequences((length,)), seed=length), num_total=1) for length in (11, 30)]
    partly = msgspec.structs.replace(
        forced[1], experts=np.where(np.arange(30)[:, None, None] < 9, -1, forced[1].experts)
    )
    for batch in (*free, *forced, partly, free[0]):
        assert_near(backward(compiled, batch), backward(plain, batch), rel=1e-5)
    assert counter.frame_count < 2 * 2, "not a graph for each of two layers, with records and without"
