"""What a reward function sees, and what the scoring stage says of it."""

import msgspec

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.trajectory import DropReason, FinishReason


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward function sees, e.g. `ScoringRequest("g3.1", "2+2=", "4", "4", FinishReason.STOP, ids)`."""

    trajectory_id: str
    prompt: str
    response: str  # made of the ids where it is scored; empty on its way there
    answer: str
    finish_reason: FinishReason
    response_ids: IntArray  # [L]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict: a scalar, optionally per-token scores or teacher log-probabilities; or why there is none."""

    trajectory_id: str
    value: float | None
    token_values: FloatArray | None = None  # [L]
    elapsed_s: float = 0.0
    failure: DropReason | None = None
    detail: str = ""
