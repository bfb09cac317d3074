"""The last word of the `math-verify` library on answers that we do not read ourselves, with our vetoes.

Invariant: only answers without words, decimals, relations and subscripts get here (a sum or an integral that is
not worked out is no answer), and what the library calls equal has to have equal values too; its reading drops what
it does not know.
"""

import logging
from typing import Any

from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]
from sympy import Basic, Expr, Float, Integer, Rational  # type: ignore[import-untyped]

from laminar_contrib.mathematics.brackets import has_outside
from laminar_contrib.mathematics.tokens import Token, TokenKind, UnreadableError, tokenise

PLAIN_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
)
EXTRACTION = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=PLAIN_LATEX)]
REFUSED = (
    "_",
    "!",
    "%",
    "row",
    "dots",
    "approx",
    "pm",
    "mp",
    "circ",
    "bmod",
    "pmod",
    "equiv",
    "|",
    "=",
    "ne",
    "in",
)
DIGITS, SLACK = 50, 10**-35

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time-outs are off, which they must be


def may_judge(*sides: tuple[Token, ...]) -> bool:
    """True for answers of which the library is known to read all; of a chain of equations it reads the end."""
    try:
        return not any(has_outside(side, "row") or any(map(_is_refused, side)) for side in sides)
    except UnreadableError:  # brackets that do not match
        return False


def _is_refused(token: Token) -> bool:
    is_decimal = token.kind is TokenKind.NUMBER and "." in token.text
    return token.kind is TokenKind.WORD or token.is_sign(*REFUSED) or is_decimal


def library_accepts(reference: str, answer: str) -> bool | None:
    """Judgement of the library, vetoed where values differ; None where it cannot read one of the two."""
    try:
        wanted, given = (_parsed(text) for text in (reference, answer))
        if wanted is None or given is None:
            return None
        is_equal = verify(wanted, given, allow_set_relation_comp=True, timeout_seconds=None)
        return bool(is_equal) and _have_equal_values(wanted, given)
    except Exception as error:  # noqa: BLE001 - a library on a text of a model's
        logging.getLogger(__name__).debug("not judged: %r", error)
        return None


def _parsed(text: str) -> Basic | None:
    """Expression with all variables of a text; None of others, from which the library has dropped some."""
    found = parse(
        f"${text}$", EXTRACTION, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    if len(found) != 1 or not isinstance(found[0], Basic):
        return None
    tokens = tokenise(text, grouped=False)
    names = {token.text for token in tokens if token.kind is TokenKind.NAME} - {"e", "i"}
    return found[0] if len(found[0].free_symbols) == len(names) else None


def _have_equal_values(wanted: Basic, given: Basic) -> bool:
    """False for formulas whose values differ somewhere; of other kinds the library is believed."""
    if wanted.has(Float) or given.has(Float) or wanted.free_symbols != given.free_symbols:
        return False
    if not (isinstance(wanted, Expr) and isinstance(given, Expr)):
        return isinstance(wanted, Expr) == isinstance(given, Expr)
    names = sorted(wanted.free_symbols, key=str)
    for shift in (2, 5, 11):
        point = {name: Rational(7 * index + shift, 3) for index, name in enumerate(names)}
        values = [side.doit().subs(point).evalf(DIGITS) for side in (wanted, given)]
        if not all(value.is_number for value in values) or not _are_near(*values):
            return False
    return True


def _are_near(left: Any, right: Any) -> bool:
    size = max(abs(left), abs(right), Integer(0))
    return bool(abs(left - right) <= SLACK * size)
