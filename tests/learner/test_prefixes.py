"""Sequences that share prefixes have the losses and gradients of the same sequences one by one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from msgspec.structs import replace

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.learner import Attention, Recompute
from laminar_py.learner import attention
from laminar_py.learner.attention import register_kernel
from laminar_py.learner.layers import compile_layers, recompute_activations
from laminar_py.learner.packing import layout
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import StepWeights, microbatch
from laminar_py.records.pieces import RoutedExperts, SamplingMask
from tests.depth import examples
from tests.learner.builders import VOCAB, assert_near, backward, make_learner, make_mixture_folder, referred
from tests.packing.test_layout import group, tree, weights_of
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


def results(folder, items, algorithm, monkeypatch, *, shares, max_tokens=None):
    """Loss, gradients and rows of one packed row, or of a row for each trajectory where nothing is shared.

    With `max_tokens` the packer's rows of so many.
    """
    weights = StepWeights(
        aggregation=algorithm.aggregation,
        num_trajectories=len(items),
        num_trained=sum(item.num_trained for item in items),
        groups=tuple(sorted({item.group_id for item in items})),
    )
    with monkeypatch.context() as patch:
        if not shares:
            patch.setattr(layout, "LEAST_STEM", 10**9)
        bundles = [items] if shares else [[item] for item in items]
        if max_tokens is not None:
            bundles = [each.trajectories for each in fit_bins(items, max_tokens=max_tokens)]
        batches = [microbatch(bundle, weights) for bundle in bundles]
        assert max_tokens is None or all(batch.num_tokens <= max_tokens for batch in batches)
    learner = make_learner(folder, algorithm=algorithm)
    loss = backward(learner, referred(learner, batches))
    gradients = {name: value.grad for name, value in learner.model.named_parameters()}
    return loss, gradients, sum(batch.num_tokens for batch in batches)


def check(folder, items, monkeypatch, *, algorithm=ALGORITHMS["grpo"], saves=True, max_tokens=None):
    loss, gradients, rows = results(folder, items, algorithm, monkeypatch, shares=True, max_tokens=max_tokens)
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
    items[0], items[2] = with_mask(items[0]), with_mask(items[2])
    check(model_folder, items, monkeypatch)


def with_mask(item):
    """Drawn from three tokens each."""
    ids = np.sort((item.response_ids[:, None] + np.arange(3)) % VOCAB).astype(np.int32)
    return replace(item, sampling_mask=SamplingMask(np.full(len(ids), 3, np.int32), ids.ravel()))


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


def in_one_graph(q, k, v, segments, scale):
    """Attention by a mask of all queries and keys, which the compiler traces as it does the kernels of a GPU."""
    ends, key_ends = segments.cu_queries[1:], segments.cu_keys[1:]
    queries, keys = torch.arange(q.shape[0]), torch.arange(k.shape[0])
    of_query, of_key = (torch.bucketize(x, at, right=True) for x, at in ((queries, ends), (keys, key_ends)))
    left, key_left = ends[of_query] - queries, key_ends[of_key] - keys
    seen = (of_query[:, None] == of_key) & (key_left >= left[:, None])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Recompute.NONE, Recompute.SELECTIVE, Recompute.ALL])
def test_compiled_layers_of_shared_rows(model_folder, monkeypatch, kind):
    """Rows of three sizes, the second without shared tokens, so that the compiler sees new shapes."""
    torch._dynamo.reset()
    groups = [group(4, 40, [9, 30, 8, 17]), group(2, 8, [5, 11], seed=1), group(5, 70, [12, 7, 30, 4, 9], seed=2)]
    batches = [microbatch(items, weights_of(items)) for items in map(drawn, groups)]
    assert [batch.parents is None for batch in batches] == [False, True, False]
    plain, compiled = make_learner(model_folder), make_learner(model_folder)
    monkeypatch.setitem(attention.KERNELS, Attention.SDPA, in_one_graph)  # after the check of kernels
    register_kernel(Attention.SDPA)
    recompute_activations(compiled.model, kind)
    compile_layers(compiled.model)
    found, expected = ([backward(learner, [batch]) for batch in batches] for learner in (compiled, plain))
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    gradients, of_plain = (
        {name: value.grad for name, value in learner.model.named_parameters()} for learner in (compiled, plain)
    )
    assert_near(gradients, of_plain, rel=1e-5)


@settings(max_examples=examples(100), deadline=None)
@given(SPANS, SPANS)
def test_conversations_that_branch(model_folder, first, second):
    items = drawn([tree(first), tree(second, seed=1)])
    items[1] = replace(items[1], prompt_ids=items[0].prompt_ids)
    with pytest.MonkeyPatch.context() as patch:
        check(model_folder, items, patch, saves=False)
        longest = max(path.num_tokens(len(item.prompt_ids)) for item in items for path in item.token_paths)
        check(model_folder, items, patch, saves=False, max_tokens=longest)


TURNS = [(6, 3, False, 0), (2, None, False, 0), (8, 3, False, 0), (3, None, True, 43), (7, 3, False, 0)]
"""A turn, an observation and a second turn; then another observation behind the first turn, and its turn."""


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("algorithm", ["grpo", "reference"])
def test_samples_that_are_conversations_which_branch(model_folder, monkeypatch, algorithm, max_tokens):
    """Three conversations of one prompt, masked where an environment wrote, and a sample of one turn."""
    items = [tree([*TURNS, (5, 3, True, seed)], prompt=64, seed=seed) for seed in range(3)]
    items = [replace(item, prompt_ids=items[0].prompt_ids, group_id="g0") for item in items]
    items += [replace(item, prompt_ids=items[0].prompt_ids) for item in group(1, 64, [20])]
    items = drawn(items)
    items[2] = with_mask(items[2])
    check(model_folder, items, monkeypatch, algorithm=ALGORITHMS[algorithm], max_tokens=max_tokens)
