r"""Verdict on a response to a problem of mathematics whose answer is known.

Two answers with the same tokens are the same. Otherwise both are read whole, and compared by kind (`answers` and
`equality` have the rules). An answer that cannot be read is not right. Pure.
"""

from enum import Enum
from fractions import Fraction

import msgspec

from laminar_contrib.mathematics.answers import AnswerValue, Quantity, same, share
from laminar_contrib.mathematics.equality import TooLargeError, evaluate, is_rounding
from laminar_contrib.mathematics.expressions import Token, TokenKind, UnreadableError, tokenise, variables
from laminar_contrib.mathematics.extraction import MAX_ANSWER, extract_answer
from laminar_contrib.mathematics.structure import read
from laminar_contrib.mathematics.words import normalise


class MathOutcome(Enum):
    """The verdict in one word."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no answer was found, or none that can be read


class MathVerdict(msgspec.Struct, frozen=True):
    """A verdict with the answer found, e.g. `MathVerdict(MathOutcome.RIGHT, "1/2", "values")`.

    `reason` is the stage of the cascade that decided, or why nothing could be read.
    """

    outcome: MathOutcome
    answer: str = ""
    reason: str = ""


def verify(response: str, reference: str, *, approximate: bool = False) -> MathVerdict:
    """Judge the final answer of a response; `approximate` as in `verify_answer`."""
    answer = extract_answer(response)
    if answer is None:
        return MathVerdict(MathOutcome.UNPARSABLE, reason="no final answer")
    return verify_answer(answer, reference, approximate=approximate)


def verify_answer(answer: str, reference: str, *, approximate: bool = False) -> MathVerdict:
    """Judge an answer without a response around it.

    With `approximate` a number may also be rounded to a decimal of at least four significant digits.
    """
    try:
        given, wanted = tokenise(normalise(answer)), tokenise(normalise(reference))
        if not given:
            raise UnreadableError("nothing")
        if _spelling(given) == _spelling(wanted):
            return MathVerdict(MathOutcome.RIGHT, answer, "tokens")
        expected, found = read(wanted), read(given)
        is_right = same(expected, found) or (approximate and _is_rounded(expected, found))
    except (UnreadableError, TooLargeError) as error:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, str(error))
    except RecursionError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "nested too deeply")
    return MathVerdict(MathOutcome.RIGHT if is_right else MathOutcome.WRONG, answer, "values")


def _is_rounded(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Return True if the answer is a decimal to which the reference, a number without a unit, rounds."""
    if not (isinstance(reference, Quantity) and isinstance(answer, Quantity)) or reference.unit != answer.unit:
        return False
    return is_rounding(share(reference), share(answer))


def _spelling(tokens: tuple[Token, ...]) -> list[tuple[bool, str]]:
    """Return the texts of an answer's tokens, such that two spellings of one answer give equal lists.

    Braces around a single token are left out, so `x^{2}` equals `x^2`. Letters side by side become one text, so
    `a b` equals `ab`. Each entry is (whether the text consists of letters, text).
    """
    texts: list[tuple[bool, str]] = []
    for index, token in enumerate(tokens):
        if _is_in_own_braces(tokens, index - 1) or _is_in_own_braces(tokens, index + 1):
            continue  # one of the two braces
        is_letters = token.kind in (TokenKind.NAME, TokenKind.WORD) and token.text.isalpha()
        if is_letters and texts and texts[-1][0]:
            texts[-1] = (True, texts[-1][1] + token.text)
        else:
            texts.append((is_letters, token.text))
    return texts


def _is_in_own_braces(tokens: tuple[Token, ...], index: int) -> bool:
    """Return True for a token with a brace directly before and after it, such as the 2 of `x^{2}`.

    A number of several digits needs its braces: `\\frac{12}{3}` is not `\\frac12 3`.
    """
    if not 0 < index < len(tokens) - 1 or tokens[index].is_sign("{", "}"):
        return False
    if tokens[index].kind is TokenKind.NUMBER and len(tokens[index].text) > 1:
        return False
    return tokens[index - 1].is_sign("{") and tokens[index + 1].is_sign("}")


def check_reference(text: str) -> str | None:
    """Return why no answer can be compared with a reference; None for a good reference."""
    if not text.strip():
        return "the reference answer is empty"
    if len(text) > MAX_ANSWER:
        return f"the reference answer has {len(text)} characters, more than {MAX_ANSWER}"
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    try:
        value = read(tokenise(normalise(text)))
        same(value, value)
    except UnreadableError as error:
        return f"the reference answer {shown!r} cannot be read: {error}"
    except (TooLargeError, RecursionError):
        return f"the reference answer {shown!r} is too large to be worked out"
    return None


MOST_BITS = 256  # of a number that is written out


def canonical(answer: str) -> str:
    r"""Return the exact value of a number, e.g. "1/2" for 0.5 and \frac{1}{2}; normalised text otherwise."""
    try:
        number = _number(answer)
        if number is not None:
            return str(number)
        return " ".join(token.text for token in tokenise(normalise(answer)))
    except (UnreadableError, ArithmeticError, RecursionError):
        return " ".join(answer.split())


def _number(answer: str) -> Fraction | None:
    """Return the exact number, without a unit, that an answer is; None for any other answer."""
    value = read(tokenise(normalise(answer)))
    if not isinstance(value, Quantity) or value.unit is not None or variables(share(value)):
        return None
    number = evaluate(share(value), {})
    if not isinstance(number, Fraction):
        return None
    return number if max(abs(number.numerator), number.denominator).bit_length() <= MOST_BITS else None
