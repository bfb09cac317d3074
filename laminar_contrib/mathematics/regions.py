"""Sets of real numbers: intervals, their unions, and single points, in one order.

Pure. Invariant: the spans of a `Region` are in order and apart, so that equal regions have equal spans.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import mpmath  # type: ignore[import-untyped]

from laminar_contrib.mathematics.equality import same_number
from laminar_contrib.mathematics.evaluate import UndefinedError, Value, evaluate, inexact
from laminar_contrib.mathematics.expressions import CONSTANTS, Expression, negated, variables
from laminar_contrib.mathematics.tokens import UnreadableError

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
        """Ends as numbers."""
        return number(self.low), number(self.high)

    @property
    def is_empty(self) -> bool:
        """True where no number is inside."""
        low, high = self.ends
        return bool(low > high or (low == high and not (self.has_low and self.has_high)))


@dataclass(frozen=True, slots=True)
class Region:
    """Union of intervals; a single point is a closed interval of no length. `name` is of the variable, if any."""

    intervals: tuple[Interval, ...]
    name: str = ""


def number(expression: Expression) -> Value:
    """Real number to compare with. Raises `UnreadableError` where it is none."""
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
    """Interval that holds one number."""
    return Interval(low=expression, high=expression, has_low=True, has_high=True)


def everything() -> Interval:
    """The real numbers."""
    return Interval(low=MINUS, high=PLUS, has_low=False, has_high=False)


def union(intervals: Iterable[Interval], name: str = "") -> Region:
    """Region of all that is in any of the intervals."""
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
    """Intervals that are not empty and do not hold infinity."""
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
    """True where the right one begins inside or at the end of the left one, with no point between."""
    end, begin = left.ends[1], right.ends[0]
    return bool(begin < end or (begin == end and (left.has_high or right.has_low)))


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Intervals of all that is in both."""
    others = list(right)
    return [both for one in left for other in others if not (both := _overlap(one, other)).is_empty]


def _overlap(left: Interval, right: Interval) -> Interval:
    low = max((left, right), key=lambda each: (each.ends[0], not each.has_low))
    high = min((left, right), key=lambda each: (each.ends[1], each.has_high))
    return Interval(low=low.low, has_low=low.has_low, high=high.high, has_high=high.has_high)


def without_points(intervals: Iterable[Interval], points: Iterable[Expression]) -> list[Interval]:
    """Intervals less some points."""
    left = list(intervals)
    for taken in points:
        below = Interval(low=MINUS, high=taken, has_low=False, has_high=False)
        above = Interval(low=taken, high=PLUS, has_low=False, has_high=False)
        left = intersection(left, [below, above])
    return left


def same_region(reference: Region, answer: Region) -> bool:
    """True where both hold the same numbers; a variable counts if both name one."""
    if reference.name and answer.name and reference.name != answer.name:
        return False
    pairs = list(zip(reference.intervals, answer.intervals, strict=False))
    return len(pairs) == len(reference.intervals) == len(answer.intervals) and all(
        (one.has_low, one.has_high) == (other.has_low, other.has_high)
        and same_number(one.low, other.low)
        and same_number(one.high, other.high)
        for one, other in pairs
    )
