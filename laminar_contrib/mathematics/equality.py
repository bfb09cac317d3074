"""Equality of expressions: of numbers, of decimals that stand for them, and of formulas.

Pure. Rules:

- Exact numbers are compared exactly, others to 200 digits, relatively: 1/2^99 is not 1/2^98.
- A decimal answer stands for a number that no decimal equals (1/3, a root, pi) if that number rounds to it and it
  has four significant digits at least: 0.3333 is 1/3, 0.333 and 0.33334 are not. A number that some decimal equals
  (5/8, 12) is only that one.
- A reference that is a decimal of four significant digits or more says how many are wanted: an answer is right
  that rounds to it and has no fewer digits. A reference of fewer digits is exact.
- Formulas are equal if they have the same variables and the same values wherever we look, with the same domain
  among the real numbers: sqrt(x^2) is |x|, not x.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import mpmath  # type: ignore[import-untyped]

from laminar_contrib.mathematics.evaluate import (
    UndefinedError,
    Value,
    WholeNumbersError,
    evaluate,
    inexact,
)
from laminar_contrib.mathematics.expressions import (
    Applied,
    Expression,
    Numeral,
    negated,
    operations,
    variables,
)

FEWEST_DIGITS = 4
DIGITS = (60, 220)
SLACK = 20  # digits that rounding may cost
FEWEST_POINTS = 3
Point = Mapping[str, Fraction]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Decimal as it was written: 2.50 is `Rounded(Fraction(5, 2), Fraction(1, 200), 3)`."""

    value: Fraction
    half_unit: Fraction  # of its last digit
    digits: int  # significant ones

    def holds(self, number: Value) -> bool:
        """True where a number rounds to it."""
        return bool(abs(inexact(number) - inexact(self.value)) <= inexact(self.half_unit))


def as_decimal(expression: Expression) -> Rounded | None:
    """Decimal that an expression is, with a sign and a power of ten; None of others."""
    if isinstance(expression, Numeral) and expression.is_decimal:
        digits = expression.text.replace(".", "").lstrip("0")
        unit = Fraction(1, 10 ** len(expression.text.partition(".")[2]))
        return Rounded(expression.value, unit / 2, len(digits))
    if not isinstance(expression, Applied):
        return None
    if expression.name == "negate":
        inner = as_decimal(expression.args[0])
        return inner and Rounded(-inner.value, inner.half_unit, inner.digits)
    if expression.name in ("multiply", "divide"):
        inner, scale = as_decimal(expression.args[0]), _power_of_ten(expression.args[1])
        if inner is None or scale is None:
            return None
        scale = scale if expression.name == "multiply" else 1 / scale
        return Rounded(inner.value * scale, inner.half_unit * scale, inner.digits)
    return None


def _power_of_ten(expression: Expression) -> Fraction | None:
    if isinstance(expression, Numeral) and not expression.is_decimal:
        return (
            expression.value if set(expression.text) <= set("10") and expression.text.strip("0") == "1" else None
        )
    if not (isinstance(expression, Applied) and expression.name == "power"):
        return None
    base, exponent = expression.args
    sign = -1 if isinstance(exponent, Applied) and exponent.name == "negate" else 1
    exponent = exponent.args[0] if isinstance(exponent, Applied) and sign < 0 else exponent
    if base != Numeral(Fraction(10), "10") or not isinstance(exponent, Numeral):
        return None
    if exponent.value > 400 or exponent.value.denominator != 1:
        return None
    return Fraction(10) ** (sign * int(exponent.value))


def rounds_to(expression: Expression, rounded: Rounded) -> bool:
    """True where the value of a number rounds to a decimal, to however few digits."""
    try:
        with mpmath.workdps(DIGITS[0]):
            return rounded.holds(evaluate(expression, {}))
    except UndefinedError:
        return False


def same_expression(reference: Expression, answer: Expression) -> bool:
    """True where an answer has the value of the reference. Raises `TooLargeError`."""
    if variables(reference) | variables(answer):
        return _same_formula(reference, answer)
    if same_number(reference, answer):
        return True
    try:
        return _is_rounding(reference, answer)
    except UndefinedError:
        return False


def _is_rounding(reference: Expression, answer: Expression) -> bool:
    wanted, given = as_decimal(reference), as_decimal(answer)
    with mpmath.workdps(DIGITS[0]):
        if wanted is not None:
            is_fine = given is None or given.half_unit <= wanted.half_unit
            return wanted.digits >= FEWEST_DIGITS and is_fine and wanted.holds(evaluate(answer, {}))
        if given is None or given.digits < FEWEST_DIGITS:
            return False
        value = evaluate(reference, {})
        return not _is_terminating(value) and given.holds(value)


def _is_terminating(value: Value) -> bool:
    """True for a fraction that some decimal equals."""
    if not isinstance(value, Fraction):
        return False
    under = value.denominator
    for prime in (2, 5):
        while under % prime == 0:
            under //= prime
    return under == 1


def same_number(left: Expression, right: Expression) -> bool:
    """Equality of two numbers without variables, among the complex numbers if need be."""
    is_complex = "i" in operations(left) | operations(right)
    for attempt in {is_complex, True}:
        try:
            return _agree(left, right, {}, is_complex=attempt)
        except UndefinedError:
            continue
    return False


def _agree(left: Expression, right: Expression, point: Point, *, is_complex: bool) -> bool:
    """Equality at a point. Raises `UndefinedError` where a side has no value there.

    Numbers below 10^-200 that are not exact count as 0, which has many ways to be written, such as sin(pi).
    """
    for digits in DIGITS:
        with mpmath.workdps(digits):
            values = [evaluate(side, point, is_complex=is_complex) for side in (left, right)]
            if all(isinstance(value, Fraction) for value in values):
                return bool(values[0] == values[1])
            values = [inexact(value) for value in values]
            if any(mpmath.isinf(value) for value in values):
                return bool(values[0] == values[1])
            size, smallest = max(abs(value) for value in values), mpmath.mpf(10) ** (SLACK - digits)
            if abs(values[0] - values[1]) > size * smallest and size > smallest:
                return False
    return True


def _same_formula(reference: Expression, answer: Expression) -> bool:
    names = variables(reference)
    if names != variables(answer):
        return False
    if "i" not in operations(reference) | operations(answer):
        seen, same = _compare(reference, answer, names, is_complex=False)
        if seen or not same:
            return same and seen >= FEWEST_POINTS
    seen, same = _compare(reference, answer, names, is_complex=True)
    return same and seen >= FEWEST_POINTS


def _compare(reference: Expression, answer: Expression, names: set[str], *, is_complex: bool) -> tuple[int, bool]:
    """Number of points at which both have a value, and True if the values and the domains are the same."""
    seen = 0
    for point in sample_points(names):
        try:
            defined = [_is_defined(side, point, is_complex=is_complex) for side in (reference, answer)]
        except WholeNumbersError:
            continue
        if defined[0] != defined[1]:
            return seen, False
        if defined[0]:
            seen += 1
            if not _agree(reference, answer, point, is_complex=is_complex):
                return seen, False
    return seen, True


def _is_defined(expression: Expression, point: Point, *, is_complex: bool) -> bool:
    try:
        evaluate(expression, point, is_complex=is_complex)
    except WholeNumbersError:
        raise
    except UndefinedError:
        return False
    return True


def sample_points(names: set[str]) -> list[Point]:
    """Points to look at, always the same: small and large ones, of both signs, and whole numbers."""
    draw = random.Random(7)
    spans = [(0, 1), (0, 1), (0, 1), (1, 5), (1, 5), (-1, 0), (-5, -1), (-4, 4)]
    points = [
        {name: low + (high - low) * Fraction(draw.randrange(1, 96), 97) for name in sorted(names)}
        for low, high in spans
    ]
    return [*points, *({name: Fraction(draw.randrange(2, 12)) for name in sorted(names)} for _ in range(3))]


def proportional(reference: Expression, answer: Expression, *, positive: bool) -> bool:
    """True where one expression is a number times the other, so that both are 0 together.

    `positive` wants a number above 0, as for the two sides of an inequality. Raises `TooLargeError`.
    """
    names = variables(reference)
    if names != variables(answer):
        return False
    factor, seen = None, 0
    with mpmath.workdps(DIGITS[0]):
        for point in sample_points(names):
            try:
                wanted, given = (inexact(evaluate(side, point)) for side in (reference, answer))
            except UndefinedError:
                continue
            if factor is None and wanted:
                factor = given / wanted
            if factor is None or not factor or (positive and factor < 0):
                return False
            slack = mpmath.mpf(10) ** (SLACK - DIGITS[0])
            if abs(given - factor * wanted) > slack * (abs(given) + abs(factor * wanted)):
                return False
            seen += 1
    return seen >= FEWEST_POINTS


def difference(left: Expression, right: Expression) -> Expression:
    """Left side of an equation less the right one."""
    return Applied("add", (left, negated(right)))
