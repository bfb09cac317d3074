"""The terms `exact`, `format` and `length`, pure functions of a response's text or tokens."""

import re
from collections.abc import Callable
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config import ConfigError, Count, RewardKind, TermConfig
from laminar_py.records.scoring import Reward, ScoringRequest
from laminar_py.records.trajectory import FinishReason, Prompt


def compiled(field: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression of the user. Raises `ConfigError`, which names `field`."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}={pattern!r}: not a regular expression ({error}); mend the pattern") from None


class ExactTerm(TermConfig):
    """1 for a response that ends by itself and whose last answer after its reasoning is right, else 0."""

    kind: str = "exact"
    verdict: bool | str = True
    pattern: str
    """Regular expression whose first group is the answer: its last match that ends behind `</think>` counts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not compiled("pattern", self.pattern).groups:
            raise ConfigError(f"pattern={self.pattern!r}: has no group; put the answer in parentheses")
        return self


def make_exact(term: ExactTerm) -> Callable[[ScoringRequest], Reward]:
    """Make the reward function of the term `exact`.

    With pattern `#(\\d)$` and answer `7` the response `1+6=7;#7` is worth 1; cut by a cap it is worth 0.
    """
    pattern = re.compile(term.pattern)

    def exact_reward(request: ScoringRequest) -> Reward:
        if request.finish_reason is not FinishReason.STOP:
            return Reward(0.0)
        reasoning_end = len(request.response) - len(request.text_after_reasoning)
        matches = [match for match in pattern.finditer(request.response) if match.end() > reasoning_end]
        answer = (matches[-1].group(1) or "") if matches else None
        return Reward(float(answer == request.answer), answer=answer or "")

    return exact_reward


class FormatTerm(TermConfig):
    """1 for a response that matches a regular expression somewhere, else 0."""

    kind: str = "format"
    pattern: str
    """Regular expression; `.` matches line breaks too. A `<think>` that ends the prompt belongs to the text."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        compiled("pattern", self.pattern)
        return self


def make_format(term: FormatTerm) -> Callable[[ScoringRequest], float]:
    """Make the reward function of the term `format`, which looks for the pattern, e.g. `^<think>.*</think>`."""
    pattern = re.compile(term.pattern, re.DOTALL)
    return lambda request: float(pattern.search(request.text) is not None)


class LengthTerm(TermConfig):
    """0 for a response of at most `free` tokens, -1 for one of `most`, linear between."""

    kind: str = "length"
    free: Annotated[int, Field(ge=0)] = 0
    """Tokens that cost nothing."""
    most: Count
    """Number of tokens from which on the term is -1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.free >= self.most:
            raise ConfigError(f"free={self.free}: not below most={self.most}; lower it")
        return self


def make_length(term: LengthTerm) -> Callable[[ScoringRequest], float]:
    """Make the reward function of the term `length`: from 0.0 at `free` tokens to -1.0 at `most`."""
    return lambda request: -min(max(len(request.response_ids) - term.free, 0) / (term.most - term.free), 1.0)


def missing_answer(term: TermConfig, problem: Prompt) -> str | None:
    """Return a complaint if a problem has no answer, else None."""
    return None if problem.answer else "`answer` is missing or empty"


EXACT = RewardKind(settings=ExactTerm, make=make_exact, fault=missing_answer)
FORMAT = RewardKind(settings=FormatTerm, make=make_format)
LENGTH = RewardKind(settings=LengthTerm, make=make_length)
