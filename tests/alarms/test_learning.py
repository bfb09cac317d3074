"""A step's proof against its batch: what is wrong is named, and what is right is not."""

import math

import msgspec
import numpy as np
import pytest

from laminar_py.config.algorithm import Aggregation, AlgorithmConfig
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.rollout import SamplingConfig
from laminar_py.control.alarms.learning import StepCheck
from laminar_py.control.consumption import StepBatch
from laminar_py.records.metrics import CriticFigures, Mismatch, StepMetrics, TokenMetrics
from laminar_py.records.proofs import ExactTokens, GradientSums, StepProof, id_sum
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason, Kind, TrajectoryRef

CAP = 100
STILL = TokenMetrics(kl_behaviour_k1=0.0)


def trajectory(name: str, tokens: int, advantage: float, *, weight: float = 1.0) -> TrajectoryRef:
    return TrajectoryRef(
        id=name,
        prompt_id="p",
        group_id="g",
        sample_index=0,
        kind=Kind.TRAIN,
        prompt_ids=np.array([1], np.int32),
        spans=(Span(0, 0, tokens),),
        finish_reason=FinishReason.STOP,
        tokens=(),
        num_trained=tokens,
        reward=1.0,
        advantage=advantage,
        weight=weight,
    )


BATCH = StepBatch(
    version=1,
    trajectories=[trajectory("a", 10, 1.0), trajectory("b", 30, -0.5), trajectory("c", 20, -0.5, weight=0.5)],
)
SUMS = {  # sum of the loss weights, and of weights times advantages
    Aggregation.TOKEN_MEAN: ((10 + 30 + 10) / 60, (10 - 15 - 5) / 60),
    Aggregation.SEQUENCE_MEAN: ((1 + 1 + 0.5) / 3, (1 - 0.5 - 0.25) / 3),
    Aggregation.CONSTANT: ((10 + 30 + 10) / (3 * CAP), (10 - 15 - 5) / (3 * CAP)),
}


def gradient(expected: float, found: float, *, scale: float = 1.0, spread: float = 0.05) -> GradientSums:
    return GradientSums(expected=expected, found=found, spread=spread, size=0.02, scale=scale)


def right(aggregation: Aggregation = Aggregation.TOKEN_MEAN) -> StepProof:
    weight, signal = SUMS[aggregation]
    return StepProof(
        tokens=60,
        weight=weight,
        ids=id_sum("abc"),
        signal=signal,
        gain=signal,
        copied=3,
        unsure=300,
        fresh=100,
        gradients=(gradient(0.1, 0.1001, scale=1.02),),
        moved=40,
        uphill=4,
        reference="r",
    )


def names(
    *proofs: StepProof,
    aggregation: Aggregation = Aggregation.TOKEN_MEAN,
    algorithm: str = "grpo",
    empty: int = 0,
    **changes: object,
) -> list[str]:
    """Lines on steps with these proofs, before which the run made so many `empty` steps."""
    check = StepCheck(
        AlgorithmConfig(name=algorithm, aggregation=aggregation),
        LearnerConfig(lr=1e-3, warmup_steps=2),
        exact=True,
        sampling=SamplingConfig(max_new_tokens=CAP),
        steps=10,
    )
    found = []
    for number, proof in enumerate(proofs):
        metrics = StepMetrics(
            **{"loss": 0.1, "grad_norm": 1.0, "elapsed_s": 1.0, "proof": proof, "tokens": STILL} | changes
        )
        found += [
            f"{alarm.check}: {alarm.message}"
            for alarm in check.observe(BATCH, metrics, step=number + 1 + empty, made=number + 1)
        ]
    return found


@pytest.mark.parametrize("aggregation", Aggregation)
def test_a_sound_step_is_not_named(aggregation: Aggregation) -> None:
    assert not names(right(aggregation), right(aggregation), aggregation=aggregation)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": id_sum("abx")}, "trained on other trajectories than the 3 of its batch"),
        ({"tokens": 59}, "trained on 59 tokens, and its batch has 60"),
        ({"weight": 1.0}, "its loss weights add up to 1, and 0.833333 were packed"),
        ({"signal": 10 / 60}, "advantages add up to 0.1667, and -0.1667 were recorded"),
        ({"not_finite": 2}, "2 tokens without finite numbers took part in an update"),
        ({"copied": 299}, "299 of 300 recorded log-probabilities are the learner's own"),
        ({"gradients": (gradient(0.1, 0.05, scale=1.0),)}, "the gradient is not that of its loss"),
        ({"gradients": (gradient(0.1, float("nan"), scale=1.0),)}, "the gradient is not that of its loss"),
        ({"gradients": (gradient(0.1, 0.1, scale=0.25),)}, "its loss is 0.25 times that of its definition"),
        ({"gradients": (gradient(0.1, 0.1, scale=-1.0),)}, "its loss is -1 times that of its definition"),
        ({"drift": 0.1}, "log-probabilities 0 nats away, and the recorded ones are 0.1 away"),
        ({"gain": 0.1}, "times advantages times rewards add up to 0.1, and -0.1667"),
        (
            {"gradients": (msgspec.structs.replace(gradient(0.1, 0.1), exact=ExactTokens(0.02, 0.9, 0.01)),)},
            "derivatives that differ by 0.02 from its definition's",
        ),
        ({"still": ("a.weight", "b.weight")}, "a.weight and 1 more"),
        ({"astray": ("a.weight", "b.weight")}, "a.weight and 1 more were not updated as AdamW"),
        ({"uphill": 38}, "38 of 40 tensors moved along their gradients"),
    ],
)
def test_a_step_that_is_not_its_batchs_is_named(change: dict[str, object], words: str) -> None:
    (found,) = names(msgspec.structs.replace(right(), **change))
    assert words in found
    of_optimizer = change.keys() & {"uphill", "still", "astray"}
    assert found.startswith("optimizer: step 1: " if of_optimizer else "step: step 1: ")


def test_a_rate_that_is_not_of_the_schedule_is_named() -> None:
    (found,) = names(right(), right(), learning_rate=5e-4)
    assert "optimizer: step 2: its learning rate was 0.0005, and the schedule of learner.lr has 0.001" in found


def test_steps_without_trajectories_do_not_count_for_the_schedule() -> None:
    assert not names(right(), learning_rate=5e-4, empty=3)


@pytest.mark.parametrize(("rate", "count"), [(1e-5, 0), (math.nan, 0), (1e-4, 1)])
def test_a_rate_of_the_critic_that_is_not_of_its_schedule_is_named(rate: float, count: int) -> None:
    found = names(right(), algorithm="ppo", critic=CriticFigures(learning_rate=rate))
    assert len(found) == count
    assert all("the schedule of algorithm.critic.lr has 1e-05" in line for line in found)


def test_a_reference_that_changes_and_a_mismatch_are_named() -> None:
    (found,) = names(right(), msgspec.structs.replace(right(), reference="s"))
    assert "step 2: the reference model changed" in found
    (found,) = names(right(), mismatch=Mismatch(0.1, 0.2, 0.3))
    assert found.startswith("probes: ")


def test_a_mean_over_few_fresh_tokens_says_nothing() -> None:
    assert not names(msgspec.structs.replace(right(), fresh=10), mismatch=Mismatch(0.1, 0.2, 0.3))


def test_the_rounding_of_a_sure_policys_gradient_is_no_fault() -> None:
    sure = gradient(-2.194e-7, -2.096e-7, spread=6e-7)  # a learned quickstart at step 554
    assert not names(msgspec.structs.replace(right(), gradients=(sure,)))
    wrong = gradient(-2.194e-7, -2.096e-6, spread=6e-7)
    assert names(msgspec.structs.replace(right(), gradients=(wrong,)))
