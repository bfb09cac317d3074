"""Values of expressions, and their equality: of numbers, of decimals that stand for them, and of formulas. Pure.

Rules:

- Exact numbers are compared exactly, others to 200 digits, relatively: 1/2^99 is not 1/2^98.
- A decimal is that number alone: 0.3333 is not 1/3, and 3.14159 is not pi, unless approximations are allowed.
- A reference that is a decimal of four significant digits or more says how many are wanted: an answer is right
  that rounds to it and has no fewer digits. A reference of fewer digits is exact.
- Formulas are equal if they have the same variables and the same values at all sample points, with the same domain
  among the real numbers: sqrt(x^2) is |x|, not x.

Invariant: work is bounded. A number that would grow beyond `MAX_BITS` raises `TooLargeError` before it is computed
(`test_numbers_too_large_are_not_worked_out_but_equal_to_themselves` in `verifiers/test_math_laws.py`).
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath  # type: ignore[import-untyped]

from laminar_contrib.mathematics.expressions import (
    Applied,
    Expression,
    Numeral,
    Variable,
    negated,
    operations,
    renamed,
    variables,
)
from laminar_contrib.mathematics.words import word_set

MAX_BITS = 200_000
MAX_MAGNITUDE = 10**7  # bits in the exponent of an inexact number
MAX_FACTORIAL = 5_000

Value: TypeAlias = Any  # Fraction, or mpmath's mpf or mpc, which have no types
Functions: TypeAlias = Mapping[str, Callable[..., Value]]


class TooLargeError(ArithmeticError):
    """Raised for a number with too many digits to be worked out."""

    def __str__(self) -> str:
        return "a number too large to be worked out"


class UndefinedError(ArithmeticError):
    """Raised where an expression has no value, e.g. the logarithm of a negative number among the real ones."""


class WholeNumbersError(UndefinedError):
    """Raised where an expression has a value for whole numbers only, e.g. (-1)^n."""


def evaluate(expression: Expression, point: Mapping[str, Fraction], *, is_complex: bool = False) -> Value:
    """Return the value of an expression at a point, to the digits of `mpmath.workdps`.

    Real roots and logarithms only, unless `is_complex`, which takes principal values. Raises `UndefinedError` and
    `TooLargeError`.
    """
    if isinstance(expression, Numeral):
        return expression.value
    if isinstance(expression, Variable):
        return point[expression.name]
    args = [evaluate(arg, point, is_complex=is_complex) for arg in expression.args]
    try:
        value = _apply(expression, args, is_complex=is_complex)
    except (ZeroDivisionError, ValueError, OverflowError, TypeError, mpmath.libmp.NoConvergence) as error:
        raise UndefinedError(f"{expression.name} of {len(args)}: {type(error).__name__}") from None
    return _checked(value)


def _checked(value: Value) -> Value:
    """Return a value without a zero imaginary part. Raises `TooLargeError` and, for NaN, `UndefinedError`."""
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
            raise TooLargeError
        return value
    if mpmath.isnan(value):
        raise UndefinedError("not a number")
    if not mpmath.isinf(value) and value != 0 and abs(mpmath.mag(value)) > MAX_MAGNITUDE:
        raise TooLargeError
    return value.real if isinstance(value, mpmath.mpc) and value.imag == 0 else value


def inexact(value: Value) -> Value:
    """Convert a number to mpmath's type at the present precision."""
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _apply(expression: Applied, args: list[Value], *, is_complex: bool) -> Value:
    """Compute an operation on values, exactly where all are fractions and the operation allows it."""
    name = expression.name
    if name in ARITHMETIC:
        both = all(isinstance(arg, Fraction) for arg in args)
        return ARITHMETIC[name](*(args if both else map(inexact, args)))
    if name == "power":
        whole_only = bool(variables(expression.args[1]))
        return _power(args[0], args[1], is_complex=is_complex, whole_only=whole_only)
    if name == "root":
        if not (isinstance(args[1], Fraction) and args[1]):
            raise UndefinedError("a root of a degree that is no number")
        return _power(args[0], 1 / args[1], is_complex=is_complex, whole_only=False)
    if name in CONSTANTS:
        return CONSTANTS[name]()
    if name in WHOLE:
        return WHOLE[name](*args)
    return _function(name, list(map(inexact, args)), is_complex=is_complex)


def _power(base: Value, exponent: Value, *, is_complex: bool, whole_only: bool) -> Value:
    """Raise to a power: exactly if possible, over the real numbers unless `is_complex`.

    Raises `TooLargeError`, `UndefinedError`, or `WholeNumbersError` if only whole exponents have a value.
    """
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) != 1 and bits * abs(exponent.numerator) > MAX_BITS:
            raise TooLargeError
        if not base and exponent <= 0:
            raise UndefinedError("a power of 0")
        return base**exponent.numerator if abs(base) != 1 else base ** (exponent.numerator % 2)
    is_negative = not isinstance(base, mpmath.mpc) and base < 0
    if is_negative and not is_complex and not _is_whole(exponent):
        if whole_only:
            raise WholeNumbersError
        if isinstance(exponent, Fraction) and exponent.denominator % 2:
            root = _power(-base, exponent, is_complex=False, whole_only=False)
            return -root if exponent.numerator % 2 else root
        raise UndefinedError("a root of a negative number")
    return _inexact_power(inexact(base), inexact(exponent))


def _is_whole(number: Value) -> bool:
    return not isinstance(number, mpmath.mpc) and number == int(number)


def _inexact_power(base: Value, exponent: Value) -> Value:
    """Raise to a power in floating point. Raises `TooLargeError` and `UndefinedError`."""
    if not base:
        if mpmath.re(exponent) > 0:
            return Fraction(0)
        raise UndefinedError("a power of 0")
    if not (mpmath.isinf(base) or mpmath.isinf(exponent)):
        large = mpmath.mag(exponent) > 40 or abs(mpmath.mag(base) * exponent) > MAX_MAGNITUDE
        if large and base != 1:
            raise TooLargeError
    return base**exponent


def _factorial(number: Value) -> Value:
    """Compute a factorial, or gamma for other numbers. Raises `TooLargeError` and `UndefinedError`."""
    if isinstance(number, Fraction) and number.denominator == 1:
        if number < 0:
            raise UndefinedError("the factorial of a negative number")
        if number > MAX_FACTORIAL:
            raise TooLargeError
        return Fraction(math.factorial(number.numerator))
    if mpmath.mag(inexact(number)) > 20:
        raise TooLargeError
    return mpmath.gamma(inexact(number) + 1)


def _binomial(number: Value, chosen: Value) -> Value:
    whole = all(isinstance(part, Fraction) and part.denominator == 1 and part >= 0 for part in (number, chosen))
    if max(mpmath.mag(inexact(number)), mpmath.mag(inexact(chosen))) > 13:
        raise TooLargeError
    if whole:
        return Fraction(math.comb(number.numerator, chosen.numerator))
    return mpmath.binomial(inexact(number), inexact(chosen))


def _rounded(number: Value, *, up: bool) -> Value:
    if isinstance(number, Fraction):
        return Fraction(math.ceil(number) if up else math.floor(number))
    if mpmath.mag(number) > MAX_BITS:
        raise TooLargeError
    return Fraction(int(mpmath.ceil(number) if up else mpmath.floor(number)))


def _function(name: str, args: list[Value], *, is_complex: bool) -> Value:
    if not is_complex and (
        (name in ("ln", "log", "lg") and any(arg <= 0 for arg in args))
        or (name in ("arcsin", "arccos") and abs(args[0]) > 1)
    ):
        raise UndefinedError(f"{name} outside the real numbers")
    if name in HUGE_ARGUMENTS and mpmath.mag(args[0]) > 30:
        raise TooLargeError
    return FUNCTIONS[name](*args)


def _log(number: Value, base: Value | None = None) -> Value:
    """Return a logarithm. Without a base the base is unknown, so the result equals no other logarithm."""
    return mpmath.ln(number) / mpmath.ln(inexact(UNKNOWN_BASE) if base is None else base)


UNKNOWN_BASE = Fraction(7919, 577)
ARITHMETIC: Functions = {
    "add": lambda left, right: left + right,
    "multiply": lambda left, right: left * right,
    "divide": lambda left, right: left / right,
    "negate": lambda number: -number,
    "absolute": abs,
    "max": max,
    "min": min,
}
CONSTANTS: Functions = {
    "pi": lambda: +mpmath.pi,
    "e": lambda: +mpmath.e,
    "i": lambda: mpmath.mpc(0, 1),
    "infinity": lambda: mpmath.inf,
}
WHOLE: Functions = {
    "factorial": _factorial,
    "binomial": _binomial,
    "floor": lambda number: _rounded(number, up=False),
    "ceiling": lambda number: _rounded(number, up=True),
}
PLAIN_FUNCTIONS = word_set("sin cos tan cot sec csc sinh cosh tanh coth exp")
HUGE_ARGUMENTS = PLAIN_FUNCTIONS | {"degrees"}
FUNCTIONS: Functions = {
    **{name: getattr(mpmath, name) for name in (*PLAIN_FUNCTIONS, "ln")},
    "arcsin": mpmath.asin,
    "arccos": mpmath.acos,
    "arctan": mpmath.atan,
    "log": _log,
    "lg": mpmath.log10,
    "degrees": mpmath.radians,
}


FEWEST_DIGITS = 4
DIGITS = (60, 220)
SLACK = 20  # digits that rounding may cost
FEWEST_POINTS = 3
CONSTANT_LETTERS = {"C", "K", "c", "C_1", "c_1"}
Point = Mapping[str, Fraction]


@dataclass(frozen=True, slots=True)
class Rounded:
    """Decimal as it was written: 2.50 is `Rounded(Fraction(5, 2), Fraction(1, 200), 3)`."""

    value: Fraction
    half_unit: Fraction  # of its last digit
    digits: int  # significant ones

    def holds(self, number: Value) -> bool:
        """Return True if a number rounds to this decimal."""
        return bool(abs(inexact(number) - inexact(self.value)) <= inexact(self.half_unit))


def as_decimal(expression: Expression) -> Rounded | None:
    """Return the decimal that an expression is, with its sign and power of ten; None for any other expression."""
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
    """Return the value of a literal power of ten such as 1000 or 10^-3, else None."""
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
    """Return True if the value of a number rounds to a decimal of any number of digits."""
    try:
        with mpmath.workdps(DIGITS[0]):
            return rounded.holds(evaluate(expression, {}))
    except UndefinedError:
        return False


def same_expression(reference: Expression, answer: Expression) -> bool:
    """Return True if an answer has the value of the reference. Raises `TooLargeError`."""
    if variables(reference) | variables(answer):
        return _same_formula(reference, answer)
    wanted, given = as_decimal(reference), as_decimal(answer)
    is_fine = given is None or (wanted is not None and given.half_unit <= wanted.half_unit)
    return same_number(reference, answer) or (is_fine and is_rounding(answer, reference))


def is_rounding(number: Expression, decimal: Expression) -> bool:
    """Return True if a number without variables rounds to a decimal of at least `FEWEST_DIGITS` digits."""
    rounded = as_decimal(decimal)
    if rounded is None or rounded.digits < FEWEST_DIGITS or variables(number):
        return False
    return rounds_to(number, rounded)


def same_number(left: Expression, right: Expression) -> bool:
    """Return True if two expressions without variables are equal, as complex numbers if no value is real."""
    is_complex = "i" in operations(left) | operations(right)
    for attempt in {is_complex, True}:
        try:
            return _agree(left, right, {}, is_complex=attempt)
        except UndefinedError:
            continue
    return False


def _agree(left: Expression, right: Expression, point: Point, *, is_complex: bool) -> bool:
    """Return True if both sides are equal at a point. Raises `UndefinedError` if a side has no value there.

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
    """Whether two formulas have the same variables, and equal values at enough sample points."""
    answer = renamed(answer, _constant_of_integration(variables(reference), variables(answer)))
    names = variables(reference)
    if names != variables(answer):
        return False
    if "i" not in operations(reference) | operations(answer):
        seen, same = _compare(reference, answer, names, is_complex=False)
        if seen >= FEWEST_POINTS or not same:
            return same
    seen, same = _compare(reference, answer, names, is_complex=True)
    return same and seen >= FEWEST_POINTS


def _constant_of_integration(wanted: set[str], given: set[str]) -> dict[str, str]:
    """Return the reference's letter by the answer's, if the two formulas differ in no other variable."""
    left, right = wanted - given, given - wanted
    is_constant = len(left) == len(right) == 1 and left | right <= CONSTANT_LETTERS
    return {right.pop(): left.pop()} if is_constant else {}


def _compare(reference: Expression, answer: Expression, names: set[str], *, is_complex: bool) -> tuple[int, bool]:
    """Return the number of points where both have a value, and True if values and domains are the same."""
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
    """Return the points at which formulas are compared.

    Always the same, small and large, of both signs, and whole.
    """
    draw = random.Random(7)
    spans = [(0, 1), (0, 1), (0, 1), (1, 5), (1, 5), (-1, 0), (-5, -1), (-4, 4)]
    points = [
        {name: low + (high - low) * Fraction(draw.randrange(1, 96), 97) for name in sorted(names)}
        for low, high in spans
    ]
    return [*points, *({name: Fraction(draw.randrange(2, 12)) for name in sorted(names)} for _ in range(3))]


def proportional(reference: Expression, answer: Expression, *, positive: bool) -> bool:
    """Return True if one expression is a constant times the other, so that both are 0 at the same points.

    With `positive` the constant must be above 0, as for the two sides of an inequality. Raises `TooLargeError`.
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
            if not factor or (positive and (factor.imag or factor.real < 0)):
                return False
            slack = mpmath.mpf(10) ** (SLACK - DIGITS[0])
            if abs(given - factor * wanted) > slack * (abs(given) + abs(factor * wanted)):
                return False
            seen += 1
    return seen >= FEWEST_POINTS


def difference(left: Expression, right: Expression) -> Expression:
    """Return the left side of an equation minus the right side."""
    return Applied("add", (left, negated(right)))
