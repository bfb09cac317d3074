"""The tool `calculator`: exact arithmetic, whose cost is bounded for every expression.

Numbers are fractions, so integers and decimals have no rounding. Only a power with a fractional exponent is a
floating-point number. A power with many more than `MAX_DIGITS` digits is refused before it is computed
(`tests/environment/tools/test_calculator.py`).
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction

from laminar_contrib.tools.tool import ToolError

MAX_CHARS = 1000  # of an expression
MAX_DIGITS = 1000  # of a number; Python itself writes 4300
MAX_BITS = int(MAX_DIGITS * 3.33)
ALLOWED = re.compile(r"[0-9.eE_+\-*/%()\s]+")
HINT = "give numbers with + - * / // % ** and parentheses"
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Value of an arithmetic expression, e.g. `12 * (3 + 4) ** 2`, with + - * / // % ** and parentheses."""
    text = expression.strip()
    if len(text) > MAX_CHARS:
        raise ToolError(f"longer than {MAX_CHARS} characters")
    if not ALLOWED.fullmatch(text):
        raise ToolError(HINT)
    try:
        return _to_text(_value(ast.parse(text, mode="eval").body))
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two of parentheses and signs
        raise ToolError(f"cannot be read; {HINT}") from error


def _value(node: ast.expr) -> Fraction:
    """Compute an expression exactly. Raises `ToolError` for other syntax and for too many digits."""
    match node:
        case ast.Constant(value=int() | float() as number):
            if abs(number) == float("inf"):
                raise ToolError(f"a number of more than {MAX_DIGITS} digits")
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in BINARY:
            return _bounded(Fraction(BINARY[type(op)](_value(left), _value(right))))
    raise ToolError(HINT)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Compute a power; refuse it beforehand if it would be too large."""
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits > 1 and (bits - 1) * abs(exponent) > MAX_BITS:
            raise ToolError(f"a number of more than {MAX_DIGITS} digits")
        return Fraction(base**exponent.numerator)
    if base < 0:
        raise ToolError("a root of a negative number")
    try:
        value = Fraction(float(base) ** float(exponent))
    except OverflowError as error:
        raise ToolError("a number too large for a root") from error
    if base and not value:
        raise ToolError("a number too small for a root")
    return value


def _bounded(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        raise ToolError(f"a number of more than {MAX_DIGITS} digits")
    return number


def _to_text(number: Fraction) -> str:
    """Write an integer with all digits, and other numbers with as many as a float has."""
    if number.denominator == 1:
        return str(number.numerator)
    if Fraction(1, 10**300) < abs(number) < 10**300:
        return repr(float(number))
    with localcontext(prec=16):
        return str(Decimal(number.numerator) / Decimal(number.denominator))
