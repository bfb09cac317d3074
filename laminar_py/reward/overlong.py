"""Overlong shaping: responses that come near the cap on their length lose reward. Called by `worker`.

A response that is cut says little about its answer; one that ends shortly before should not be as welcome as one
that ends early. DAPO, Yu et al. 2025, section 3.4.
"""

from dataclasses import dataclass

from laminar_py.codec import FloatArray


@dataclass(frozen=True, slots=True)
class Overlong:
    """The last `buffer` of the `cap` tokens that a response may have cost up to 1."""

    cap: int
    buffer: int

    def penalty(self, length: int) -> float:
        """0 up to `cap - buffer` tokens, 1 at `cap`, linear between: of 100 and 20, 0.5 at 90."""
        return min(1.0, max(0.0, (length - (self.cap - self.buffer)) / self.buffer))

    def shape(
        self, value: float, token_values: FloatArray | None, *, length: int
    ) -> tuple[float, FloatArray | None]:
        """Reward and per-token rewards [L] less the penalty, which the last token bears."""
        penalty = self.penalty(length)
        if token_values is not None and len(token_values):
            token_values = token_values.copy()
            token_values[-1] -= penalty
        return value - penalty, token_values
