"""Arithmetic: exact, like Python's, and of bounded cost."""

import time
from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_contrib.tools.calculator import MAX_DIGITS, calculator
from laminar_contrib.tools.tool import ToolError

NUMBERS = st.integers(0, 10**12).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
            lambda parts: f"({' '.join(parts)})"
        )
        | inner.map("-{}".format)
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_integers_are_those_of_python(expression):
    try:
        value = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculator(expression)
    else:
        assert calculator(expression) == str(value)


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6))
def test_fractions_have_no_rounding_but_that_of_what_is_written(a, b):
    written = calculator(f"({a.numerator}/{a.denominator}) * ({b.numerator}/{b.denominator})")
    assert Fraction(float(written)) == Fraction(float(a * b))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*3", "36"),
        (" 2 + 2 * ( 3 - -1 )\n", "10"),
        ("2**200", str(2**200)),
        ("10**17 / 10 + 1", "10000000000000001"),
        ("0.1 + 0.2", "0.3"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("1 / 3", "0.3333333333333333"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2 ** -3", "0.125"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("2 ** 3.0", "8"),
        ("1 ** 10 ** 900", "1"),
        ("10 ** -500 * 3 / 7", "4.285714285714286E-501"),
        ("1e3", "1000"),
    ],
)
def test_values(expression, value):
    assert calculator(expression) == value


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("1 % 0", "division by zero"),
        ("9**9**9", f"a number of more than {MAX_DIGITS} digits"),
        ("9**9**-9**9**9", f"a number of more than {MAX_DIGITS} digits"),
        ("9**900 * 9**300", f"a number of more than {MAX_DIGITS} digits"),
        ("1e400", f"a number of more than {MAX_DIGITS} digits"),
        ("(10**900) ** 0.5", "a number too large for a root"),
        ("(10**-900) ** 0.5", "a number too small for a root"),
        ("(-8) ** (1/3)", "a root of a negative number"),
        ("1 +", "cannot be read; "),
        ("(" * 400 + "1" + ")" * 400, "cannot be read; "),
        ("1" + "+1" * 1000, "longer than 1000 characters"),
        ("", "give numbers with "),
        ("()", "give numbers with "),
        ("x", "give numbers with "),
        ("(1).real", "give numbers with "),
        ("__import__('os')", "give numbers with "),
        ("1 if 1 else 2", "give numbers with "),
        ("1\x002", "give numbers with "),
    ],
)
def test_what_has_no_value_says_why(expression, fault):
    with pytest.raises(ToolError) as caught:
        calculator(expression)
    assert str(caught.value).startswith(fault)


@given(st.text(alphabet="0123456789.eE_+-*/%() ", max_size=60))
def test_any_expression_costs_little(expression):
    start = time.process_time()
    with suppress(ToolError):
        assert len(calculator(expression)) <= MAX_DIGITS + 10
    assert time.process_time() - start < 1
