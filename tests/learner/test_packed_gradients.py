"""Law 5: a packed batch has the loss and the gradients of its sequences one by one."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import asdict
from transformers import AutoModelForCausalLM

from laminar_py.config.algorithm import Aggregation, AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.losses.loss import estimate_partition
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import Packed, deal_to_ranks, step_weights
from laminar_py.learner.packing.packer import pack as pack_step
from laminar_py.learner.step import Learner
from tests.builders import make_trajectory
from tests.learner.builders import (
    LENGTHS,
    SETTINGS,
    backward,
    make_learner,
    make_model_folder,
    make_sequences,
    pack,
    referred,
)
from tests.stored import at_ranks


def gradients(learner, microbatches):
    """Loss and gradients [each parameter] of the microbatches together."""
    loss = backward(learner, microbatches)
    grads = [parameter.grad.clone() for parameter in learner.model.parameters()]
    learner.model.zero_grad()
    return loss, grads


@pytest.mark.parametrize("lengths", [LENGTHS, (2, 2), (64, 1 + 64, 31, 90)])
def test_packed_loss_and_gradients_equal_those_one_by_one(model_folder: Path, lengths):
    learner = make_learner(model_folder)
    sequences = make_sequences(lengths)
    packed_loss, packed = gradients(learner, [pack(sequences, num_total=len(sequences))])
    alone = [pack([sequence], num_total=len(sequences)) for sequence in sequences]
    alone_loss, expected = gradients(learner, alone)
    assert packed_loss == pytest.approx(alone_loss, rel=1e-6)
    for grad, reference in zip(packed, expected, strict=True):
        assert (grad - reference).norm() <= 1e-6 * reference.norm()


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_step_from_the_packer_over_the_wire_is_that_of_its_sequences_one_by_one(model_folder: Path, aggregation):
    items = [make_trajectory(f"g{i}.0", prompt=3, response=5 + 7 * i, seed=i, advantage=i - 2) for i in range(6)]
    packed = pack_step(items, max_tokens=64, ranks=1, aggregation=aggregation, attention_share=0.01)
    [batches] = at_ranks(packed)
    alone = Packed([[[item] for item in items]], packed.weights).microbatches(0)
    assert 1 < len(batches) < len(items)
    one = make_learner(model_folder).step(batches)
    other = make_learner(model_folder).step(alone)
    assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
    assert asdict(one.tokens) == pytest.approx(asdict(other.tokens), rel=1e-5)


def test_microbatches_that_are_written_when_needed_give_the_very_same_loss(model_folder: Path):
    items = [make_trajectory(f"g{i}.0", response=5 + 7 * i, seed=i, advantage=i - 2) for i in range(6)]
    packed = pack_step(items, max_tokens=64, ranks=1, aggregation=Aggregation.SEQUENCE_MEAN, attention_share=0.01)
    lazy = make_learner(model_folder).step(packed.microbatches(0))
    ahead = make_learner(model_folder).step(list(packed.microbatches(0)))
    assert (lazy.loss, lazy.grad_norm) == (ahead.loss, ahead.grad_norm)


def test_packed_logprobs_equal_those_of_plain_transformers(model_folder: Path):
    learner = make_learner(model_folder)
    sequences = make_sequences()
    logprobs, entropy = policy_logprobs(learner.model, pack(sequences, num_total=1))
    plain = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager", dtype=torch.float32)
    start = 0
    for sequence in sequences:
        ids = torch.tensor(sequence.ids)
        reference = torch.log_softmax(plain(ids[None]).logits[0], dim=-1)
        rows = slice(start, start + len(ids) - 1)
        torch.testing.assert_close(logprobs[rows], reference[:-1].gather(1, ids[1:, None])[:, 0])
        torch.testing.assert_close(entropy[rows], -(reference.exp() * reference).sum(-1)[:-1])
        start += len(ids)


def test_tokens_of_one_sequence_do_not_see_another(model_folder: Path):
    learner = make_learner(model_folder)
    first, second = make_sequences((20, 20))
    _, other = make_sequences((20, 20), seed=1)
    one, _ = policy_logprobs(learner.model, pack([first, second], num_total=1))
    two, _ = policy_logprobs(learner.model, pack([other, second], num_total=1))
    assert torch.equal(one[20:], two[20:])
    assert not torch.equal(one[:19], two[:19])


def test_temperature_divides_the_logits(model_folder: Path):
    learner = Learner(ModelConfig(path=model_folder), LearnerConfig(), AlgorithmConfig(), temperature=0.5, seed=0)
    (sequence,) = make_sequences((12,))
    logprobs, _ = policy_logprobs(learner.model, pack([sequence], num_total=1))
    ids = torch.tensor(sequence.ids)
    plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    reference = torch.log_softmax(plain(ids[None]).logits[0] / 0.5, dim=-1)
    torch.testing.assert_close(logprobs[:-1], reference[:-1].gather(1, ids[1:, None])[:, 0])


@pytest.mark.parametrize("recompute", [Recompute.ALL, Recompute.SELECTIVE, Recompute.ALL_OFFLOADED])
def test_activations_that_are_computed_again_give_the_very_same_gradients(model_folder: Path, recompute):
    batch = pack(make_sequences(), num_total=6)
    plain = make_learner(model_folder)
    again = make_learner(model_folder, settings=SETTINGS.model_copy(update={"recompute": recompute}))
    calls = []
    again.model.base_model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    loss, grads = gradients(again, [batch])
    assert len(calls) == 2, "once forward, once backward"
    expected_loss, expected = gradients(plain, [batch])
    assert loss == expected_loss
    assert all(torch.equal(one, other) for one, other in zip(grads, expected, strict=True))


@pytest.mark.parametrize("max_tokens", [64, 256])
def test_trajectory_balance_has_the_gradient_of_the_variance_in_each_group(model_folder, tmp_path, max_tokens):
    """However its groups lie in microbatches. VarGrad: mean over responses of d - mean d, squared."""
    reference = make_model_folder(tmp_path / "reference", seed=1)
    algorithm = AlgorithmConfig(name="tba", reference=reference, beta=0.5)
    shape = [(f"g{i % 3}.{i}", 5 + 4 * i, i) for i in range(9)]
    items = [make_trajectory(n, prompt=3, response=length, seed=i, reward=i % 2) for n, length, i in shape]
    bins = fit_bins(items, max_tokens=max_tokens)
    terms = step_weights(bins, aggregation=algorithm.aggregation)
    batches = list(deal_to_ranks(bins, terms, max_tokens=max_tokens, ranks=1, attention_share=0.0).microbatches(0))
    learner = make_learner(model_folder, algorithm=algorithm)
    batches = referred(learner, batches)
    partition = estimate_partition(learner.model, batches, algorithm, Ranks(None))
    loss = backward(learner, batches, partition)
    found = [parameter.grad.clone() for parameter in learner.model.parameters()]
    learner.model.zero_grad()

    def imbalance(item):
        alone = Packed([[[item]]], terms).microbatches(0)[0]
        with torch.no_grad():
            fixed, _ = policy_logprobs(learner._reference.model, alone)
        own, _ = policy_logprobs(learner.model, alone)
        return (own - fixed)[alone.loss_weights > 0].sum() - item.reward / 0.5

    groups = [torch.stack([imbalance(item) for item in items if item.group_id == f"g{g}"]) for g in range(3)]
    expected = sum(((d - d.mean()) ** 2).sum() for d in groups) / len(items)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-4)
    for grad, parameter in zip(found, learner.model.parameters(), strict=True):
        assert (grad - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-7
