"""Adapters keep the laws of the whole policy, and what they publish is peft's own format."""

import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, Phi3Config, Qwen3MoeConfig

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.learner import LoraConfig, LoraTarget, Recompute
from laminar_py.config.section import ConfigError
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.export import export_checkpoint
from laminar_py.learner.model import policy_logprobs
from tests.learner.builders import (
    SETTINGS,
    backward,
    full_parameters,
    make_learner,
    make_model_folder,
    make_sequences,
    pack,
    write_adapters,
)
from tests.learner.ranks import run_ranks
from tests.learner.test_sharded import WORLD_SIZE, measured, microbatches

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ADAPTED = SETTINGS.model_copy(update={"lora": LoraConfig(rank=4, alpha=8.0)})
SHARDED = ADAPTED.model_copy(update={"recompute": Recompute.ALL})
REFERRING = AlgorithmConfig(kl_coef=0.5)


def batch(seed: int):
    return [pack(make_sequences(seed=seed), num_total=6)]


def trained(folder: Path, *, steps: int = 2, **kwargs):
    """A learner whose B is not zero any more."""
    learner = make_learner(folder, settings=kwargs.pop("settings", ADAPTED), **kwargs)
    for seed in range(steps):
        learner.step(batch(seed))
    return learner


def gradients(learner, microbatches):
    loss = backward(learner, microbatches)
    grads = [parameter.grad.clone() for parameter in learner.model.parameters() if parameter.requires_grad]
    learner.model.zero_grad()
    return loss, grads


def test_packed_loss_and_gradients_of_adapters_equal_those_one_by_one(model_folder: Path):
    learner = trained(model_folder)
    sequences = make_sequences(seed=7)
    packed_loss, packed = gradients(learner, [pack(sequences, num_total=6)])
    alone_loss, expected = gradients(learner, [pack([sequence], num_total=6) for sequence in sequences])
    assert packed_loss == pytest.approx(alone_loss, rel=1e-5)
    assert len(packed) == 2 * 2 * len(LoraTarget)
    for grad, reference in zip(packed, expected, strict=True):
        assert reference.norm() > 0
        assert (grad - reference).norm() <= 1e-5 * reference.norm()


def test_a_policy_with_fresh_adapters_is_its_base_and_only_they_learn(model_folder: Path):
    plain, learner = make_learner(model_folder), make_learner(model_folder, settings=ADAPTED)
    (one,) = batch(0)
    assert torch.equal(policy_logprobs(plain.model, one)[0], policy_logprobs(learner.model, one)[0])
    frozen = {name: p.clone() for name, p in learner.model.named_parameters() if not p.requires_grad}
    before = full_parameters(learner)
    learner.step([one])
    assert all(torch.equal(p, frozen[name]) for name, p in learner.model.named_parameters() if name in frozen)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in full_parameters(learner).items())


def test_peft_itself_reads_what_is_published_and_computes_the_same(model_folder: Path, tmp_path: Path):
    learner = trained(model_folder)
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, write_adapters(learner, tmp_path / "v1"))
    (sequence,) = make_sequences((12,))
    ids = torch.tensor(sequence.ids)
    expected = torch.log_softmax(model(ids[None]).logits[0], dim=-1)[:-1].gather(1, ids[1:, None])[:, 0]
    logprobs, _ = policy_logprobs(learner.model, pack([sequence], num_total=1))
    torch.testing.assert_close(logprobs[:-1], expected)
    untrained, _ = policy_logprobs(make_learner(model_folder).model, pack([sequence], num_total=1))
    assert not torch.allclose(logprobs, untrained, atol=1e-3)


@pytest.mark.parametrize("recompute", Recompute)
def test_the_reference_of_adapters_is_the_policy_without_them(model_folder: Path, recompute):
    algorithm = AlgorithmConfig(kl_coef=0.5)
    settings = ADAPTED.model_copy(update={"recompute": recompute})
    own = trained(model_folder, algorithm=algorithm, settings=settings)
    loaded = trained(
        model_folder, algorithm=algorithm.model_copy(update={"reference": model_folder}), settings=settings
    )
    assert own._reference.model is own.model
    assert loaded._reference.model is not loaded.model
    one, other = own.step(batch(5)), loaded.step(batch(5))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert one.tokens.kl_reference_k3 > 0
    assert all(torch.equal(t, full_parameters(loaded)[name]) for name, t in full_parameters(own).items())


def test_a_checkpoint_has_adapters_alone_and_continues_bit_by_bit(model_folder: Path, tmp_path: Path):
    learner = trained(model_folder, steps=3)
    learner.save(tmp_path / "step-3")
    expected = learner.step(batch(3))
    resumed = make_learner(model_folder, settings=ADAPTED)
    resumed.load(tmp_path / "step-3")
    metrics = resumed.step(batch(3))
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    assert all(torch.equal(t, full_parameters(resumed)[name]) for name, t in full_parameters(learner).items())
    saved = FileSystemReader(tmp_path / "step-3").read_metadata().state_dict_metadata
    tensors = [name for name in saved if not name.startswith("optimizer.param_groups")]
    assert tensors
    assert [name for name in tensors if ".lora_" not in name] == []


@pytest.mark.parametrize(
    ("seed", "lora", "fault"),
    [
        (9, ADAPTED.lora, r"base \w{8}, and this run has a .*, base \w{8}; set model\.path, its warm start"),
        (0, LoraConfig(rank=4, alpha=32.0), r"rank 4 and alpha 8 .* has .* rank 4 and alpha 32"),
        (0, LoraConfig(rank=8, alpha=8.0), r"rank 4 and alpha 8 .* has .* rank 8 and alpha 8"),
        (
            0,
            LoraConfig(rank=4, alpha=8.0, targets=(LoraTarget.Q_PROJ,)),
            r"on down_proj,.* has .* on q_proj, base",
        ),
        (0, None, r"with adapters of rank 4 .*, and this run has a qwen3 of [\d,]+ parameters \(\w{8}\); set"),
    ],
    ids=["base", "alpha", "rank", "targets", "none"],
)
def test_a_checkpoint_of_adapters_fits_its_own_base_and_settings_alone(model_folder, tmp_path, seed, lora, fault):
    trained(model_folder).save(tmp_path / "step-2")
    other = make_model_folder(tmp_path / "other", seed=seed)
    learner = make_learner(other, settings=SETTINGS.model_copy(update={"lora": lora}))
    with pytest.raises(ValueError, match=fault):
        learner.load(tmp_path / "step-2")


def test_a_checkpoint_of_all_weights_is_none_of_adapters(model_folder: Path, tmp_path: Path):
    make_learner(model_folder).save(tmp_path / "step-0")
    with pytest.raises(ValueError, match=r"was saved of .*, and this run has a .* with adapters"):
        make_learner(model_folder, settings=ADAPTED).load(tmp_path / "step-0")


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_checkpoint_is_the_policy_without_adapters_beside_it(tmp_path: Path, tied):
    base = make_model_folder(tmp_path / "base", tied=tied)
    learner = trained(base, steps=4)
    learner.save(tmp_path / "step-4")
    export_checkpoint(tmp_path / "step-4", tmp_path / "out", source=base, dtype="float32", lora=ADAPTED.lora)
    exported = make_learner(tmp_path / "out")
    assert set(exported.model.state_dict()) == set(make_learner(base).model.state_dict())
    (one,) = batch(9)
    logprobs, _ = policy_logprobs(learner.model, one)
    torch.testing.assert_close(policy_logprobs(exported.model, one)[0], logprobs, rtol=0, atol=1e-5)
    assert not torch.allclose(policy_logprobs(make_learner(base).model, one)[0], logprobs, atol=1e-3)


def test_a_base_whose_weights_are_gone_is_told_by_its_folder(model_folder: Path, tmp_path: Path):
    trained(model_folder, steps=1).save(tmp_path / "step-1")
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(
        ConfigError, match=r"^learner\.lora: no \*\.safetensors in .*/bare, .*; put the weights back"
    ):
        export_checkpoint(tmp_path / "step-1", tmp_path / "out", source=bare, dtype="float32", lora=ADAPTED.lora)


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=24), r"learner\.lora: experts of a mixture"),
        (
            Phi3Config(**SIZES, pad_token_id=0),
            r"learner\.lora\.targets=q_proj,k_proj,v_proj,gate_proj,up_proj: the",
        ),
    ],
    ids=["mixture", "fused projections"],
)
def test_a_model_that_cannot_be_adapted_is_refused_by_name(tmp_path: Path, config, fault):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=fault):
        make_learner(tmp_path, settings=ADAPTED)


def rank_main(rank: int, model_folder: Path, folder: Path) -> None:
    """Two steps with the base as reference, a checkpoint, a third step, and that again from the checkpoint."""
    torch.set_num_threads(1)
    mesh = join_group(str(folder / "rendezvous"), rank=rank, world_size=WORLD_SIZE)
    learner = make_learner(model_folder, mesh=mesh, settings=SHARDED, algorithm=REFERRING)
    metrics = [learner.step(microbatches(rank, WORLD_SIZE)) for _ in range(2)]
    second = full_parameters(learner)
    learner.save(folder / "checkpoint")
    learner.step(microbatches(rank, WORLD_SIZE))
    third = full_parameters(learner)
    offloaded = ADAPTED.model_copy(update={"offload": True})
    resumed = make_learner(model_folder, mesh=mesh, settings=offloaded, algorithm=REFERRING)
    resumed.load(folder / "checkpoint")
    resumed.step(microbatches(rank, WORLD_SIZE))
    assert all(torch.equal(tensor, third[name]) for name, tensor in full_parameters(resumed).items())
    save_file(second | {"measured": measured(metrics)}, folder / f"rank-{rank}.safetensors")
    leave_group()


def test_adapters_on_two_ranks_learn_what_they_do_in_one_process(model_folder: Path, tmp_path: Path):
    run_ranks(rank_main, model_folder, tmp_path, world_size=WORLD_SIZE)
    learner = make_learner(model_folder, settings=SHARDED, algorithm=REFERRING)
    metrics = [learner.step(microbatches(0, 1)) for _ in range(2)]
    assert metrics[1].tokens.kl_reference_k3 > 0
    for rank in range(WORLD_SIZE):
        found = load_file(tmp_path / f"rank-{rank}.safetensors")
        torch.testing.assert_close(found.pop("measured"), measured(metrics), rtol=1e-4, atol=1e-6)
        for name, tensor in full_parameters(learner).items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
    learner.load(tmp_path / "checkpoint")
    assert all(torch.equal(tensor, found[name]) for name, tensor in full_parameters(learner).items())
