"""Answers seen as sets of real numbers, whichever way they are written.

Pure; `structure` and `compare` use it.
"""

from laminar_contrib.mathematics.expressions import Expression, operations
from laminar_contrib.mathematics.regions import Interval, Region, point, union
from laminar_contrib.mathematics.tokens import UnreadableError
from laminar_contrib.mathematics.values import (
    AnswerValue,
    Bracketed,
    Collection,
    Listing,
    Named,
    Quantity,
)


def as_region(value: AnswerValue) -> Region:
    """Set of real numbers that an answer is. Raises `UnreadableError` for an answer that is none."""
    if isinstance(value, Region):
        return value
    if isinstance(value, Named):
        return Region(as_region(value.value).intervals, value.label)
    if isinstance(value, Collection):
        return union(point(bare(item)) for item in value.items)
    if isinstance(value, Listing):
        if any(_may_be_point(item) for item in value.items):
            raise UnreadableError("points, it may be")
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
    """True for "(1, 2)", which is no interval if it stands in a list."""
    if not isinstance(value, Bracketed) or (value.opening, value.closing) != ("(", ")"):
        return False
    return not any("infinity" in operations(bare(item)) for item in value.items)


def bare(value: AnswerValue) -> Expression:
    """Number without a unit. Raises `UnreadableError`."""
    if isinstance(value, Quantity) and value.unit is None and not value.is_percent:
        return value.expression
    raise UnreadableError("no plain number")
