"""The policy loss against numbers worked out by hand: clip [0.8, 1.28], cap 2."""

import math

import pytest
import torch

from laminar_py.learner.loss import grpo_loss

# ratio, advantage, value of the objective, its gradient with respect to the new log-probability
CASES = {
    "inside, good": (1.1, 2.0, 2.2, 2.2),
    "inside, bad": (0.9, -2.0, -1.8, -1.8),
    "on policy": (1.0, 1.0, 1.0, 1.0),
    "good and above the clip: no gradient": (1.5, 2.0, 2.56, 0.0),
    "bad and below the clip: no gradient": (0.5, -2.0, -1.6, 0.0),
    "good and below the clip: full gradient": (0.5, 2.0, 1.0, 1.0),
    "bad and above the clip: the ratio itself": (1.5, -2.0, -3.0, -3.0),
    "bad and above the cap: weight 2": (5.0, -2.0, -4.0, -4.0),
    "good and above the cap: the clip holds": (5.0, 2.0, 2.56, 0.0),
}


def loss_of(ratios, advantages, weights, **overrides):
    logprobs = torch.tensor([math.log(r) - 3.0 for r in ratios], requires_grad=True)
    settings = {"clip_low": 0.2, "clip_high": 0.28, "importance_cap": 2.0} | overrides
    result = grpo_loss(
        logprobs,
        behaviour_logprobs=torch.full((len(ratios),), -3.0),
        advantages=torch.tensor(advantages),
        loss_weights=torch.tensor(weights),
        **settings,
    )
    result.loss.backward()
    return result, logprobs.grad


@pytest.mark.parametrize("case", CASES)
def test_objective_and_gradient_of_one_token(case: str):
    ratio, advantage, value, slope = CASES[case]
    result, grad = loss_of([ratio], [advantage], [0.5])
    assert float(result.loss.detach()) == pytest.approx(-0.5 * value, rel=1e-5)
    assert float(grad) == pytest.approx(-0.5 * slope, rel=1e-5)


def test_metrics_are_weighted_sums_over_trained_tokens():
    result, _ = loss_of([1.0, 1.5, 0.5, 5.0, 9.0], [1.0] * 5, [0.4, 0.3, 0.2, 0.1, 0.0])
    assert float(result.clip_fraction) == pytest.approx(0.6)
    assert float(result.truncated_fraction) == pytest.approx(0.1)
    assert float(result.ratio_deviation) == pytest.approx(0.3 * 0.5 + 0.2 * 0.5 + 0.1 * 4.0)


def test_a_token_without_weight_changes_nothing():
    alone, _ = loss_of([1.1], [2.0], [0.5])
    beside, grad = loss_of([1.1, 1e20], [2.0, -3.0], [0.5, 0.0])
    assert torch.equal(alone.loss, beside.loss)
    assert float(grad[1]) == 0.0


def test_a_cap_below_the_clip_is_refused():
    with pytest.raises(AssertionError, match="importance_cap"):
        loss_of([1.0], [1.0], [1.0], importance_cap=1.1)
