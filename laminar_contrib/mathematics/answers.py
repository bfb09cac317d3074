"""Kinds of answers, and the comparison of an answer with a reference, kind by kind.

Pure; `verify` calls it. Rules beyond equality of numbers, which `equality` has:

- Several answers side by side and sets have no order; points, vectors and matrices have one. A point (1, 2), a set
  {1, 2} and an interval [1, 2] are three things; (1, 2) may be a point or an open interval.
- A unit or a name ("x = 5") that one side leaves out says nothing. Known units that both give must fit, by size.
- "50%" is 0.5, and 50 too, as percent may have been asked for, but "0.5%" is not 0.5; 30 degrees are 30, and pi/6.
- A subscript for a base counts in a reference: 1011 is not 1011_2. An answer may add it.
- The name of a function's argument says nothing, nor does the letter of an additive constant C or K.

The spans of a `Region` are in order and disjoint, so equal regions have equal spans.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TypeAlias

import mpmath  # type: ignore[import-untyped]

from laminar_contrib.mathematics.equality import (
    UndefinedError,
    Value,
    difference,
    evaluate,
    inexact,
    proportional,
    same_expression,
    same_number,
)
from laminar_contrib.mathematics.expressions import (
    CONSTANTS,
    Applied,
    Expression,
    Numeral,
    UnreadableError,
    Variable,
    negated,
    operations,
    renamed,
    variables,
)
from laminar_contrib.mathematics.words import MeasureUnit

DEGREE = MeasureUnit(Fraction(1), (("angle", 1),))
RADIAN = MeasureUnit(Fraction(1), (("radians", 1),))
PLUS, MINUS = CONSTANTS["infty"], negated(CONSTANTS["infty"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Interval between two numbers, e.g. `Interval(low=a, high=b, has_low=True, has_high=False)` of [a, b)."""

    low: Expression
    high: Expression
    has_low: bool
    has_high: bool

    @property
    def ends(self) -> tuple[Value, Value]:
        """The two ends as numbers."""
        return number(self.low), number(self.high)

    @property
    def is_empty(self) -> bool:
        """Whether no number is inside."""
        low, high = self.ends
        return bool(low > high or (low == high and not (self.has_low and self.has_high)))


@dataclass(frozen=True, slots=True)
class Region:
    """Union of intervals; a single point is a closed interval of no length. `name` is of the variable, if any."""

    intervals: tuple[Interval, ...]
    name: str = ""


def number(expression: Expression) -> Value:
    """Return the real number that an expression is, for a comparison.

    Raises `UnreadableError` if it is no real number.
    """
    if variables(expression):
        raise UnreadableError("an interval with variables")
    try:
        with mpmath.workdps(40):
            value = inexact(evaluate(expression, {}))
    except UndefinedError as error:
        raise UnreadableError(str(error)) from None
    if isinstance(value, mpmath.mpc):
        raise UnreadableError("an interval of complex numbers")
    return value


def point(expression: Expression) -> Interval:
    """Return the closed interval that holds one number."""
    return Interval(low=expression, high=expression, has_low=True, has_high=True)


def everything() -> Interval:
    """Return the interval of all real numbers."""
    return Interval(low=MINUS, high=PLUS, has_low=False, has_high=False)


def union(intervals: Iterable[Interval], name: str = "") -> Region:
    """Return the union of the intervals as a region with a variable's name."""
    merged: list[Interval] = []
    for interval in sorted(_kept(intervals), key=lambda each: (each.ends[0], not each.has_low)):
        if not merged or not _touch(merged[-1], interval):
            merged.append(interval)
            continue
        last = merged[-1]
        if (interval.ends[1], interval.has_high) > (last.ends[1], last.has_high):
            merged[-1] = replace(last, high=interval.high, has_high=interval.has_high)
    return Region(tuple(merged), name)


def _kept(intervals: Iterable[Interval]) -> Iterable[Interval]:
    """Yield the intervals that are not empty; an interval never holds infinity."""
    for interval in intervals:
        low, high = interval.ends
        has_low, has_high = (
            interval.has_low and not mpmath.isinf(low),
            interval.has_high and not mpmath.isinf(high),
        )
        kept = replace(interval, has_low=has_low, has_high=has_high)
        if not kept.is_empty:
            yield kept


def _touch(left: Interval, right: Interval) -> bool:
    """Return True if the right interval begins inside the left one or at its end, without a point between them."""
    end, begin = left.ends[1], right.ends[0]
    return bool(begin < end or (begin == end and (left.has_high or right.has_low)))


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return the intersection of two unions of intervals."""
    others = list(right)
    return [both for one in left for other in others if not (both := _overlap(one, other)).is_empty]


def _overlap(left: Interval, right: Interval) -> Interval:
    low = max((left, right), key=lambda each: (each.ends[0], not each.has_low))
    high = min((left, right), key=lambda each: (each.ends[1], each.has_high))
    return Interval(low=low.low, has_low=low.has_low, high=high.high, has_high=high.has_high)


def without_points(intervals: Iterable[Interval], points: Iterable[Expression]) -> list[Interval]:
    """Take single points out of the intervals."""
    left = list(intervals)
    for taken in points:
        below = Interval(low=MINUS, high=taken, has_low=False, has_high=False)
        above = Interval(low=taken, high=PLUS, has_low=False, has_high=False)
        left = intersection(left, [below, above])
    return left


def same_region(reference: Region, answer: Region) -> bool:
    """Return True if both regions hold the same numbers. Variables must agree if both regions name one."""
    if reference.name and answer.name and reference.name != answer.name:
        return False
    pairs = list(zip(reference.intervals, answer.intervals, strict=False))
    return len(pairs) == len(reference.intervals) == len(answer.intervals) and all(
        (one.has_low, one.has_high) == (other.has_low, other.has_high)
        and same_number(one.low, other.low)
        and same_number(one.high, other.high)
        for one, other in pairs
    )


@dataclass(frozen=True, slots=True)
class Quantity:
    """Number or formula, e.g. `Quantity(five, metre)` of "5 m"."""

    expression: Expression
    unit: MeasureUnit | None = None
    is_percent: bool = False


def share(quantity: Quantity) -> Expression:
    """Return the number of a quantity; a percentage counts as hundredths."""
    if not quantity.is_percent:
        return quantity.expression
    return Applied("divide", (quantity.expression, Numeral(Fraction(100), "100")))


@dataclass(frozen=True, slots=True)
class BasedNumber:
    """Number in a base of its own, e.g. `BasedNumber("1011", "2")`."""

    digits: str
    base: str

    @property
    def without_base(self) -> "AnswerValue":
        """The digits alone, as a reference without a base gives them."""
        is_number = self.digits.isdecimal()
        return Quantity(Numeral(Fraction(self.digits))) if is_number else Phrase(self.digits.lower())


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
    """A value with its name, e.g. "x = 5"; `equation` holds the equation if both sides are expressions."""

    label: str
    value: "AnswerValue"
    equation: Statement | None = None


@dataclass(frozen=True, slots=True)
class Phrase:
    """Answer in words, in lower case unless a single letter."""

    words: str


@dataclass(frozen=True, slots=True)
class Lettered:
    """Letter of a multiple choice and its content, e.g. "(B) 12"."""

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


def as_region(value: AnswerValue) -> Region:
    """Return the set of real numbers that an answer describes. Raises `UnreadableError` for any other answer."""
    if isinstance(value, Region):
        return value
    if isinstance(value, Named):
        return Region(as_region(value.value).intervals, value.label)
    if isinstance(value, Collection):
        return union(point(bare(item)) for item in value.items)
    if isinstance(value, Listing):
        if any(_may_be_point(item) for item in value.items):
            raise UnreadableError("a list that may be points or intervals")
        regions = [as_region(item) for item in value.items]
        return union([interval for region in regions for interval in region.intervals])
    if isinstance(value, Bracketed) and len(value.items) == 2 and value.opening in ("(", "["):
        low, high = (bare(item) for item in value.items)
        interval = Interval(low=low, high=high, has_low=value.opening == "[", has_high=value.closing == "]")
        if interval.is_empty:
            raise UnreadableError("an interval with its ends exchanged")
        return union([interval])
    raise UnreadableError("no set of numbers")


def _may_be_point(value: AnswerValue) -> bool:
    """Return True for "(1, 2)", which is a point and no interval if it stands in a list."""
    if not isinstance(value, Bracketed) or (value.opening, value.closing) != ("(", ")"):
        return False
    return not any("infinity" in operations(bare(item)) for item in value.items)


def bare(value: AnswerValue) -> Expression:
    """Return the number of an answer that has no unit. Raises `UnreadableError` for any other answer."""
    if isinstance(value, Quantity) and value.unit is None and not value.is_percent:
        return value.expression
    raise UnreadableError("no plain number")


def same(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Return True if an answer has the same meaning as the reference. Raises `TooLargeError`."""
    reference, answer = _unwrapped(reference), _unwrapped(answer)
    match reference, answer:
        case (Lettered(), _) | (_, Lettered()):
            return _same_choice(reference, answer)
        case (Region(), _) | (_, Region()):
            return _same_region(reference, answer)
        case (Named(), Named()):
            return _same_named(reference, answer)
        case (Listing(), _) | (_, Listing()):
            return _same_listing(reference, answer)
        case (Named(), _) | (_, Named()):
            return _same_unnamed(reference, answer)
        case (Collection(), _) | (_, Collection()):
            return _same_members(_distinct(_members(reference)), _distinct(_members(answer)))
        case (BasedNumber(), BasedNumber()):
            return reference == answer
        case (BasedNumber(), _):
            return reference.base == "10" and same(reference.without_base, answer)
        case (_, BasedNumber()):
            return same(reference, answer.without_base)
        case (Quantity(), Quantity()):
            return _same_quantity(reference, answer)
        case (Bracketed(), Bracketed()):
            return _same_bracketed(reference, answer)
        case (Grid(), _) | (_, Grid()):
            return _same_grid(reference, answer)
        case (Proportion(), _) | (_, Proportion()):
            return _same_proportion(reference, answer)
        case (Statement(), Statement()):
            return _same_statement(reference, answer)
        case (Phrase(), _) | (_, Phrase()):
            return _said(reference) == _said(answer) != ""
    return False


def _unwrapped(value: AnswerValue) -> AnswerValue:
    """Remove the name from an equation with a list or set, as in "x = 1, 2"; return other answers as they are."""
    return value.value if isinstance(value, Named) and isinstance(value.value, Listing | Collection) else value


def _same_choice(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Compare two choices: by their letters if both have a letter, else by their contents."""
    letters = [_letter(value) for value in (reference, answer)]
    if all(letters):
        return letters[0] == letters[1]
    stands = [value.value if isinstance(value, Lettered) else value for value in (reference, answer)]
    return stands[0] is not None and stands[1] is not None and same(stands[0], stands[1])


def _letter(value: AnswerValue) -> str:
    if isinstance(value, Lettered):
        return value.letter
    said = _said(value)
    return said if len(said) == 1 else ""


def _said(value: AnswerValue) -> str:
    """Return the text of an answer in words or of a lone variable; "" for any other answer."""
    if isinstance(value, Phrase):
        return value.words
    if isinstance(value, Quantity) and isinstance(value.expression, Variable) and value.unit is None:
        return value.expression.name
    return ""


def _same_region(reference: AnswerValue, answer: AnswerValue) -> bool:
    try:
        return same_region(as_region(reference), as_region(answer))
    except UnreadableError:
        return False


def _same_named(reference: Named, answer: Named) -> bool:
    labels = [value.label for value in (reference, answer)]
    wanted, given = (re.fullmatch(r"(\w+) \( ([a-z]) \)", label) for label in labels)
    if wanted and given and wanted[1] == given[1] and isinstance(answer.value, Quantity):  # f(t) = t^2
        renamed_value = replace(answer.value, expression=renamed(answer.value.expression, {given[2]: wanted[2]}))
        return same(reference.value, renamed_value)
    if (labels[0] == labels[1] or not all(labels)) and same(reference.value, answer.value):
        return True
    if reference.equation is None or answer.equation is None:
        return False
    return _same_statement(reference.equation, answer.equation)


def _same_unnamed(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Compare two answers of which one or both may have a name, such as "x = 5" and "5"."""
    if isinstance(reference, Statement) or isinstance(answer, Statement):
        equations = [value.equation if isinstance(value, Named) else value for value in (reference, answer)]
        return all(isinstance(each, Statement) for each in equations) and same(*equations)  # type: ignore[arg-type]
    values = [value.value if isinstance(value, Named) else value for value in (reference, answer)]
    return same(values[0], values[1])


def _same_listing(reference: AnswerValue, answer: AnswerValue) -> bool:
    wanted, given = _members(reference), _members(answer)
    if _is_system(wanted) != _is_system(given):
        other, others = (answer, given) if _is_system(wanted) else (reference, wanted)
        is_unordered = isinstance(other, Collection) or (len(others) > 1 and isinstance(others[0], Named))
        return not is_unordered and _same_in_order(_by_name(wanted), _by_name(given))
    if len(wanted) == 1 or len(given) == 1:
        return all(same(one, other) for one in wanted for other in given)
    if isinstance(reference, Collection) or isinstance(answer, Collection):
        wanted, given = _distinct(wanted), _distinct(given)
    return _same_members(wanted, given)


def _members(value: AnswerValue) -> Sequence[AnswerValue]:
    return value.items if isinstance(value, Listing | Collection) else (value,)


def _is_system(items: Sequence[AnswerValue]) -> bool:
    """Return True for values of several variables, such as "x = 1, y = 2".

    X_1 and x_2 are two values of one variable.
    """
    names = {item.label.partition(" _ ")[0] for item in items if isinstance(item, Named)}
    return len(names) > 1 and all(isinstance(item, Named) for item in items)


def _by_name(items: Sequence[AnswerValue]) -> Sequence[AnswerValue]:
    """Order values of several variables by name, and take a point apart; leave other values as they are."""
    if _is_system(items):
        return [item.value for item in sorted(items, key=_label) if isinstance(item, Named)]
    value = items[0].value if len(items) == 1 and isinstance(items[0], Named) else items[0]
    is_point = len(items) == 1 and isinstance(value, Bracketed) and (value.opening, value.closing) == ("(", ")")
    return value.items if is_point and isinstance(value, Bracketed) else items


def _label(value: AnswerValue) -> str:
    return value.label if isinstance(value, Named) else ""


def _same_members(wanted: Sequence[AnswerValue], given: Sequence[AnswerValue]) -> bool:
    """Return True if the items are the same in some order."""
    left = list(given)
    for one in wanted:
        match = next((index for index, other in enumerate(left) if same(one, other)), None)
        if match is None:
            return False
        del left[match]
    return not left


def _distinct(items: Sequence[AnswerValue]) -> list[AnswerValue]:
    kept: list[AnswerValue] = []
    for item in items:
        if not any(same(other, item) for other in kept):
            kept.append(item)
    return kept


def _same_in_order(wanted: Sequence[AnswerValue], given: Sequence[AnswerValue]) -> bool:
    return len(wanted) == len(given) and all(map(same, wanted, given))


def _same_bracketed(reference: Bracketed, answer: Bracketed) -> bool:
    """Compare points and vectors, with any brackets unless there are two items, which may be an interval."""
    brackets = [(value.opening, value.closing) for value in (reference, answer)]
    return (brackets[0] == brackets[1] or len(reference.items) != 2) and _same_in_order(
        reference.items, answer.items
    )


def _rows(value: AnswerValue) -> Sequence[Sequence[AnswerValue]]:
    """Return the rows of a matrix, also of a matrix in plain brackets. Any other vector is a single row."""
    if isinstance(value, Grid):
        return value.rows
    if not isinstance(value, Bracketed):
        return ()
    if all(isinstance(item, Bracketed) for item in value.items):
        return [item.items for item in value.items if isinstance(item, Bracketed)]
    return (value.items,)


def _same_grid(reference: AnswerValue, answer: AnswerValue) -> bool:
    """Compare matrices row by row; a vector may be written as a row, as a column or as a point."""
    wanted, given = _rows(reference), _rows(answer)
    if isinstance(reference, Grid) and isinstance(answer, Grid):
        return len(wanted) == len(given) and all(map(_same_in_order, wanted, given))
    columns = [rows if len(rows) == 1 else list(zip(*rows, strict=False)) for rows in (wanted, given)]
    if len(columns[0]) == len(columns[1]) == 1:
        return _same_in_order(columns[0][0], columns[1][0])
    return bool(wanted) and len(wanted) == len(given) and all(map(_same_in_order, wanted, given))


def _same_proportion(reference: AnswerValue, answer: AnswerValue) -> bool:
    wanted, given = _parts(reference), _parts(answer)
    if len(wanted) != len(given) or not wanted:
        return False
    return all(
        same_expression(Applied("multiply", (one, given[0])), Applied("multiply", (other, wanted[0])))
        for one, other in zip(wanted, given, strict=True)
    )


def _parts(value: AnswerValue) -> tuple[Expression, ...]:
    """Return the parts of a ratio; a number is its ratio to 1."""
    if isinstance(value, Proportion):
        return value.parts
    if isinstance(value, Quantity) and value.unit is None and not value.is_percent:
        return (value.expression, Numeral(Fraction(1), "1"))
    return ()


def _same_statement(reference: Statement, answer: Statement) -> bool:
    if reference.sign != answer.sign:
        return False
    sides = [difference(each.left, each.right) for each in (reference, answer)]
    return proportional(sides[0], sides[1], positive=reference.sign in ("<", "le"))


def _same_quantity(reference: Quantity, answer: Quantity) -> bool:
    """Compare two quantities: in base units if both have units, with degrees and percent converted."""
    if reference.is_percent or answer.is_percent:
        return _same_percent(reference, answer)
    wanted, given = reference.expression, answer.expression
    if reference.unit is not None and answer.unit is not None:
        if reference.unit.dimensions != answer.unit.dimensions:
            return {reference.unit, answer.unit} == {DEGREE, RADIAN} and _same_angle(reference, answer)
        if reference.unit.size != answer.unit.size:
            return same_expression(_in_base(wanted, reference.unit), _in_base(given, answer.unit))
    if same_expression(wanted, given):
        return True
    return {reference.unit, answer.unit} == {DEGREE, None} and _same_angle(reference, answer)


def _same_angle(reference: Quantity, answer: Quantity) -> bool:
    return same_expression(_in_radians(reference), _in_radians(answer))


def _in_base(expression: Expression, unit: MeasureUnit) -> Expression:
    return Applied("multiply", (expression, Numeral(unit.size)))


def _in_radians(value: Quantity) -> Expression:
    return Applied("degrees", (value.expression,)) if value.unit == DEGREE else value.expression


def _same_percent(reference: Quantity, answer: Quantity) -> bool:
    if reference.unit is not None or answer.unit is not None:
        return False
    wanted, given = reference.expression, answer.expression
    if reference.is_percent and answer.is_percent:
        return same_expression(wanted, given)
    if same_expression(share(reference), share(answer)):
        return True
    return _is_above_one(wanted) and same_expression(wanted, given)


def _is_above_one(expression: Expression) -> bool:
    """Return True for a number above 1, which is hardly a share and may be meant in percent."""
    if variables(expression):
        return False
    try:
        return bool(abs(inexact(evaluate(expression, {}))) > 1)
    except UndefinedError:
        return False
