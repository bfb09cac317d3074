"""Mixture-of-experts models: packing, files, and experts that are replayed."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.learner import Recompute
from laminar_py.learner.export import export_hf
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from laminar_py.records.columns import REFERENCE_LOGPROBS
from tests.learner.builders import SETTINGS, VOCAB, make_learner, make_sequences, pack, referred

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=24, norm_topk_prob=True),
    "not renormalised": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=24, norm_topk_prob=False),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8),
    "of odd width": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=7, norm_topk_prob=True),
}
LAYERS, EXPERTS, TOP_K = 3, 8, 2


@pytest.fixture(params=CONFIGS)
def mixture(request, tmp_path) -> Path:
    folder = tmp_path / "mixture"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def gradients(learner: Learner, batch):
    logprobs, _ = policy_logprobs(learner.model, batch)
    (torch.tensor(batch.loss_weights) * logprobs).sum().backward()
    found = {name: p.grad.clone() for name, p in learner.model.named_parameters()}
    learner.model.zero_grad()
    return logprobs.detach(), found


def chosen(learner: Learner, batch) -> np.ndarray:
    """[T, layers, k] experts of every token, as the learner's own routers choose."""
    seen = []
    routers = [m for m in learner.model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [r.register_forward_hook(lambda _, __, output: seen.append(output[2])) for r in routers]
    with torch.no_grad():
        policy_logprobs(learner.model, batch)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, 1).numpy().astype(np.int16)


def test_packed_gradients_of_a_mixture_equal_those_one_by_one(mixture: Path):
    learner = make_learner(mixture)
    sequences = make_sequences()
    _, packed = gradients(learner, pack(sequences, num_total=6))
    alone = [gradients(learner, pack([one], num_total=6))[1] for one in sequences]
    for name, grad in packed.items():
        expected = sum(one[name] for one in alone)
        assert (grad - expected).norm() <= 1e-5 * expected.norm() + 1e-9, name


def test_files_have_the_names_and_values_that_transformers_gives_them(mixture: Path, tmp_path: Path):
    export_hf(make_learner(mixture).model, tmp_path / "out", source=mixture, dtype=torch.float32)
    written, expected = load_file(tmp_path / "out/model.safetensors"), load_file(mixture / "model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)


@pytest.mark.parametrize("recompute", list(Recompute))
def test_replaying_its_own_choice_changes_nothing(mixture: Path, recompute: Recompute):
    learner = make_learner(mixture)
    batch = pack(make_sequences(), num_total=6)
    logprobs, plain = gradients(learner, batch)
    settings = SETTINGS.model_copy(update={"recompute": recompute})
    replayed = msgspec.structs.replace(batch, experts=chosen(learner, batch))
    again, found = gradients(make_learner(mixture, settings=settings), replayed)
    assert torch.equal(again, logprobs)
    for name, grad in plain.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-5, atol=1e-8)


def test_a_perturbed_choice_gives_ratio_1_under_replay_and_not_without(mixture: Path):
    """A sampler whose selecting logits have noise; weights come from the router's own logits, on both sides."""
    learner = make_learner(mixture)
    batch = pack(make_sequences(), num_total=6)
    own = chosen(learner, batch)
    generator = np.random.default_rng(0)
    other = own.copy()
    for t, layer in zip(*np.nonzero(generator.random(own.shape[:2]) < 0.1), strict=True):
        other[t, layer] = generator.choice(EXPERTS, TOP_K, replace=False)
    forced = msgspec.structs.replace(batch, experts=other)
    sampler = make_learner(mixture)  # another process has the same weights
    behaviour = policy_logprobs(sampler.model, forced)[0].detach()
    with_replay, found = gradients(learner, forced)
    without = policy_logprobs(learner.model, batch)[0].detach()
    trained = torch.tensor(batch.loss_weights) > 0
    assert (with_replay - behaviour)[trained].abs().max() < 1e-4
    assert (without - behaviour)[trained].abs().max() > 1e-2
    gates = [grad for name, grad in found.items() if name.endswith("gate.weight")]
    assert len(gates) == LAYERS
    assert all(float(grad.norm()) > 0 for grad in gates), "replay keeps the gradient of the router"


def test_rows_that_are_not_recorded_are_routed_as_ever(mixture: Path):
    learner = make_learner(mixture)
    batch = pack(make_sequences(), num_total=6)
    nothing = np.full((batch.num_tokens, LAYERS, TOP_K), -1, np.int16)
    plain = policy_logprobs(learner.model, batch)[0]
    assert torch.equal(policy_logprobs(learner.model, msgspec.structs.replace(batch, experts=nothing))[0], plain)


def test_a_reference_routes_by_itself_whatever_is_recorded_of_the_policy(mixture: Path):
    learner = make_learner(mixture, algorithm=AlgorithmConfig(kl_coef=0.1, reference=mixture))
    batch = pack(make_sequences(), num_total=6)
    forced = msgspec.structs.replace(batch, experts=np.zeros((batch.num_tokens, LAYERS, TOP_K), np.int16))
    plain, routed = (one.columns[REFERENCE_LOGPROBS] for one in referred(learner, [batch, forced]))
    assert np.array_equal(routed, plain)
    assert not np.array_equal(policy_logprobs(learner.model, forced)[0].detach().numpy(), plain)
