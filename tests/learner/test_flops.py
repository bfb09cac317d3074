"""What a step computes, against torch's own count of a real forward and backward pass."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from laminar_py.learner.metrics import PEAKS, TrainingCost, peak_flops, training_cost
from laminar_py.records.metrics import StepMetrics, Work
from tests.learner.builders import make_learner, make_sequences, pack

TOKENS = 96
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
}
MIXED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 8}
CONFIGS = {
    "dense": Qwen3Config(**SIZES, head_dim=32),
    "tied": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(**SIZES, **MIXED, head_dim=32),
    "partly mixture": Qwen3MoeConfig(**SIZES, **MIXED, head_dim=32, mlp_only_layers=[1]),
    "latent attention, mixture": DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        **MIXED | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=40,
        first_k_dense_replace=1,
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1),
}


def make_model(name):
    mixed = {"experts_implementation": "eager"} if "mix" in name else {}
    return AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="eager", dtype=torch.float32, **mixed
    )


def counted(model):
    """By torch, of one sequence. Eager attention computes scores above the diagonal too."""
    ids = torch.randint(0, 512, (1, TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_is_what_torch_counts(name):
    model = make_model(name)
    cost = training_cost(model)
    linear = cost.per_token * TOKENS
    attention = cost.flops(TOKENS, TOKENS**2) - linear
    assert linear + 2 * attention == pytest.approx(counted(model), rel=1e-6)


def test_frozen_weights_cost_no_gradient_of_their_own():
    model = make_model("dense")
    whole = training_cost(model).per_token
    model.requires_grad_(False)
    model.base_model.embed_tokens.requires_grad_(True)  # so that all layers still pass a gradient on
    cost = training_cost(model)
    assert cost.per_token == pytest.approx(whole * 4 / 6)
    attention = cost.flops(TOKENS, TOKENS**2) - cost.per_token * TOKENS
    assert cost.per_token * TOKENS + 2 * attention == pytest.approx(counted(model), rel=1e-6)


def test_packed_sequences_cost_what_they_cost_alone():
    cost = TrainingCost(6e9, 1e-4)
    assert cost.flops(400, 100_000) == pytest.approx(cost.flops(100, 10_000) + cost.flops(300, 90_000))
    assert cost.flops(400, 160_000) - cost.flops(400, 100_000) == pytest.approx(6e9 * 1e-4 * 2 * 100 * 300)


def test_a_step_counts_its_tokens_once_whatever_is_computed_again(model_folder):
    sequences = make_sequences()
    learner = make_learner(model_folder)
    metrics = learner.step([pack(sequences[:3], num_total=6), pack(sequences[3:], num_total=6)])
    lengths = [len(sequence.ids) for sequence in sequences]
    assert metrics.work.num_tokens == sum(lengths)
    assert metrics.work.flops == pytest.approx(
        training_cost(learner.model).flops(sum(lengths), sum(length**2 for length in lengths))
    )
    assert metrics.tokens_per_s == pytest.approx(sum(lengths) / metrics.elapsed_s)


def test_mfu_is_of_all_devices_and_absent_where_their_speed_is_not_known():
    known = StepMetrics(loss=0.0, grad_norm=0.0, elapsed_s=2.0, work=Work(1000, 1e15, 8 * PEAKS["H100 80GB HBM3"]))
    assert known.mfu == pytest.approx(1e15 / 2 / (8 * 989.5e12))
    assert StepMetrics(loss=0.0, grad_norm=0.0, elapsed_s=2.0, work=Work(1000, 1e15)).mfu is None
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (teraflops and teraflops * 1e12)
