"""Requests to reward functions, their answers, and the scores that the scoring stage makes of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.returns import Earned
from laminar_py.records.roles import RoleCredit
from laminar_py.records.trajectory import DropReason, FinishReason

NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)  # of a response that is given by reference


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response as a reward function sees it, with its problem.

    E.g. to "2+2=" the response "4" of one token and the end: `response_ids` and `logprobs` have two numbers each.
    """

    trajectory_id: str
    prompt: str
    response: str  # text of its ids, without special tokens; empty on the way to a scorer
    answer: str
    task: str = ""
    set_name: str = ""  # of an evaluation
    finish_reason: FinishReason  # `length`: cut by a cap
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] of the policy that sampled them
    fields_json: bytes = b"{}"
    environment_reward: float | None = None  # of the environment, where that ended the trajectory with one
    roles: tuple[RoleCredit, ...] = ()  # that the environment gave rewards of their own

    @property
    def fields(self) -> dict[str, Any]:
        """Other fields of the problem's line in the data set, e.g. `{"tests": [...]}`; read at each call."""
        return msgspec.json.decode(self.fields_json, type=dict[str, Any])


class Unscored(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response on its way to a scorer, which reads `tokens`; without any the request has its own."""

    request: ScoringRequest  # without ids and log-probabilities of the response
    tokens: tuple[TokensRef, ...] = ()
    stores: dict[str, str] = {}  # names of the stores of segments among these that are of other hosts

    @property
    def id(self) -> str:
        """Name of the trajectory."""
        return self.request.trajectory_id


class PartialResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a response that still generates, e.g. its first 200 tokens, with its prompt."""

    trajectory_id: str
    task: str
    set_name: str = ""  # of an evaluation
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L] so far


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """The beginning of a response on its way to a scorer, which reads the tokens."""

    response: PartialResponse  # without ids of the response
    tokens: tuple[TokensRef, ...]
    stores: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Reward:
    """A value with columns, which a reward function may return, e.g. `Reward(1.0, {"hints": [0, 0, 1]})`.

    `value` is a number for the response, or one for each of its tokens (process rewards). `columns` are further
    numbers for each token, which the algorithm has declared. `text` is kept on record beside the value. `said` is
    the answer that the response gives, in a form in which equal answers are equal text, for majority votes.
    """

    value: float | Sequence[float] | FloatArray | Mapping[str, float]  # [L] where it is a sequence
    columns: Mapping[str, object] = field(default_factory=dict)  # by name, each [L]
    text: str = ""
    said: str = ""


class TryAgainError(Exception):
    """Raised by a reward function where another call may succeed, e.g. as a server is busy."""


class NoValueError(Exception):
    """Raised by a term that a scorer serves where a response has no value, with the reason on record."""

    def __init__(self, detail: str, reason: DropReason = DropReason.REWARD_FAILED) -> None:
        super().__init__(detail)
        self.reason = reason


class TermValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A term of a score before its weight, e.g. `TermValue(name="code", value=0.75, text="test 4: got 3")`."""

    name: str
    value: float
    elapsed_s: float = 0.0
    text: str = ""  # of the verifier
    said: str = ""  # answer of the response, see `Reward`


def said_by(terms: Iterable[TermValue]) -> str:
    """Answer of a response by the first term that tells one; "" where none does."""
    return next((term.said for term in terms if term.said), "")


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a response, its terms and where its columns lie, or why there is none.

    E.g. `Score(trajectory_id="g3.1", value=1.0)`, or `Score(trajectory_id="g3.1", value=None,
    failure=DropReason.REWARD_TIMEOUT)`. Process rewards are the column `TOKEN_REWARDS`, and `value` is their sum.
    """

    trajectory_id: str
    value: float | None
    terms: list[TermValue] = []
    columns: dict[str, ColumnRef] = {}
    earned: Earned | None = None  # in short, where its tokens have rewards of their own
    roles: tuple[RoleCredit, ...] = ()  # where these have rewards of their own
    elapsed_s: float = 0.0
    at_once: float = 1.0  # responses like this one that the scorer works on at the same time
    failure: DropReason | None = None
    detail: str = ""

    @property
    def said(self) -> str:
        """Answer that the response gives."""
        return said_by(self.terms)
