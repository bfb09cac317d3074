"""Kinds of answers, read and ready to be compared.

Pure records; `structure` makes them and `compare` compares them.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from laminar_contrib.mathematics.expressions import Applied, Expression, Numeral
from laminar_contrib.mathematics.regions import Region
from laminar_contrib.mathematics.units import MeasureUnit


@dataclass(frozen=True, slots=True)
class Quantity:
    """Number or formula, e.g. `Quantity(five, metre)` of "5 m"."""

    expression: Expression
    unit: MeasureUnit | None = None
    is_percent: bool = False


def share(quantity: Quantity) -> Expression:
    """Number that a quantity is, of which a percentage is a hundredth."""
    if not quantity.is_percent:
        return quantity.expression
    return Applied("divide", (quantity.expression, Numeral(Fraction(100), "100")))


@dataclass(frozen=True, slots=True)
class BasedNumber:
    """Number in a base of its own, e.g. `BasedNumber("1011", "2")`."""

    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Listing:
    """Several answers side by side, e.g. "1, 2" or "x = 1 or x = 2"."""

    items: tuple["AnswerValue", ...]


@dataclass(frozen=True, slots=True)
class Collection:
    """Set in braces, whose order and repetitions say nothing."""

    items: tuple["AnswerValue", ...]


@dataclass(frozen=True, slots=True)
class Bracketed:
    """Ordered items, such as a point, a vector or an interval: `Bracketed("(", "]", (one, two))` of (1, 2]."""

    opening: str
    closing: str
    items: tuple["AnswerValue", ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Matrix by rows."""

    rows: tuple[tuple["AnswerValue", ...], ...]


@dataclass(frozen=True, slots=True)
class Proportion:
    """Ratio such as 3:4 or 1:2:3."""

    parts: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """Equation or inequality that is not solved: `sign` is one of =, <, le, ne."""

    sign: str
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Named:
    """Value with what it is the value of, e.g. "x = 5"; `equation` where both sides are expressions."""

    label: str
    value: "AnswerValue"
    equation: Statement | None = None


@dataclass(frozen=True, slots=True)
class Phrase:
    """Answer in words, in lower case unless a single letter."""

    words: str


@dataclass(frozen=True, slots=True)
class Lettered:
    """Letter of a multiple choice with what it stands for, e.g. "(B) 12"."""

    letter: str
    value: "AnswerValue | None"


AnswerValue: TypeAlias = (
    Quantity
    | BasedNumber
    | Listing
    | Collection
    | Bracketed
    | Region
    | Grid
    | Proportion
    | Statement
    | Named
    | Phrase
    | Lettered
)
