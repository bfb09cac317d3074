"""Values of expressions: exact fractions where there are any, else numbers of many digits.

Pure. Invariant: bounded work: what would grow beyond `MAX_BITS` raises `TooLargeError` before it is computed.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, TypeAlias

import mpmath  # type: ignore[import-untyped]

from laminar_contrib.mathematics.expressions import Applied, Expression, Numeral, Variable, variables
from laminar_contrib.mathematics.words import word_set

MAX_BITS = 200_000
MAX_MAGNITUDE = 10**7  # bits of the exponent of a number that is not exact
MAX_FACTORIAL = 5_000
MAX_ROOT = 64

Value: TypeAlias = Any  # Fraction, or mpmath's mpf or mpc, which have no types
Functions: TypeAlias = Mapping[str, Callable[..., Value]]


class TooLargeError(ArithmeticError):
    """Raised for a number with too many digits to be worked out."""


class UndefinedError(ArithmeticError):
    """Raised where an expression has no value, e.g. the logarithm of a negative number among the real ones."""


class WholeNumbersError(UndefinedError):
    """Raised where an expression has a value for whole numbers only, e.g. (-1)^n."""


def evaluate(expression: Expression, point: Mapping[str, Fraction], *, is_complex: bool = False) -> Value:
    """Value where the variables are those of a point, to the digits of `mpmath.workdps`.

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
    """Number of mpmath at the present precision."""
    return mpmath.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value


def _apply(expression: Applied, args: list[Value], *, is_complex: bool) -> Value:
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
    if isinstance(exponent, Fraction) and exponent.denominator == 1 and isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(base) != 1 and bits * abs(exponent.numerator) > MAX_BITS:
            raise TooLargeError
        if not base and exponent <= 0:
            raise UndefinedError("a power of 0")
        return base**exponent.numerator if abs(base) != 1 else base ** (exponent.numerator % 2)
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and base >= 0:
        exact = _exact_power(base, exponent)
        if exact is not None:
            return exact
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
    if not base:
        if mpmath.re(exponent) > 0:
            return Fraction(0)
        raise UndefinedError("a power of 0")
    if not (mpmath.isinf(base) or mpmath.isinf(exponent)):
        large = mpmath.mag(exponent) > 40 or abs(mpmath.mag(base) * exponent) > MAX_MAGNITUDE
        if large and base != 1:
            raise TooLargeError
    return base**exponent


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Power that is a fraction again, e.g. 8^(2/3); None of others."""
    if exponent.denominator > MAX_ROOT or abs(exponent.numerator) > MAX_ROOT or (not base and exponent <= 0):
        return None
    over, under = (_exact_root(part, exponent.denominator) for part in (base.numerator, base.denominator))
    return None if over is None or under is None else Fraction(over, under) ** exponent.numerator


def _exact_root(number: int, degree: int) -> int | None:
    """Whole root of a whole number, by Newton's method; None if there is none."""
    if number < 2:
        return number
    guess = 1 << -(-number.bit_length() // degree)
    while True:
        better = ((degree - 1) * guess + number // guess ** (degree - 1)) // degree
        if better >= guess:
            return guess if guess**degree == number else None
        guess = better


def _factorial(number: Value) -> Value:
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
    """Logarithm; one without a base has a base of its own, which nobody knows, and so is equal to no other."""
    return mpmath.ln(number) / mpmath.ln(inexact(UNKNOWN_BASE) if base is None else base)


UNKNOWN_BASE = Fraction(7919, 577)
ARITHMETIC: Functions = {
    "add": lambda left, right: left + right,
    "multiply": lambda left, right: left * right,
    "divide": lambda left, right: left / right,
    "negate": lambda number: -number,
    "absolute": abs,
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
