"""Scoring: requests to reward functions, their answers, and the scores that the scoring stage makes of them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import Earned, RoleCredit
from laminar_py.records.pieces import ColumnRef, TokensRef
from laminar_py.records.reasoning import after_reasoning, opened_reasoning
from laminar_py.records.trajectory import DropReason, FinishReason

Value = TypeVar("Value")
NO_IDS, NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)  # of a response that is given by reference


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A finished response with its problem, as a reward function gets it, e.g. "4" as the answer to "2+2=":

    `ScoringRequest(trajectory_id="g3.1", prompt="2+2=", response="4", answer="4", response_ids=[19, 1], ...)`.
    """

    trajectory_id: str
    prompt: str
    response: str  # text of `response_ids` without special tokens; "" until the scorer has decoded it
    answer: str  # reference answer of the problem
    task: str = ""
    set_name: str = ""  # evaluation set; "" in training
    finish_reason: FinishReason  # `length`: a cap ended it
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L]
    logprobs: FloatArray  # [L] of the policy that sampled the tokens
    fields_json: bytes = b"{}"
    environment_reward: float | None = None  # from the environment that ended the trajectory
    roles: tuple[RoleCredit, ...] = ()  # rewards by role from the environment

    @property
    def fields(self) -> dict[str, Any]:
        """Other fields of the problem's line in the data set, e.g. `{"tests": [...]}`; decoded at each call."""
        return msgspec.json.decode(self.fields_json, type=dict[str, Any])

    @property
    def text(self) -> str:
        """The response, behind the `<think>` that its prompt ends with, if there is one."""
        return opened_reasoning(self.prompt) + self.response

    @property
    def text_after_reasoning(self) -> str:
        """The response without its reasoning: the text behind the last `</think>`; "" if reasoning never ends."""
        return after_reasoning(self.text)


class Unscored(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a scorer: a finished response, e.g. `Unscored(request=request, tokens=(TokensRef(0, 41, at),))`."""

    request: ScoringRequest  # without ids and log-probabilities if `tokens` refers to them
    tokens: tuple[TokensRef, ...] = ()  # tokens that the scorer reads; empty: the request has its tokens
    wants_sample: bool = False  # True: the score brings a sample of the response for the live view

    @property
    def id(self) -> str:
        """Id of the trajectory."""
        return self.request.trajectory_id


@dataclass(frozen=True, slots=True)
class Reward:
    """Return value of a reward function, if a number is not enough, e.g. `Reward(1.0, {"hints": [0, 0, 1]})`."""

    value: float | Sequence[float] | FloatArray | Mapping[str, float]
    """Reward of the response, or [L] process rewards of its tokens, or named numbers whose sum is the reward."""
    columns: Mapping[str, object] = field(default_factory=dict)
    """[L] numbers per token by name, for an algorithm that declares these columns."""
    text: str = ""
    """Note that is kept on record beside the value."""
    answer: str = ""
    """Answer that the response gives, for majority votes; equal answers must be equal text."""


class TryAgainError(Exception):
    """A reward function raises this if another call may succeed, e.g. when a server is busy."""


class NoValueError(Exception):
    """A served term raises this for a response without a value; the drop event gets the reason and the detail."""

    def __init__(self, detail: str, reason: DropReason = DropReason.REWARD_FAILED) -> None:
        super().__init__(detail)
        self.reason = reason


class TermValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Value of one term before its weight, e.g. `TermValue(name="code", value=0.75, text="test 4: got 3")`."""

    name: str
    value: float
    elapsed_s: float = 0.0
    text: str = ""  # note of the verifier
    answer: str = ""  # answer that the response gives, for majority votes


def answer_by(terms: Iterable[TermValue]) -> str:
    """Answer of a response, by the first term that names an answer; "" if no term does."""
    return next((term.answer for term in terms if term.answer), "")


def short_terms(terms: Mapping[str, Value]) -> dict[str, Value]:
    """Return values by term, a function under its name without its file; equal names keep their file.

    E.g. {"math": 1.0, "/home/me/rewards.py:short": 0.1} becomes {"math": 1.0, "short": 0.1}.
    """
    functions = Counter(name.rpartition(":")[2] for name in terms)
    files = Counter(name.rpartition("/")[2] for name in terms)

    def short(name: str) -> str:
        function, file = name.rpartition(":")[2], name.rpartition("/")[2]
        return function if functions[function] == 1 else file if files[file] == 1 else name

    return {short(name): value for name, value in terms.items()}


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Reward of a response, or the reason why it has none.

    E.g. `Score(trajectory_id="g3.1", value=1.0)`, or `Score(trajectory_id="g3.1", value=None,
    failure=DropReason.REWARD_TIMEOUT)`. Process rewards are the column `TOKEN_REWARDS`, and `value` is their sum.
    """

    trajectory_id: str
    value: float | None
    terms: list[TermValue] = []
    columns: dict[str, ColumnRef] = {}  # by name
    earned: Earned | None = None  # summary of process rewards, if there are any
    roles: tuple[RoleCredit, ...] = ()  # rewards by role, if there are several
    elapsed_s: float = 0.0
    at_once: float = 1.0  # responses of this kind that the scorer works on at the same time
    failure: DropReason | None = None
    detail: str = ""  # of `failure`
    raised: bool = False  # a reward function raised or was late
    length: int | None = None  # response tokens that the scorer read
    response_digest: int = 0  # CRC-32 of the response's ids
    response_logprob: float = 0.0  # sum over its sampled tokens
    sample: str = ""  # last characters of the response for the live view, if `Unscored.wants_sample`

    @property
    def answer(self) -> str:
        """Answer that the response gives, for majority votes; "" if no term names an answer."""
        return answer_by(self.terms)


class GroupRewards(msgspec.Struct, frozen=True):
    """Rewards of a training group when it closed, e.g. `GroupRewards(17, "p3", (1.0, 0.0, 1.0))`.

    The orders of problems that adapt to rewards (`data.stream`) read this record.
    """

    place: int  # of the group's prompt in the stream
    prompt_id: str
    rewards: tuple[float, ...]  # of each response that was scored

    @property
    def differ(self) -> bool:
        """True if the rewards are not all equal."""
        return min(self.rewards) < max(self.rewards)

    def solved(self, at: float) -> float:
        """Share of rewards that are at least `at`."""
        return sum(reward >= at for reward in self.rewards) / len(self.rewards)


class ServerAddress(msgspec.Struct, frozen=True):
    """A server that a term of the reward calls, e.g. `ServerAddress("http://10.0.0.4:30000", "8f2c...")`."""

    url: str
    key: str | None = None  # None: the server needs no key

    def __repr__(self) -> str:
        return self.url  # the key must not reach a log


class PoolAddresses(msgspec.Struct, frozen=True):
    """Servers that are up, by pool, e.g. `PoolAddresses(2, {"judge": [ServerAddress(url, key)]})`."""

    number: int  # counts updates; a higher number is newer
    pools: dict[str, list[ServerAddress]]
