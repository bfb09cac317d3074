"""Values after an update of AdamW, by its definition. `proof.StepProver` compares the learner's update with them.

The rule is Loshchilov and Hutter 2019, algorithm 2, from the settings alone. It reads nothing of the optimizer but
its moments before the update, so a wrong rate, decay, clip, count of updates or moment shows as another value.
"""

from torch import Tensor

from laminar_py.config.learner import LearnerConfig

EPSILON = 1e-8  # added to the root of the second moment
AGREES = 1e-3  # of the learning rate
VALUE_ROUNDING = 2.0**-22  # of a value in fp32


def updated(
    values: Tensor,
    gradients: Tensor,
    moments: tuple[Tensor, Tensor],
    settings: LearnerConfig,
    *,
    norm: float,
    lr: float,
    updates: int,
) -> Tensor:
    """Return `values` [n] after an update, with `gradients` [n] that are not clipped and `moments` before it.

    `norm` is the norm of all gradients, `lr` the rate of this update, `updates` their number with this one.
    """
    first_rate, second_rate = settings.betas
    clipped = gradients * min(1.0, settings.grad_clip / (norm + 1e-6))
    first = first_rate * moments[0] + (1 - first_rate) * clipped
    second = second_rate * moments[1] + (1 - second_rate) * clipped.square()
    mean = first / (1 - first_rate**updates)
    root = (second / (1 - second_rate**updates)).sqrt() + EPSILON
    return values * (1 - lr * settings.weight_decay) - lr * mean / root


def differs(found: Tensor, expected: Tensor, *, lr: float) -> Tensor:
    """Return [n], True where `found` differs from `expected` by more than rounding."""
    return (found - expected).abs() > AGREES * lr + expected.abs() * VALUE_ROUNDING
