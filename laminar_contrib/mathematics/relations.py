"""Relations, and numbers and formulas with their units, read from tokens. Pure; `structure` calls it.

It refuses words that may mean something other than a unit.
"""

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from laminar_contrib.mathematics import words
from laminar_contrib.mathematics.answers import (
    DEGREE,
    MINUS,
    PLUS,
    AnswerValue,
    Interval,
    Named,
    Quantity,
    Region,
    Statement,
    everything,
    share,
    union,
    without_points,
)
from laminar_contrib.mathematics.equality import as_decimal, difference, rounds_to, same_expression
from laminar_contrib.mathematics.expressions import (
    Applied,
    Expression,
    Numeral,
    Token,
    TokenKind,
    Tokens,
    UnreadableError,
    Variable,
    has_outside,
    is_enclosed,
    negated,
    parse_expression,
    split_at,
    variables,
)
from laminar_contrib.mathematics.words import make_unit

SCALES = {"c": "celsius", "celsius": "celsius", "f": "fahrenheit", "fahrenheit": "fahrenheit"}
RAISED = {"squared": 2, "cubed": 3}
MAX_WORDS = 8


def read_quantity(tokens: Tokens) -> Quantity:
    """Read all tokens as one quantity. Raises `UnreadableError`."""
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
    """Drop the parentheses around words at the end, as in "5 (cm)"."""
    if len(tokens) < 4 or not tokens[-1].is_sign(")"):
        return tokens
    begin = max((place for place, token in enumerate(tokens) if token.is_sign("(")), default=0)
    said = tokens[begin + 1 : -1]
    is_unit = begin > 0 and said and all(token.kind is TokenKind.WORD for token in said)
    return [*tokens[:begin], *said] if is_unit else tokens


def _compound(first: Quantity, second: Quantity) -> Quantity:
    """Add quantities such as "1 hour 30 minutes", in the unit of the second."""
    if first.unit is None or second.unit is None or first.unit.dimensions != second.unit.dimensions:
        raise UnreadableError("two quantities side by side")
    ratio = Numeral(first.unit.size / second.unit.size)
    return Quantity(
        Applied("add", (Applied("multiply", (first.expression, ratio)), second.expression)), second.unit
    )


def _spelled(tokens: list[Token]) -> list[Token]:
    """Replace a number in words by digits, if only words follow it."""
    number = words.NUMBERS.get(tokens[0].text.lower()) if tokens else None
    if number is None or any(token.kind is not TokenKind.WORD for token in tokens):
        return tokens
    return [Token(TokenKind.NUMBER, str(number)), *tokens[1:]]


def _whole(number: int) -> Numeral:
    return Numeral(Fraction(number), str(number))


def _with_degrees(expression: Expression, factors: list[tuple[str, int]]) -> Quantity:
    """Make a quantity whose unit is the sign for degrees."""
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
    """Return the degrees of an angle such as 30° or -30°; None for any other expression."""
    if not isinstance(expression, Applied):
        return None
    if expression.name == "degrees":
        return expression.args[0]
    inner = _degrees(expression.args[0]) if expression.name == "negate" else None
    return None if inner is None else Applied("negate", (inner,))


def _unit_factors(tokens: Sequence[Token]) -> list[tuple[str, int]]:
    """Read the words of a unit with their powers, e.g. m and s^-2.

    Raises `UnreadableError` for ambiguous words.
    """
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
            power, place = _power_of_unit(tokens, place)
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


def _power_of_unit(tokens: Sequence[Token], place: int) -> tuple[int, int]:
    """Read the whole power at a place; return it and the place after it."""
    text = ""
    while place < len(tokens) and (tokens[place].is_sign("{", "}", "-") or tokens[place].kind is TokenKind.NUMBER):
        text += tokens[place].text
        place += 1
    found = re.fullmatch(r"\{?(-?\d)\}?", text)
    if found is None:
        raise UnreadableError("a unit to a power that is no number")
    return int(found[1]), place


RELATIONS = ("=", "<", ">", "le", "ge", "ne", "in", "approx")
MARKS = ("^", "{", "}", "-", "'", "_")  # on the name of a function
FLIPPED = {">": "<", "ge": "le"}
Reader = Callable[[Tokens], AnswerValue]


def read_relation(tokens: Tokens, read: Reader) -> AnswerValue:
    """Read a chain of relations such as "x = 2y = 6"; `read` reads a side. Raises `UnreadableError`."""
    sides, signs = split_at(tokens, *RELATIONS)
    if not sides[0] and signs[0] in ("=", "approx", "in"):
        sides, signs = sides[1:], signs[1:]  # "= 5"
        if not signs:
            return read(sides[0])
    if not all(sides):
        raise UnreadableError("a relation without a side")
    if set(signs) <= {"=", "approx"}:
        return _read_equal(sides, signs, read)
    if signs == ["in"]:
        return Named(_label_of_side(sides[0]), read(sides[1]))
    return _read_order([_plain(side) for side in sides], signs)


def _label_of_side(tokens: Tokens) -> str:
    """Return the name on the left side of an equation; "" for a name in words, which differ between writers."""
    if any(token.text.lower() in words.NEGATIONS for token in tokens):
        raise UnreadableError("a relation that is denied")
    if all(token.kind is TokenKind.WORD for token in tokens):
        return ""
    return " ".join(token.text for token in tokens if not token.is_sign("{", "}"))


def _plain(tokens: Tokens) -> Expression:
    """Read all tokens as an expression without a unit."""
    expression, rest = parse_expression(tokens)
    if rest:
        raise UnreadableError("a unit in a relation")
    return expression


def _read_equal(sides: Sequence[Tokens], signs: Sequence[str], read: Reader) -> AnswerValue:
    """Read sides that are joined by = or ≈: a named value, one value, or an equation.

    Raises `UnreadableError` if the sides contradict each other, or are no numbers.
    """
    if _is_label(sides[0], sides[1]):
        values = [read(side) for side in sides[1:]]
        numbers = [index for index, value in enumerate(values) if not _has_variables([value])]
        if 0 < len(numbers) < len(values):  # "S = ab/2 = 12"
            values, signs = values[numbers[0] :], signs[numbers[0] :]
        value = _agreed(values, signs[1:])
        return Named(_label_of_side(sides[0]), value, _equation(sides) if len(sides) == 2 else None)
    if len(sides) == 2 and _is_label(sides[1], sides[0]):
        return Named(_label_of_side(sides[1]), read(sides[0]), _equation(sides))
    values = [read(side) for side in sides]
    try:
        return _agreed(values, signs)
    except UnreadableError:
        if len(sides) != 2 or signs != ["="] or not _has_variables(values):
            raise
    equation = _equation(sides)
    if equation is None:
        raise UnreadableError("an equation with sides that are no numbers")
    return equation


def _has_variables(values: Sequence[AnswerValue]) -> bool:
    return any(isinstance(value, Quantity) and variables(value.expression) for value in values)


def _is_label(side: Tokens, other: Tokens) -> bool:
    """Return True if `side` names the other side: "x_1", "f(x)", "Area", or e.g. "x + y" before a number."""
    if all(token.kind is TokenKind.WORD for token in side) or _is_application(side) or _is_tuple(side):
        return True
    if side[0].kind is TokenKind.NAME and other[0].text.startswith("begin "):
        return True  # A^{-1} = a matrix
    bare = _without_subscripts(side)
    if not any(map(_is_name, bare)) or any(map(_is_operation, bare)) or bare[0].is_sign("-"):
        return False
    is_variable = bare[0].kind is TokenKind.NAME and all(token.is_sign("'") for token in bare[1:])
    return is_variable or not any(map(_is_name, other))


def _is_operation(token: Token) -> bool:
    """Return True for an operation that hides the value of the variable, as the power in "x^2 = 4"."""
    is_logarithm = token.kind is TokenKind.FUNCTION and token.text in ("ln", "log", "lg", "exp")
    return token.kind is TokenKind.NUMBER or is_logarithm or token.is_sign("sqrt", "^", "!")


def _is_name(token: Token) -> bool:
    return token.kind is TokenKind.NAME and token.text not in ("e", "i")


def _without_subscripts(side: Tokens) -> list[Token]:
    """Drop the subscript after each token."""
    kept, place = [], 0
    while place < len(side):
        if not side[place].is_sign("_"):
            kept.append(side[place])
        elif place + 1 < len(side) and side[place + 1].is_sign("{"):
            while place < len(side) and not side[place].is_sign("}"):
                place += 1
        else:
            place += 1
        place += 1
    return kept


def _is_application(side: Tokens) -> bool:
    """Return True for e.g. "f(x)", "P(2)" or "f^{-1}(x)"."""
    begin = next((index for index, token in enumerate(side) if token.is_sign("(")), 0)
    marks = all(
        token.is_sign(*MARKS) or token.kind in (TokenKind.NUMBER, TokenKind.NAME) for token in side[1:begin]
    )
    return begin > 0 and side[0].kind is TokenKind.NAME and marks and is_enclosed(side[begin:])


def _is_tuple(side: Tokens) -> bool:
    """Return True for e.g. "(x, y)"."""
    inner = [token for token in side if not token.is_sign("(", ")", ",", "_", "{", "}")]
    return (
        is_enclosed(side)
        and has_outside(side[1:-1], ",")
        and any(map(_is_name, inner))
        and all(token.kind in (TokenKind.NAME, TokenKind.NUMBER) for token in inner)
    )


def _equation(sides: Sequence[Tokens]) -> Statement | None:
    try:
        return Statement("=", _plain(sides[0]), _plain(sides[1]))
    except UnreadableError:
        return None


def _agreed(values: Sequence[AnswerValue], signs: Sequence[str]) -> AnswerValue:
    """Return the common value of all sides: the first value that is no decimal. Raises if two sides differ."""
    for (left, right), sign in zip(pairwise(values), signs, strict=True):
        if not (isinstance(left, Quantity) and isinstance(right, Quantity)):
            raise UnreadableError("a chain of sides that are no numbers")
        one, other = share(left), share(right)
        is_equal = same_expression(one, other) or same_expression(other, one)
        if not is_equal and not (sign == "approx" and (_is_near(one, other) or _is_near(other, one))):
            raise UnreadableError("an equation that is wrong")
    exact = [each for each in values if not (isinstance(each, Quantity) and as_decimal(each.expression))]
    value = (exact or list(values))[0]
    units = [each.unit for each in values if isinstance(each, Quantity) and each.unit is not None]
    if isinstance(value, Quantity) and value.unit is None and units:
        return Quantity(value.expression, units[-1])
    return value


def _is_near(exact: Expression, decimal: Expression) -> bool:
    """Return True if a number rounds to a decimal of any number of digits."""
    rounded = as_decimal(decimal)
    return rounded is not None and not variables(exact) and rounds_to(exact, rounded)


def _read_order(sides: list[Expression], signs: list[str]) -> AnswerValue:
    """Read inequalities: in one variable as a region, else as a statement."""
    if len(sides) == 2 and signs == ["ne"]:
        return _read_unequal(*sides)
    if all(sign in FLIPPED for sign in signs):
        sides, signs = sides[::-1], [FLIPPED[sign] for sign in signs[::-1]]
    if not set(signs) <= {"<", "le"} or len(sides) > 3:
        raise UnreadableError("relations that do not go together")
    places = [index for index, side in enumerate(sides) if isinstance(side, Variable)]
    constant = [side for side in sides if not variables(side)]
    if len(places) == 1 and len(constant) == len(sides) - 1 and (len(sides) == 2 or places == [1]):
        variable = sides[places[0]]
        assert isinstance(variable, Variable)
        is_below = places[0] > 0  # something is below the variable
        is_above = places[0] < len(sides) - 1
        interval = Interval(
            low=sides[0] if is_below else MINUS,
            has_low=is_below and signs[0] == "le",
            high=sides[-1] if is_above else PLUS,
            has_high=is_above and signs[-1] == "le",
        )
        return union([interval], variable.name)
    if len(sides) == 2 and len(constant) == 1:
        below = sides[1] in constant
        region = _read_absolute(*(sides if below else sides[::-1]), below=below, closed=signs[0] == "le")
        return region or Statement(signs[0], sides[0], sides[1])
    if len(sides) == 2 and not constant:
        return Statement(signs[0], sides[0], sides[1])
    raise UnreadableError("an inequality of another kind")


def _read_absolute(side: Expression, bound: Expression, *, below: bool, closed: bool) -> Region | None:
    """Return the region of |x - a| < b or |x - a| > b; None for any other inequality."""
    if not isinstance(side, Applied) or side.name != "absolute":
        return None
    inner: Expression = side.args[0]
    shift: Expression = Numeral(Fraction(0))
    if isinstance(inner, Applied) and inner.name == "add" and not variables(inner.args[1]):
        shift = inner.args[1]
        inner = inner.args[0]
    if not isinstance(inner, Variable):
        return None
    low, high = difference(negated(bound), shift), difference(bound, shift)
    if below:
        return union([Interval(low=low, high=high, has_low=closed, has_high=closed)], inner.name)
    outside = [
        Interval(low=MINUS, has_low=False, high=low, has_high=closed),
        Interval(low=high, has_low=closed, high=PLUS, has_high=False),
    ]
    return union(outside, inner.name)


def _read_unequal(left: Expression, right: Expression) -> Region | Statement:
    if isinstance(left, Variable) and not variables(right):
        return union(without_points([everything()], [right]), left.name)
    if not variables(left) and not variables(right):
        raise UnreadableError("an inequality of numbers")
    return Statement("ne", left, right)
