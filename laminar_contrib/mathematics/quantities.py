"""Numbers and formulas with their units, read from tokens.

Pure; `structure` calls it. Invariant: words that could say something else than a unit are refused.
"""

import re
from collections.abc import Sequence
from fractions import Fraction

from laminar_contrib.mathematics import words
from laminar_contrib.mathematics.brackets import Tokens
from laminar_contrib.mathematics.expressions import Applied, Expression, Numeral, Variable, parse_expression
from laminar_contrib.mathematics.tokens import Token, TokenKind, UnreadableError
from laminar_contrib.mathematics.units import MeasureUnit, make_unit
from laminar_contrib.mathematics.values import Quantity

DEGREE = MeasureUnit(Fraction(1), (("angle", 1),))
RADIAN = MeasureUnit(Fraction(1), (("radians", 1),))
SCALES = {"c": "celsius", "celsius": "celsius", "f": "fahrenheit", "fahrenheit": "fahrenheit"}
RAISED = {"squared": 2, "cubed": 3}
MAX_WORDS = 8


def read_quantity(tokens: Tokens) -> Quantity:
    """Quantity that all the tokens make. Raises `UnreadableError`."""
    tokens, currency = _without_parentheses(list(tokens)), ""
    for place, token in enumerate(tokens[:2]):
        is_first = place == 0 or tokens[0].is_sign("-", "+")
        if is_first and (token.is_sign("$", "€", "£", "₹", "¥") or token.text.lower() in ("rs", "usd")):
            currency = token.text
            del tokens[place : place + 1 + (len(tokens) > place + 1 and tokens[place + 1].is_sign("."))]
            break
    expression, rest = parse_expression(_spelled(tokens))
    if rest and rest[0].text.lower() in words.MULTIPLES:
        expression = Applied("multiply", (expression, _whole(words.MULTIPLES[rest[0].text.lower()])))
        rest = rest[1:]
    if rest and rest[0].is_sign("%"):
        if len(rest) > 1 or currency:
            raise UnreadableError("words after a percent sign")
        return Quantity(expression, is_percent=True)
    if len(rest) == 1 and rest[0].text.lower() in ("percent", "pct"):
        return Quantity(expression, is_percent=True)
    for place, token in enumerate(rest):
        if token.kind is TokenKind.NUMBER and rest[place - 1].kind is TokenKind.WORD:
            return _compound(_with_degrees(expression, _unit_factors(rest[:place])), read_quantity(rest[place:]))
    factors = [(currency, 1)] if currency else []
    return _with_degrees(expression, [*factors, *_unit_factors(rest)])


def _without_parentheses(tokens: list[Token]) -> list[Token]:
    """Tokens without the parentheses of words at the end, as in "5 (cm)"."""
    if len(tokens) < 4 or not tokens[-1].is_sign(")"):
        return tokens
    begin = max((place for place, token in enumerate(tokens) if token.is_sign("(")), default=0)
    said = tokens[begin + 1 : -1]
    is_unit = begin > 0 and said and all(token.kind is TokenKind.WORD for token in said)
    return [*tokens[:begin], *said] if is_unit else tokens


def _compound(first: Quantity, second: Quantity) -> Quantity:
    """Sum of quantities such as "1 hour 30 minutes", in the unit of the second."""
    if first.unit is None or second.unit is None or first.unit.dimensions != second.unit.dimensions:
        raise UnreadableError("two quantities side by side")
    ratio = Numeral(first.unit.size / second.unit.size)
    return Quantity(
        Applied("add", (Applied("multiply", (first.expression, ratio)), second.expression)), second.unit
    )


def _spelled(tokens: list[Token]) -> list[Token]:
    """Tokens with a number in words in digits, if nothing but words comes after it."""
    number = words.NUMBERS.get(tokens[0].text.lower()) if tokens else None
    if number is None or any(token.kind is not TokenKind.WORD for token in tokens):
        return tokens
    return [Token(TokenKind.NUMBER, str(number)), *tokens[1:]]


def _whole(number: int) -> Numeral:
    return Numeral(Fraction(number), str(number))


def _with_degrees(expression: Expression, factors: list[tuple[str, int]]) -> Quantity:
    """Quantity of which a sign for degrees is the unit."""
    scale = ""
    if isinstance(expression, Applied) and expression.name == "multiply" and not factors:
        inner, letter = expression.args
        if isinstance(letter, Variable) and letter.name in ("C", "F") and _degrees(inner) is not None:
            expression, scale = inner, SCALES[letter.name.lower()]
    elif len(factors) == 1 and _degrees(expression) is not None:
        scale = SCALES.get(factors[0][0].lower(), "")
    bare = _degrees(expression)
    if bare is not None and scale:
        return Quantity(bare, make_unit([(scale, 1)]))
    unit = make_unit(factors)
    return Quantity(bare, DEGREE) if bare is not None and unit is None else Quantity(expression, unit)


def _degrees(expression: Expression) -> Expression | None:
    """Number of degrees of an angle such as 30° or -30°; None of anything else."""
    if not isinstance(expression, Applied):
        return None
    if expression.name == "degrees":
        return expression.args[0]
    inner = _degrees(expression.args[0]) if expression.name == "negate" else None
    return None if inner is None else Applied("negate", (inner,))


def _unit_factors(tokens: Sequence[Token]) -> list[tuple[str, int]]:
    """Words of a unit with their powers, e.g. m and s^-2. Raises for words that may say something else."""
    factors: list[tuple[str, int]] = []
    sign, place = 1, 0
    while place < len(tokens):
        token = tokens[place]
        place += 1
        if token.is_sign("/") or token.text.lower() == "per":
            sign = -1
        elif token.text.lower() in RAISED and factors:
            factors[-1] = (factors[-1][0], factors[-1][1] * RAISED[token.text.lower()])
        elif token.is_sign("^") and factors:
            power, place = _power(tokens, place)
            factors[-1] = (factors[-1][0], factors[-1][1] * power)
        elif token.kind in (TokenKind.WORD, TokenKind.NAME) or token.is_sign("$", "€", "£", "₹", "¥", "¢"):
            if token.text.lower() in words.NO_UNITS | words.MULTIPLES.keys() | words.NUMBERS.keys():
                raise UnreadableError(f"{token.text!r} after a number")
            factors.append((token.text, sign))
        elif not token.is_sign(".", "*", "-", "{", "}"):
            raise UnreadableError(f"{token.text!r} in a unit")
    if len(factors) > MAX_WORDS:
        raise UnreadableError("a sentence after a number")
    return factors


def _power(tokens: Sequence[Token], place: int) -> tuple[int, int]:
    """Whole power at a place, and the place after it."""
    text = ""
    while place < len(tokens) and (tokens[place].is_sign("{", "}", "-") or tokens[place].kind is TokenKind.NUMBER):
        text += tokens[place].text
        place += 1
    found = re.fullmatch(r"\{?(-?\d)\}?", text)
    if found is None:
        raise UnreadableError("a unit to a power that is no number")
    return int(found[1]), place
