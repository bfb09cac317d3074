"""Sequences that share prefixes have the losses and gradients of the same sequences one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.learner.packing import layout
from laminar_py.learner.packing.packer import StepWeights, microbatch
from laminar_py.records.pieces import RoutedExperts, SamplingMask
from tests.depth import examples
from tests.learner.builders import VOCAB, assert_near, backward, make_learner, make_mixture_folder, referred
from tests.packing.test_layout import group, tree
from tests.records.test_spans import SPANS

ALGORITHMS = {
    "grpo": AlgorithmConfig(),
    "sequences": AlgorithmConfig(name="gspo"),
    "reference": AlgorithmConfig(kl_coef=0.1),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    return make_mixture_folder(tmp_path_factory.mktemp("mixture") / "model")


def drawn(items, *, seed=0):
    """With ids of the tiny model, and advantages."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            item,
            prompt_ids=item.prompt_ids % VOCAB,
            response_ids=item.response_ids % VOCAB,
            logprobs=rng.normal(-4.0, 0.3, len(item.response_ids)).astype(np.float32),
            advantage=float(rng.normal()),
        )
        for item in items
    ]


def results(folder, items, algorithm, monkeypatch, *, shares):
    """Loss, gradients and rows of one packed row, or of a row for each trajectory where nothing is shared."""
    weights = StepWeights(
        aggregation=algorithm.aggregation,
        num_trajectories=len(items),
        num_trained=sum(item.num_trained for item in items),
        groups=tuple(sorted({item.group_id for item in items})),
    )
    with monkeypatch.context() as patch:
        if not shares:
            patch.setattr(layout, "LEAST_STEM", 10**9)
        batches = [microbatch(bundle, weights) for bundle in ([items] if shares else [[item] for item in items])]
    learner = make_learner(folder, algorithm=algorithm)
    loss = backward(learner, referred(learner, batches))
    gradients = {name: value.grad for name, value in learner.model.named_parameters()}
    return loss, gradients, sum(batch.num_tokens for batch in batches)


def check(folder, items, monkeypatch, *, algorithm=ALGORITHMS["grpo"], saves=True):
    loss, gradients, rows = results(folder, items, algorithm, monkeypatch, shares=True)
    expected, apart, alone = results(folder, items, algorithm, monkeypatch, shares=False)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_near(gradients, apart, rel=1e-5)
    assert not saves or rows < alone


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_samples_that_share_a_prompt(model_folder, monkeypatch, algorithm):
    items = drawn([*group(5, 40, [9, 30, 1, 17, 12]), *group(3, 25, [4, 8, 6], seed=1, name="g1")])
    check(model_folder, items, monkeypatch, algorithm=ALGORITHMS[algorithm])


def test_samples_with_masks_of_environments_and_of_sampling(model_folder, monkeypatch):
    items = drawn(group(4, 40, [9, 30, 8, 17]))
    items[1] = replace(items[1], loss_mask=np.arange(30) % 3 > 0)
    for place in (0, 2):
        ids = np.sort((items[place].response_ids[:, None] + np.arange(3)) % VOCAB).astype(np.int32)
        items[place] = replace(
            items[place], sampling_mask=SamplingMask(np.full(len(ids), 3, np.int32), ids.ravel())
        )
    check(model_folder, items, monkeypatch)


@pytest.mark.parametrize("parts_at", [None, 25])
def test_samples_of_a_mixture_with_the_experts_that_were_recorded(mixture, monkeypatch, parts_at):
    rng = np.random.default_rng(0)
    items = drawn(group(4, 40, [9, 30, 8, 17]))
    of_prompt = rng.random((40, 2, 8)).argsort(-1)[..., :2]
    for place, item in enumerate(items):
        own = rng.random((40 + len(item.response_ids) - 1, 2, 8)).argsort(-1)[..., :2]
        shared = 40 if parts_at is None else parts_at
        own[:shared] = of_prompt[:shared]
        data = own.astype(np.uint8).tobytes()
        experts = RoutedExperts(start=0, layers=2, top_k=2, width=1, data=data)
        items[place] = replace(item, routed_experts=experts)
    check(mixture, items, monkeypatch)


@pytest.mark.slow
def test_a_group_of_sixteen_with_a_long_prompt(tmp_path, monkeypatch):
    folder = make_mixture_folder(tmp_path / "model")
    lengths = np.random.default_rng(0).integers(50, 400, 16).tolist()
    check(folder, drawn(group(16, 2000, lengths)), monkeypatch)


@settings(max_examples=examples(100), deadline=None)
@given(SPANS, SPANS)
def test_conversations_that_branch(model_folder, first, second):
    items = drawn([tree(first), tree(second, seed=1)])
    items[1] = replace(items[1], prompt_ids=items[0].prompt_ids)
    with pytest.MonkeyPatch.context() as patch:
        check(model_folder, items, patch, saves=False)
