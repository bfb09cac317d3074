"""Every objective, correction and estimator against a reference in plain float64: value, and gradient by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as trials
from hypothesis import strategies as st

from laminar_py.config.algorithm import (
    ALGORITHMS,
    PRESETS,
    Algorithm,
    AlgorithmConfig,
    Correction,
    Divergence,
    Objective,
    Proximal,
)
from laminar_py.config.section import ConfigError
from laminar_py.learner.losses import objectives
from laminar_py.learner.losses.loss import (
    distilled_advantages,
    penalised_advantages,
    policy_loss,
    proximal_logprobs,
)
from laminar_py.learner.losses.objectives import ESTIMATORS, LossInputs, try_objective
from laminar_py.records.columns import REFERENCE_LOGPROBS, Column, Dtype, Source

LENGTHS = (7, 1, 12, 4)
TOKENS = sum(LENGTHS)

# ratio, advantage, value of the objective, its gradient with respect to the new log-probability
CLIPPED = {
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


def unused(num_sequences, *, columns=None):
    """What these losses take nothing from, but for columns."""
    zeros = torch.zeros(num_sequences)
    return {"staleness": zeros, "rewards": zeros, "groups": zeros, "columns": columns or {}}


def make_loss_inputs(logprobs, others, sequence, *, columns=None):
    behaviour, proximal, advantages, weights = others
    return LossInputs(
        logprobs=logprobs,
        behaviour=behaviour,
        proximal=proximal,
        advantages=advantages,
        weights=weights,
        response=torch.tensor(sequence),
        **unused(len(LENGTHS), columns=columns),
    )


def one_token(ratio, advantage, weight, settings):
    logprobs = torch.tensor([math.log(ratio) - 3.0], requires_grad=True)
    drawn = torch.tensor([-3.0])
    sequence = torch.zeros(1, dtype=torch.long)
    terms = LossInputs(
        logprobs=logprobs,
        behaviour=drawn,
        proximal=drawn,
        advantages=torch.tensor([advantage]),
        weights=torch.tensor([weight]),
        response=sequence,
        **unused(1),
    )
    loss = policy_loss(terms, settings)
    loss.backward()
    return float(loss.detach()), float(logprobs.grad)


@pytest.mark.parametrize("case", CLIPPED)
def test_the_clipped_objective_of_one_token(case: str):
    ratio, advantage, value, slope = CLIPPED[case]
    settings = AlgorithmConfig(clip_high=0.28, importance_cap=2.0)
    loss, grad = one_token(ratio, advantage, 0.5, settings)
    assert loss == pytest.approx(-0.5 * value, rel=1e-5)
    assert grad == pytest.approx(-0.5 * slope, rel=1e-5)


def random_terms(seed):
    """Packed sequences; ratios reach far beyond every clip."""
    generator = np.random.default_rng(seed)
    behaviour = generator.normal(-2.0, 1.0, TOKENS)
    proximal = behaviour + generator.normal(0.0, 0.5, TOKENS)
    own = proximal + generator.normal(0.0, 0.4, TOKENS)
    sequence = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    weights = generator.uniform(0.01, 0.1, TOKENS)
    advantages = generator.normal(0.0, 1.0, len(LENGTHS))[sequence]
    return own, behaviour, proximal, advantages, weights, sequence


def means(values, sequence):
    """[T] mean over each sequence."""
    out = np.zeros(TOKENS)
    for index, length in enumerate(LENGTHS):
        out[sequence == index] = sum(values[sequence == index]) / length
    return out


def reference(settings, own, behaviour, proximal, advantages, weights, sequence):
    """Loss and gradient with respect to `own`, token by token, with scalars."""
    loss, grad = 0.0, np.zeros(TOKENS)
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    drift, mean_drift = proximal - behaviour, means(own - behaviour, sequence)
    mean_ratio = means(own - proximal, sequence)
    for t in range(TOKENS):
        ratio, a = math.exp(own[t] - proximal[t]), advantages[t]
        if settings.objective is Objective.WEIGHTED:
            factor = min(max(ratio, low), high)
            value, slope = factor * a * own[t], factor * a
        else:
            if settings.objective is Objective.SEQUENCE_CLIP:
                ratio = math.exp(mean_ratio[t])
            unclipped = min(ratio, settings.importance_cap or math.inf) * a
            held = min(max(ratio, low), high) * a
            value = min(unclipped, held)
            slope = unclipped if unclipped <= held else 0.0
        c, whole = math.exp(drift[t]), math.exp(mean_drift[t])
        bottom, top = settings.correction_low, settings.correction_high
        correction = {
            Correction.NONE: 1.0,
            Correction.TIS: min(c, top),
            Correction.MIS: c if c <= top else 0.0,
            Correction.ICEPOP: c if bottom <= c <= top else 0.0,
            Correction.SEQUENCE_MASK: float(bottom <= whole <= top),
            Correction.NEGATIVE_MASK: float(not (a < 0 and 1 / whole > top)),
        }[settings.correction]
        loss -= weights[t] * correction * value
        grad[t] = -weights[t] * correction * slope
    return loss, grad


NAMED = [AlgorithmConfig(name=name) for name in PRESETS if name != "tba"]  # see `test_packed_gradients`
BOUNDS = {"proximal": Proximal.RECOMPUTE, "correction_low": 0.8, "correction_high": 1.3}
CORRECTED = [AlgorithmConfig(correction=kind, **BOUNDS) for kind in Correction]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("settings", NAMED + CORRECTED, ids=lambda s: f"{s.name}-{s.correction}")
def test_a_loss_is_what_plain_float64_says(settings: AlgorithmConfig, seed: int):
    own, *others, sequence = arrays = random_terms(seed)
    logprobs = torch.tensor(own, requires_grad=True)
    drawn = [torch.tensor(array) for array in others]
    loss = policy_loss(make_loss_inputs(logprobs, drawn, sequence), settings)
    loss.backward()
    expected, slope = reference(settings, *arrays)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(logprobs.grad.numpy(), slope, rtol=1e-10, atol=1e-15)


PENALISED = [AlgorithmConfig(kl_coef=0.3, kl_estimator=kind) for kind in (Divergence.K2, Divergence.K3)]
BALANCED = AlgorithmConfig(name="tba")
EVERY = [*NAMED, *CORRECTED, *PENALISED, BALANCED]
NAMES = [f"{settings.name}-{settings.correction}-{settings.kl_estimator}" for settings in EVERY]


def gradient(settings, own, behaviour, proximal, reference, advantages):
    """Loss and gradient of two responses with half of the tokens each, in float32."""
    logprobs, half = torch.tensor(own, requires_grad=True), len(own) // 2
    terms = LossInputs(
        logprobs=logprobs,
        behaviour=torch.tensor(behaviour),
        proximal=torch.tensor(proximal),
        advantages=torch.tensor(advantages),
        weights=torch.full_like(logprobs.detach(), 0.25),
        response=torch.tensor([0] * half + [1] * half),
        log_partition=torch.tensor([0.5, 0.5]),
        **unused(2, columns={REFERENCE_LOGPROBS: torch.tensor(reference)}),
    )
    loss = policy_loss(terms, settings)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


FINITE = st.floats(-float(np.finfo(np.float32).max), 0.0, width=32) | st.floats(-200.0, 0.0, width=32)
FOUR = st.lists(FINITE, min_size=4, max_size=4)
ORDINARY = st.lists(st.floats(-9.0, 0.0, width=32), min_size=4, max_size=4)
BOTH_SIGNS = st.lists(st.floats(-3.0, 3.0, width=32), min_size=4, max_size=4)


@pytest.mark.parametrize("settings", EVERY, ids=NAMES)
@trials(max_examples=15, deadline=None)
@given(arrays=st.tuples(FOUR, FOUR, FOUR, FOUR, BOTH_SIGNS))
def test_no_finite_log_probability_makes_a_gradient_infinite(settings, arrays):
    assert gradient(settings, *arrays)[1].isfinite().all()


@pytest.mark.parametrize("settings", EVERY, ids=NAMES)
@trials(max_examples=15, deadline=None)
@given(arrays=st.tuples(ORDINARY, ORDINARY, ORDINARY, ORDINARY, BOTH_SIGNS))
def test_ordinary_log_probabilities_have_the_bits_of_ratios_without_a_bound(settings, arrays):
    bounded = gradient(settings, *arrays)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objectives, "LARGEST", math.inf)
        unbounded = gradient(settings, *arrays)
    assert all(map(torch.equal, bounded, unbounded))


@pytest.mark.parametrize("settings", EVERY, ids=NAMES)
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_token_whose_ratio_would_overflow_leaves_the_other_response_alone(settings, advantage):
    """89 nats: its exponential is infinite in float32. The gradient of the other response stays as it was."""
    sound = [
        [-1.0, -2.0, -1.5, -1.0],
        [-1.1, -1.9, -1.5, -1.2],
        [-1.1, -1.9, -1.5, -1.2],
        [-1.0] * 4,
        [advantage] * 4,
    ]
    far = [list(row) for row in sound]
    far[1][0] = far[2][0] = -90.0
    loss, found = gradient(settings, *far)
    assert loss.isfinite()
    assert found.abs().max() < 100 or settings.objective in (Objective.SEQUENCE_CLIP, Objective.BALANCE)
    assert torch.equal(found[2:], gradient(settings, *sound)[1][2:])


def test_gspo_has_the_gradient_of_the_geometric_mean_of_its_ratios():
    own, _, proximal, _, _, sequence = random_terms(0)
    logprobs = torch.tensor(proximal + 1e-3 * (own - proximal), requires_grad=True)
    lengths = torch.tensor(LENGTHS)
    weights = (1.0 / lengths / len(LENGTHS))[sequence].double()
    advantages = torch.tensor([1.0, -0.5, 0.7, -2.0], dtype=torch.float64)
    settings = AlgorithmConfig(name="gspo", clip_low=0.2, clip_high=0.2)
    drawn = torch.tensor(proximal)
    terms = LossInputs(
        logprobs=logprobs,
        behaviour=drawn,
        proximal=drawn,
        advantages=advantages[sequence],
        weights=weights,
        response=torch.tensor(sequence),
        **unused(len(LENGTHS)),
    )
    (found,) = torch.autograd.grad(policy_loss(terms, settings), logprobs)
    ratios = [part.mean().exp() for part in (logprobs - drawn).split(LENGTHS)]
    whole = -sum(ratio * a for ratio, a in zip(ratios, advantages, strict=True)) / len(LENGTHS)
    (expected,) = torch.autograd.grad(whole, logprobs)
    torch.testing.assert_close(found, expected)


def test_the_interpolated_policy_lies_nearer_to_the_behaviour_the_fresher_the_token():
    own, behaviour = torch.tensor([-1.0] * 4), torch.tensor([-2.0] * 4)
    staleness = torch.tensor([0, 1, 2, 4])
    found = proximal_logprobs(Proximal.INTERPOLATE, own, behaviour=behaviour, staleness=staleness, recomputed=None)
    assert found.tolist() == [-1.0, -2.0, -1.5, -1.25]


def test_a_teacher_adds_the_reverse_kl():
    own = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = distilled_advantages(torch.tensor([0.5, 0.5]), own, torch.tensor([-0.5, -4.0]), coef=2.0)
    assert found.tolist() == [1.5, -3.5]
    assert not found.requires_grad


@pytest.mark.parametrize("kind", [Divergence.K2, Divergence.K3])
def test_the_divergence_from_a_reference_is_part_of_the_loss(kind: Divergence):
    own, *others, sequence = random_terms(0)
    logprobs, reference = torch.tensor(own), torch.tensor(others[0] + 0.3)
    terms = make_loss_inputs(
        logprobs, map(torch.tensor, others), sequence, columns={REFERENCE_LOGPROBS: reference}
    )
    found = policy_loss(terms, AlgorithmConfig(kl_coef=0.7, kl_estimator=kind))
    without = policy_loss(terms, AlgorithmConfig())
    gap = others[0] + 0.3 - own
    expected = gap**2 / 2 if kind is Divergence.K2 else np.exp(gap) - gap - 1
    assert float(found - without) == pytest.approx(0.7 * float((others[3] * expected).sum()), rel=1e-9)


def test_k1_is_a_cost_in_the_advantage():
    own = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = penalised_advantages(torch.tensor([0.5, 0.5]), own, torch.tensor([-0.5, -4.0]), coef=2.0)
    assert found.tolist() == [1.5, -3.5]
    assert not found.requires_grad


@pytest.mark.parametrize("kind", [Divergence.K1, Divergence.K3])
def test_an_unbiased_estimator_has_the_divergence_as_its_mean(kind: Divergence):
    p, q = (torch.softmax(torch.randn(9, generator=torch.Generator().manual_seed(s)), 0) for s in (0, 1))
    expected = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * ESTIMATORS[kind](p.log(), q.log())).sum(), expected)


def test_k2_has_the_gradient_of_the_divergence():
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0), requires_grad=True)
    q = torch.softmax(torch.randn(9, generator=torch.Generator().manual_seed(1)), 0)
    logp = torch.log_softmax(logits, 0)
    (expected,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)
    estimate = (logp.exp().detach() * ESTIMATORS[Divergence.K2](logp, q.log())).sum()
    (found,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"importance_cap": 1.1}, "importance_cap=1.1"),
        ({"correction": Correction.TIS}, "correction=tis"),
        (
            {"correction": Correction.ICEPOP, "proximal": Proximal.RECOMPUTE, "correction_low": 3.0},
            "correction_low=3.0",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, field):
    with pytest.raises(ValueError, match=f"algorithm.{field}"):
        AlgorithmConfig(**settings)


class Twice(AlgorithmConfig):
    @property
    def columns(self):
        return (Column(name="hints"), Column(name="hints", dtype=Dtype.INT32))


class Referring(AlgorithmConfig):
    @property
    def columns(self):
        return (Column(name="hints", source=Source.REFERENCE),)


@pytest.mark.parametrize(
    ("settings", "words"),
    [(Twice, "declares column 'hints' twice"), (Referring, "column 'hints' cannot come from the reference")],
)
def test_columns_that_cannot_be_told_apart_or_that_nobody_gives_are_refused(settings, words):
    with pytest.raises(ValueError, match=f"algorithm.name=grpo: {words}"):
        settings()


def credited(terms, settings):
    return terms.columns["credit"] * terms.advantages * terms.logprobs


def broken(terms, settings):
    raise KeyError("credits")


def too_large(terms, settings):
    raise torch.OutOfMemoryError("CUDA out of memory")


OWN = Algorithm(objective=credited)
LARGE = Algorithm(objective=too_large)
BROKEN = Algorithm(objective=broken)
SCALAR = Algorithm(objective=lambda terms, settings: credited(terms, settings).sum())


def own_loss(monkeypatch, name):
    """The loss and its gradient, of an algorithm of this module."""
    monkeypatch.setitem(ALGORITHMS.built_in, "own", f"{__name__}:{name}")
    own, *others, sequence = random_terms(0)
    logprobs, credit = torch.tensor(own, requires_grad=True), torch.arange(float(TOKENS), dtype=torch.float64)
    terms = make_loss_inputs(logprobs, map(torch.tensor, others), sequence, columns={"credit": credit})
    loss = policy_loss(terms, AlgorithmConfig(name="own"))
    return torch.autograd.grad(loss, logprobs)[0], -terms.weights * credit * terms.advantages


def test_an_algorithms_own_objective_takes_the_place_of_the_built_in_one(monkeypatch):
    torch.testing.assert_close(*own_loss(monkeypatch, "OWN"))


@pytest.mark.parametrize(
    ("name", "words"), [("BROKEN", "raised KeyError: 'credits'"), ("SCALAR", "returned no tensor")]
)
def test_an_objective_that_fails_is_the_fault_of_its_package(monkeypatch, name, words):
    with pytest.raises(ConfigError, match=f"algorithm.name=own: its objective {words}"):
        own_loss(monkeypatch, name)


LOSS = """
def credited(inputs, settings):
    return inputs.advantages * inputs.logprobs

def broken(inputs, settings):
    return inputs.logprob

def summed(inputs, settings):
    return (inputs.advantages * inputs.logprobs).sum()

def constant(inputs, settings):
    return inputs.advantages
"""


def test_an_objective_may_be_a_function_in_a_file(tmp_path):
    file = tmp_path / "loss.py"
    file.write_text(LOSS)
    settings = AlgorithmConfig(objective=f"{file}:credited", clip_high=0.3)
    try_objective(settings, device=torch.device("cpu"))
    own, *others, sequence = random_terms(0)
    logprobs = torch.tensor(own, requires_grad=True)
    terms = make_loss_inputs(logprobs, map(torch.tensor, others), sequence)
    (gradient,) = torch.autograd.grad(policy_loss(terms, settings), logprobs)
    torch.testing.assert_close(gradient, -terms.weights * terms.advantages)


@pytest.mark.parametrize(
    ("objective", "fault"),
    [
        (
            "{}:broken",
            "its objective raised AttributeError: 'LossInputs' object has no attribute 'logprob'; mend it",
        ),
        ("{}:summed", "its objective returned no tensor of 4 numbers; return one for each trained token"),
        ("{}:constant", "its objective has no gradient; compute it from inputs.logprobs"),
        ("{}:clipped", "defines no function 'clipped'; define it or correct the name"),
        (
            "{}x.py:clipped",
            "no such file as .*; did you mean .*loss.py.* name a Python file, relative to the working directory",
        ),
    ],
)
def test_a_mistake_in_an_objective_of_ones_own_is_named_before_the_run(tmp_path, objective, fault):
    file = tmp_path / "loss.py"
    file.write_text(LOSS)
    with pytest.raises(ConfigError, match=f"algorithm.objective=.*loss.py.*{fault}"):
        try_objective(AlgorithmConfig(objective=objective.format(file)), device=torch.device("cpu"))


@pytest.mark.parametrize("objective", ["ppo", "loss.py", 3])
def test_an_objective_that_does_not_exist_is_refused(objective):
    with pytest.raises(ValueError, match=r"no such objective; choose clip, .*, or path/to/file\.py:function"):
        AlgorithmConfig(objective=objective)


def test_memory_that_an_objective_finds_used_up_is_no_fault_of_its_package(monkeypatch):
    with pytest.raises(torch.OutOfMemoryError):
        own_loss(monkeypatch, "LARGE")
