"""What a step did to its tokens, against numbers worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.learner.losses.objectives import LossInputs
from laminar_py.learner.metrics import TokenSums

CPU = torch.device("cpu")


def terms(ratios, *, drifts=None, weights=None, advantages=None, lengths=None, staleness=None):
    """Tokens with these ratios of new to proximal, and of proximal to behaviour policy (1)."""
    count = len(ratios)
    behaviour = torch.full((count,), -3.0)
    proximal = behaviour + torch.tensor(drifts or [1.0] * count).log()
    sequence = torch.repeat_interleave(torch.tensor(lengths or [count]))
    return LossInputs(
        logprobs=proximal + torch.tensor(ratios).log(),
        behaviour=behaviour,
        proximal=proximal,
        advantages=torch.tensor(advantages or [1.0] * count),
        weights=torch.tensor(weights or [1.0 / count] * count),
        response=sequence,
        staleness=torch.tensor(staleness or [0] * count),
        rewards=torch.zeros(len(lengths or [count])),
        groups=torch.zeros(len(lengths or [count])),
        columns={},
    )


def add(sums, given, *, settings=None, **more):
    count = len(given.weights)
    sums.add(
        given,
        entropy=torch.arange(count, dtype=torch.float32),
        settings=settings or AlgorithmConfig(clip_high=0.28, importance_cap=2.0),
        **more,
    )


def test_means_have_the_loss_weights_of_their_tokens():
    sums = TokenSums(CPU)
    add(sums, terms([1.0, 1.5, 0.5, 5.0], weights=[0.4, 0.3, 0.2, 0.1], advantages=[1.0, -1.0, 0.0, 2.0]))
    found = sums.tokens()
    assert found.num_tokens == 4
    assert found.clip_fraction == pytest.approx(0.6)
    assert found.importance_capped_fraction == pytest.approx(0.1)
    assert found.ratio == pytest.approx(0.4 + 0.3 * 1.5 + 0.2 * 0.5 + 0.1 * 5.0)
    assert found.ratio_deviation == pytest.approx(0.3 * 0.5 + 0.2 * 0.5 + 0.1 * 4.0)
    assert found.entropy == pytest.approx(0.3 * 1 + 0.2 * 2 + 0.1 * 3)
    assert found.advantage_mean == pytest.approx(0.3)
    assert found.advantage_std == pytest.approx(math.sqrt(0.4 + 0.3 + 0.4 - 0.09))


def test_divergences_are_from_the_policy_named_first_on_its_own_tokens():
    sums = TokenSums(CPU)
    add(sums, terms([2.0, 1.0], drifts=[1.0, 0.5]))
    found = sums.tokens()
    assert found.kl_proximal_k1 == pytest.approx(-math.log(2) / 2)
    assert found.kl_proximal_k3 == pytest.approx((1 - math.log(2)) / 2)
    assert found.kl_behaviour_k1 == pytest.approx(0.0, abs=1e-7)
    assert found.kl_behaviour_k3 == pytest.approx(((1 - math.log(2)) + (-0.5 + math.log(2))) / 2)


def test_the_effective_share_is_that_of_the_weights():
    sums = TokenSums(CPU)
    add(sums, terms([3.0, 1.0, 1.0, 1.0]))
    assert sums.tokens().effective_share == pytest.approx(36 / (4 * 12))


def test_tokens_are_told_apart_by_how_old_they_are():
    sums = TokenSums(CPU)
    add(sums, terms([1.0] * 8, staleness=[0, 1, 2, 3, 4, 5, 8, 9]))
    counts = {name: one.num_tokens for name, one in sums.by_staleness().items()}
    assert counts == {"0": 1, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9+": 1}


def test_the_largest_ratio_and_advantage_are_of_any_token_of_that_age():
    sums = TokenSums(CPU)
    add(sums, terms([1.0, 3.0, 0.5], advantages=[0.5, 1.0, -2.0], staleness=[0, 1, 1]))
    add(sums, terms([2.0], advantages=[0.1]))
    assert (sums.tokens().ratio_max, sums.tokens().advantage_max) == pytest.approx((3.0, 2.0))
    fresh, older = (sums.by_staleness()[name] for name in ("0", "1"))
    assert (fresh.ratio_max, fresh.advantage_max) == pytest.approx((2.0, 0.5))
    assert (older.ratio_max, older.advantage_max) == pytest.approx((3.0, 2.0))


def test_the_mismatch_is_that_of_fresh_tokens_before_the_first_update():
    sums = TokenSums(CPU)
    add(sums, terms([math.exp(1e-4)] * 99 + [math.exp(1e-2), math.exp(1.0)], staleness=[0] * 100 + [1]))
    add(sums, terms([math.exp(3.0)]), at_step_start=False)
    found = sums.mismatch()
    assert found.max == pytest.approx(1e-2, rel=1e-3)
    assert found.mean == pytest.approx((99e-4 + 1e-2) / 100, rel=1e-2)
    assert 1e-4 <= found.p99 <= 1.34e-4


def test_a_clip_of_whole_sequences_counts_their_own_ratio():
    settings = AlgorithmConfig(name="gspo", clip_low=0.1, clip_high=0.1)
    sums = TokenSums(CPU)
    add(sums, terms([2.0, 0.5, 1.3, 1.3], lengths=[2, 2]), settings=settings)
    assert sums.tokens().clip_fraction == pytest.approx(0.5)


def test_parts_that_were_counted_apart_merge():
    whole, first, second = TokenSums(CPU), TokenSums(CPU), TokenSums(CPU)
    for sums, given in ((first, terms([1.1, 0.9])), (second, terms([2.0]))):
        add(sums, given)
        add(whole, given)
    first.merge(second)
    assert first.tokens() == whole.tokens()
    assert first.mismatch() == whole.mismatch()


def test_large_advantages_have_a_deviation_and_what_overflows_is_told_as_it_is():
    sums = TokenSums(CPU)
    add(sums, terms([1.0, 1.0], advantages=[1e30, -1e30]))
    assert sums.tokens().advantage_std == pytest.approx(1e30)
    add(sums, terms([math.exp(80.0)] * 2, drifts=[math.exp(80.0)] * 2, advantages=[math.nan] * 2))
    found = sums.tokens()
    assert math.isnan(found.advantage_std)
    beyond = terms([1.0])
    add(sums, replace(beyond, logprobs=beyond.behaviour + 500.0))  # more than a power of floats can be
    assert not math.isfinite(sums.tokens().effective_share)
