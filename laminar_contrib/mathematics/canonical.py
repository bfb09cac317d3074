"""Answers in a form for majority votes, in which equal numbers are equal text. Pure."""

from fractions import Fraction

from laminar_contrib.mathematics.evaluate import evaluate
from laminar_contrib.mathematics.expressions import variables
from laminar_contrib.mathematics.normalise import normalise
from laminar_contrib.mathematics.structure import readings
from laminar_contrib.mathematics.tokens import UnreadableError, tokenise
from laminar_contrib.mathematics.values import Quantity, share

MOST_BITS = 256  # of a number that is written out


def canonical(answer: str) -> str:
    r"""The exact value of a number, e.g. "1/2" of 0.5 and of \frac{1}{2}; of all else its normalised text."""
    try:
        number = _number(answer)
        if number is not None:
            return str(number)
        return " ".join(token.text for token in tokenise(normalise(answer), grouped=False))
    except (UnreadableError, ArithmeticError, RecursionError):
        return " ".join(answer.split())


def _number(answer: str) -> Fraction | None:
    """The exact number that an answer is by one of its readings, without a unit; None of others."""
    numbers = (share(one) for one in readings(answer) if isinstance(one, Quantity) and one.unit is None)
    expression = next((one for one in numbers if not variables(one)), None)
    if expression is None:
        return None
    value = evaluate(expression, {})
    if not isinstance(value, Fraction):
        return None
    return value if max(abs(value.numerator), value.denominator).bit_length() <= MOST_BITS else None
