"""The reference model as a stage before the packer is the one inside the learner."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

import laminar_py.learner.reference as reference
from laminar_py.config.algorithm import AlgorithmConfig, Divergence, ReferencePass
from laminar_py.config.section import ConfigError
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.model import load_frozen
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import deal_to_ranks, microbatch, step_weights
from laminar_py.learner.reference import FrozenModel
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, token_values
from laminar_py.records.pieces import SamplingMask
from laminar_py.records.spans import Span
from tests.builders import make_trajectory
from tests.learner.builders import VOCAB, make_learner, make_model_folder, referred
from tests.stored import at_ranks

TEMPERATURE = 0.7
CASES = {f"kl {kind}": AlgorithmConfig(kl_coef=0.3, kl_estimator=kind) for kind in Divergence} | {
    "balance": AlgorithmConfig(name="tba"),
    "balance and kl, two updates": AlgorithmConfig(name="tba", kl_coef=0.3, updates_per_step=2),
}


def masked(item):
    """Drawn from its own tokens and one more each."""
    ids = np.stack([item.response_ids, (item.response_ids + 7) % VOCAB], axis=1)
    return replace(item, sampling_mask=SamplingMask(np.full(len(ids), 2, np.int32), ids.ravel().astype(np.int32)))


def samples():
    """Three groups of three; one group was drawn from a cut vocabulary."""
    items = [
        make_trajectory(f"g{i % 3}.{i}", prompt=2 + i, response=5 + 6 * i, seed=i, reward=i % 2, advantage=i - 4)
        for i in range(9)
    ]
    return [masked(item) if item.group_id == "g1" else item for item in items]


def batches_of(items, algorithm, *, ranks=1):
    """As they reach the learner, by reference and over the wire."""
    bins = fit_bins(items, max_tokens=100)
    terms = step_weights(bins, aggregation=algorithm.aggregation, columns=algorithm.packed_columns)
    packed = deal_to_ranks(bins, terms, max_tokens=100, ranks=ranks, attention_share=0.0)
    return at_ranks(packed)


@pytest.fixture
def stage(tmp_path):
    """Runs the stage's model, on some trajectories a pass."""

    def answer(items, *, together=2, max_tokens=1000, name=REFERENCE_LOGPROBS):
        mesh = join_group(str(tmp_path / "rendezvous"), rank=0, world_size=1)
        try:
            model = FrozenModel(
                folder, vocab_size=VOCAB, temperature=TEMPERATURE, max_tokens=max_tokens, mesh=mesh
            )
            passes = [items[start : start + together] for start in range(0, len(items), together)]
            found = [logprobs for one in passes for logprobs in model.logprobs(one)]
        finally:
            leave_group()
        return [replace(item, columns={name: token_values(own)}) for item, own in zip(items, found, strict=True)]

    folder = make_model_folder(tmp_path / "reference", seed=1)
    answer.folder = folder
    return answer


def test_a_teachers_column_is_its_own_forward_at_the_temperature_of_the_rollout(stage):
    items = [item for item in samples() if item.sampling_mask is None]
    plain = AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float64)
    for item, taught in zip(items, stage(items, name=TEACHER_LOGPROBS), strict=True):
        ids = torch.from_numpy(np.concatenate([item.prompt_ids, item.response_ids]).astype(np.int64))
        with torch.no_grad():
            logits = plain(ids[None]).logits[0] / TEMPERATURE
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[len(item.prompt_ids) - 1 :, 0]
        assert np.abs(taught.columns[TEACHER_LOGPROBS].array - expected.numpy()).max() < 1e-5


@pytest.mark.parametrize(
    ("field", "rows", "fits"),
    [
        ("algorithm.reference", VOCAB + 1, False),
        ("algorithm.teacher", VOCAB + 1, True),
        ("algorithm.teacher", VOCAB - 1, False),
    ],
)
def test_a_teacher_may_have_more_unused_rows_than_the_policy(tmp_path, field, rows, fits):
    folder = make_model_folder(tmp_path / "m", vocab=rows)
    refused = pytest.raises(ConfigError, match=rf"^{field}=.*: has a vocabulary of {rows} tokens, the policy one")
    with nullcontext() if fits else refused:
        load_frozen(folder, field=field, vocab_size=VOCAB, temperature=1.0, device=torch.device("cpu"))


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_a_reference_in_the_learner(model_folder, stage, monkeypatch, case):
    inside = AlgorithmConfig(**{**CASES[case].model_dump(), "reference": stage.folder})
    before = AlgorithmConfig(**{**inside.model_dump(), "reference_pass": ReferencePass.STAGE})
    items = stage(samples())
    found = []
    for algorithm in (inside, before):
        learner = make_learner(model_folder, algorithm=algorithm, temperature=TEMPERATURE)
        gradients = []
        update = learner._optimizer.update

        def keep(step, *, loss, learner=learner, gradients=gradients, update=update):
            gradients.extend(parameter.grad.clone() for parameter in learner.model.parameters())
            return update(step, loss=loss)

        monkeypatch.setattr(learner._optimizer, "update", keep)
        [batches] = batches_of(items, algorithm)
        found.append((learner.step(batches), gradients))
    (own, own_gradients), (sent, gradients) = found
    assert sent.loss == pytest.approx(own.loss, abs=1e-6, rel=1e-6)
    assert len(gradients) == len(own_gradients) > 0
    for grad, expected in zip(gradients, own_gradients, strict=True):
        assert (grad - expected).norm() <= 1e-6 * max(1.0, float(expected.norm()))
    assert sent.tokens.kl_reference_k3 == pytest.approx(own.tokens.kl_reference_k3, rel=1e-5)
    assert own.reference_s > sent.reference_s


def test_a_tree_above_a_row_is_cut_for_the_stage_as_for_the_learner(stage, monkeypatch):
    """Two answers of 20 tokens behind the same 30, of which a row of 60 holds one; an own sequence holds 70."""
    spans = (Span(3, 0, 30), Span(3, 30, 50, follows=30), Span(3, 50, 70, follows=30))
    tree, long = (make_trajectory(f"{name}.0", prompt=5, response=70) for name in "ab")
    tree, rows = replace(tree, spans=spans), []

    def keep(batch):
        rows.append(batch.num_tokens)
        return batch

    monkeypatch.setattr(reference, "microbatch", lambda *given: keep(microbatch(*given)))
    whole, cut = stage([tree, long]), stage([tree, long], max_tokens=60)
    assert rows == [75 + 75 + 1, 55, 55, 75]
    for one, other in zip(whole, cut, strict=True):
        expected, found = (item.columns[REFERENCE_LOGPROBS].array for item in (one, other))
        assert np.count_nonzero(expected) == 70
        assert np.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_step_asks_its_reference_once_for_each_microbatch(model_folder, stage, case):
    algorithm = AlgorithmConfig(**{**CASES[case].model_dump(), "reference": stage.folder})
    learner = make_learner(model_folder, algorithm=algorithm)
    asked = []
    learner._reference.model.base_model.register_forward_hook(lambda *_: asked.append(1))
    [batches] = batches_of(samples(), algorithm)
    learner.step(batches)
    assert len(batches) > 1
    assert len(asked) == len(batches)


def test_microbatches_with_their_reference_are_sliced_as_they_are(model_folder, stage):
    algorithm = AlgorithmConfig(kl_coef=0.1, reference=stage.folder)
    learner = make_learner(model_folder, algorithm=algorithm)
    [batches] = batches_of(samples(), algorithm)
    whole = referred(learner, batches)
    for one, other in zip(whole[1::2], list(whole)[1::2], strict=True):
        assert np.array_equal(one.input_ids, other.input_ids)
        assert np.array_equal(one.columns[REFERENCE_LOGPROBS], other.columns[REFERENCE_LOGPROBS])


def test_a_rank_with_nothing_to_train_takes_part(model_folder, stage):
    """One trajectory for two ranks: the other one's microbatch has a reference of its own length too."""
    algorithm = AlgorithmConfig(
        name="tba", kl_coef=0.1, reference=stage.folder, reference_pass=ReferencePass.STAGE
    )
    [item] = stage(samples()[:1])
    for batches in batches_of([item], algorithm, ranks=2):
        assert all(batch.columns[REFERENCE_LOGPROBS].shape == batch.input_ids.shape for batch in batches)
        learner = make_learner(model_folder, algorithm=algorithm)
        assert learner._reference is None
        trains = any(np.count_nonzero(batch.loss_weights) for batch in batches)
        assert np.isfinite(learner.step(batches).loss) == trains
