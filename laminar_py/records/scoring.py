"""Requests to a reward function, its answers, and the scores that the scoring stage makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.columns import TokenValues
from laminar_py.records.trajectory import DropReason, FinishReason


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response as a reward function sees it, e.g. of a right one:

    `ScoringRequest(trajectory_id=id, prompt=text, response="4", answer="4", finish_reason=end, response_ids=ids)`.
    """

    trajectory_id: str
    prompt: str
    response: str  # made of the ids where it is scored; empty on its way there
    answer: str
    finish_reason: FinishReason
    response_ids: IntArray  # [L]


@dataclass(frozen=True, slots=True)
class Reward:
    """A value with columns, which a reward function may return, e.g. `Reward(1.0, {"hints": [0, 0, 1]})`.

    `value` is a number for the response, or one for each of its tokens (process rewards). `columns` are further
    numbers for each token, which the algorithm has declared.
    """

    value: float | Sequence[float] | FloatArray  # [L] where it is a sequence
    columns: Mapping[str, object] = field(default_factory=dict)  # by name, each [L]


class Begun(msgspec.Struct, frozen=True):
    """Response that a scoring process had in hand, e.g. `Begun("g3.1", " (at rewards.py:7)", hung=True)`."""

    trajectory_id: str
    place: str = ""  # of the user's code where it hangs
    hung: bool = False  # seen by the process itself, which thus ran on beyond the limit


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a response and its columns, or why there is none.

    E.g. `Score(trajectory_id="g3.1", value=1.0)`, or `Score(trajectory_id="g3.1", value=None,
    failure=DropReason.REWARD_TIMEOUT)`. Process rewards are the column `TOKEN_REWARDS`, and `value` is their sum.
    """

    trajectory_id: str
    value: float | None
    columns: dict[str, TokenValues] = msgspec.field(default_factory=dict)
    elapsed_s: float = 0.0
    failure: DropReason | None = None
    detail: str = ""
