r"""Verdict on a response to a problem of mathematics whose answer is known.

A cascade: equal tokens; then our own reading of both and a comparison by kind (`compare` and `equality` have the
rules); then the `math-verify` library, for what we do not read. Pure, but the time of the library is not bounded:
responses are verified in a process that can be ended (`reward.calls`), which is how a verification is out of time.
"""

from enum import Enum

import msgspec

from laminar_contrib.mathematics.compare import same
from laminar_contrib.mathematics.evaluate import TooLargeError
from laminar_contrib.mathematics.extract import MAX_ANSWER, extract_answer
from laminar_contrib.mathematics.library import library_accepts, may_judge
from laminar_contrib.mathematics.normalise import normalise
from laminar_contrib.mathematics.structure import readings
from laminar_contrib.mathematics.tokens import Token, TokenKind, UnreadableError, tokenise
from laminar_contrib.mathematics.values import AnswerValue


class MathOutcome(Enum):
    """Verdict in a word."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no answer was found, or none that can be read


class MathVerdict(msgspec.Struct, frozen=True):
    """Verdict with the answer that was found, e.g. `MathVerdict(MathOutcome.RIGHT, "1/2", "values")`.

    `reason` is the stage of the cascade that decided, or why nothing could be read.
    """

    outcome: MathOutcome
    answer: str = ""
    reason: str = ""


def verify(response: str, reference: str) -> MathVerdict:
    """Verdict on the final answer of a response."""
    answer = extract_answer(response)
    if answer is None:
        return MathVerdict(MathOutcome.UNPARSABLE, reason="no final answer")
    return verify_answer(answer, reference)


def verify_answer(answer: str, reference: str) -> MathVerdict:
    """Verdict on an answer that stands alone."""
    try:
        given = tokenise(normalise(answer), grouped=False)
        wanted = tokenise(normalise(reference), grouped=False)
        if not given:
            raise UnreadableError("nothing")
    except UnreadableError as error:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, str(error))
    except RecursionError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "nested too deeply")
    if _flat(given) == _flat(wanted):
        return MathVerdict(MathOutcome.RIGHT, answer, "tokens")
    try:
        right = _any_same(readings(reference), readings(answer))
        return MathVerdict(MathOutcome.RIGHT if right else MathOutcome.WRONG, answer, "values")
    except TooLargeError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "a number too large to be worked out")
    except RecursionError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "nested too deeply")
    except UnreadableError as error:
        accepts = library_accepts(normalise(reference), normalise(answer)) if may_judge(wanted, given) else None
        if accepts is None:
            return MathVerdict(MathOutcome.UNPARSABLE, answer, str(error))
        return MathVerdict(MathOutcome.RIGHT if accepts else MathOutcome.WRONG, answer, "library")


def _any_same(references: list[AnswerValue], answers: list[AnswerValue]) -> bool:
    return any(same(one, other) for one in references for other in answers)


def _flat(tokens: tuple[Token, ...]) -> list[tuple[bool, str]]:
    """Tokens without what changes nothing: braces of a single one, and commands for text.

    Letters side by side are one text.
    """
    flat: list[tuple[bool, str]] = []
    for index, token in enumerate(tokens):
        if _is_alone(tokens, index - 1) or _is_alone(tokens, index + 1):
            continue
        is_letters = token.kind in (TokenKind.NAME, TokenKind.WORD) and token.text.isalpha()
        if is_letters and flat and flat[-1][0]:
            flat[-1] = (True, flat[-1][1] + token.text)
        else:
            flat.append((is_letters, token.text))
    return flat


def _is_alone(tokens: tuple[Token, ...], index: int) -> bool:
    """True for a token that has braces to itself."""
    if not 0 < index < len(tokens) - 1 or tokens[index].is_sign("{", "}"):
        return False
    return tokens[index - 1].is_sign("{") and tokens[index + 1].is_sign("}")


def check_reference(text: str) -> str | None:
    """Complaint on a reference answer that nothing can be compared with; None of a good one."""
    if not text.strip():
        return "the reference answer is empty"
    if len(text) > MAX_ANSWER:
        return f"the reference answer has {len(text)} characters, more than {MAX_ANSWER}"
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    try:
        value = readings(text)
        same(value[0], value[0])
    except UnreadableError as error:
        return None if _is_judged_by_library(text) else f"the reference answer {shown!r} cannot be read: {error}"
    except (TooLargeError, RecursionError):
        return f"the reference answer {shown!r} is too large to be worked out"
    return None


def _is_judged_by_library(text: str) -> bool:
    try:
        tokens = tokenise(normalise(text), grouped=False)
    except UnreadableError:
        return False
    return may_judge(tokens) and library_accepts(normalise(text), normalise(text)) is not None
