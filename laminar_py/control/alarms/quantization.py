"""The gate of engines that round their weights: beyond a bound on the mismatch they serve published weights. Pure.

`Alarms` gives it differences of engine and learner under the same version: of fresh tokens of each step, and of
answers to probes after each load. It also says which versions the other checks may compare exactly.
"""

import math

from laminar_py.records.metrics import StepMetrics

LEAST_FRESH = 64  # tokens of the newest version whose mean is compared
# Nats in the mean. Emulated fp8 costs the quickstart 0.001, and 0.04 before its model has learnt anything; a scale
# that is wrong by 4 costs 0.03 to 1, by its matrix.
BOUND_EXACT, BOUND_ROUNDED = 0.05, 0.1
BOUND_PROBES = 0.5  # for a few tokens after a few prompts, of which the quickstart's differ by 0.12


class QuantizationGate:
    """Whether engines round their weights now (`quantizes`), and how far they may differ from the learner.

    `bound` is for the mean over fresh tokens, in nats. A resumed run may have tokens of rounded weights although
    its engines round no more; `rounded_before` says so.
    """

    def __init__(self, *, bound: float, quantizes: bool, rounded_before: bool = False) -> None:
        self.quantizes = quantizes
        self._bound = bound
        # last version whose tokens may be of rounded weights; None: the next published one
        self._last: int | None = None if rounded_before else -1

    def published(self, version: int) -> None:
        """Note a version of the learner."""
        if self._last is None and not self.quantizes:
            self._last = version

    def compares(self, version: int) -> bool:
        """Whether no token of this version is of rounded weights, so that engine and learner must agree."""
        return not self.quantizes and self._last is not None and version > self._last

    def mismatch_of(self, metrics: StepMetrics) -> float:
        """Return the mean mismatch of a step's fresh tokens, in nats; NaN for a step with too few."""
        is_enough = metrics.proof is not None and metrics.proof.fresh >= LEAST_FRESH
        return metrics.mismatch.mean if is_enough else math.nan

    def closes(self, mismatch: float, *, of_probes: bool = False) -> bool:
        """Take a mean mismatch; return whether engines round no more because of it. NaN is none."""
        bound = max(self._bound, BOUND_PROBES) if of_probes else self._bound
        if not self.quantizes or not mismatch > bound:
            return False
        self.quantizes, self._last = False, None  # a replica may have rounded a version on its way
        return True

    def went_back(self) -> None:
        """Note that the learner goes back: undone tokens, perhaps of rounded weights, are fresh once more."""
        if self._last != -1:
            self._last = None
