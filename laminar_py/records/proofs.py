"""Measurements by which the controller finds silent failures, see `control.alarms` and docs/silent_failures.md."""

from collections.abc import Iterable
from zlib import crc32

import msgspec

from laminar_py.records.codec import FloatArray, IntArray

POWERS = (0.5, 0.8, 1.25, 2.0, 4.0)  # of a distribution: temperatures that a server could wrongly use


class WeightsChecksum(msgspec.Struct, frozen=True):
    """Hashes of the tensors that an engine serves, e.g. `WeightsChecksum("5fd1", {"model.norm.weight": "9f0c"})`.

    They are equal for equal weights and layout. A name begins with "1/" for the second GPU of an engine.
    """

    total: str  # one hash for each GPU, joined by dashes; "": the engine cannot tell
    tensors: dict[str, str] = {}  # by the engine's name; empty: the engine tells the total alone
    quantized: bool = False  # the engine rounded the published weights


class NextToken(msgspec.Struct, frozen=True):
    """The learner's distribution of the token after a probe's prompt, at the run's temperature.

    E.g. `NextToken(ids, logprobs, normalizers)`.
    """

    ids: IntArray  # [M] the most probable tokens, in order
    logprobs: FloatArray  # [M]
    normalizers: FloatArray  # [len(POWERS)] log of the sum over all tokens of p to each power


class ProbeAnswer(msgspec.Struct, frozen=True):
    """Token that an engine drew after the prompt of a probe, e.g. `ProbeAnswer(7, 2, 65, -1.25)`."""

    version: int  # that the engine says it used
    probe: int  # place among the run's probes
    token: int
    logprob: float  # that the engine reports


class ExactTokens(msgspec.Struct, frozen=True):
    """Sums over an update's tokens whose probability has not changed, e.g. `ExactTokens(1e-7, 0.9, 0.1)`."""

    apart: float = 0.0  # of |derivative of the loss by the log-probability - its definition|
    advantages: float = 0.0  # of the definition's part with the advantage, without sign
    penalties: float = 0.0  # of its other part


class GradientSums(msgspec.Struct, frozen=True, kw_only=True):
    """Two ways to one number: how the loss of an update changes with the scale of the final norm.

    E.g. `GradientSums(expected=0.109, found=0.109, spread=0.05, size=0.2, scale=1.0)`.

    All ranks' tokens give `expected`; the gradient that the optimizer gets gives `found`.
    """

    expected: float
    found: float
    spread: float  # root of the summed squares of each token's part in `expected`
    size: float  # sum of absolute derivatives of the loss by each token's log-probability
    scale: float | None  # of the loss, 1 by definition; None: no token tells it
    exact: ExactTokens = ExactTokens()


class StepProof(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and changes of a learner step, over all ranks, e.g. `StepProof(tokens=57, weight=1.0, ids=91)`."""

    tokens: int = 0  # with a loss weight
    weight: float = 0.0  # sum of their loss weights
    ids: int = 0  # `id_sum` of the trajectories
    signal: float = 0.0  # sum over these tokens of loss weight times advantage
    gain: float = 0.0  # the same, times the reward: unlike `signal` it is not 0 for a group
    not_finite: int = 0  # numbers of these tokens, in updates that were not skipped
    copied: int = 0  # `unsure` tokens whose recorded log-probability is the learner's, bit for bit
    unsure: int = 0  # tokens to which the learner gives less than nine tenths
    fresh: int = 0  # tokens of the newest version
    drift: float = 0.0  # sum of loss weight times (recorded - present log-probability), in nats
    reference_gap: float = 0.0  # mean |policy - reference| log-probability, of the newest version's tokens
    gradients: tuple[GradientSums, ...] = ()  # of each update that was not skipped; empty if the norm is frozen
    still: tuple[str, ...] = ()  # tensors that had gradients in three updates in a row and did not change
    astray: tuple[str, ...] = ()  # tensors that are frozen, have no gradient, or moved unlike AdamW moves them
    moved: int = 0  # tensors with gradients that an update changed, over the updates
    uphill: int = 0  # of these, the tensors whose value moved along its gradient, and not against it
    reference: str = ""  # hash over a sample of the reference model's weights; "": no reference in the learner


def id_sum(ids: Iterable[str]) -> int:
    """Sum over a number for each id, which tells that another set of trajectories was trained on."""
    return sum(crc32(id.encode()) for id in ids)


class Alarm(msgspec.Struct, frozen=True):
    """A silent failure, e.g. `Alarm("weights", "replica-1", "loaded version 8, and its engine still ...")`."""

    check: str  # field of the section `alarms`
    part: str
    message: str  # with the version and the remedy
