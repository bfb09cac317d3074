"""Comparison of what a program gave with what a test wants. Pure; no output of a program is slow here."""

import math
import re
from collections.abc import Sequence

import msgspec

TOLERANCE = 1e-6  # of floats
LONGEST_NUMBER = 400  # characters
SHOWN = 120  # characters of a value
DECIMAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


def read_value(text: str) -> object:
    """A value from a program's JSON. Raises `ValueError` where it is none."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("returned what is no value") from error


def same_output(printed: str, wanted: str) -> bool:
    """Equality of printed text: line by line without spaces at the ends, or word by word with floats near."""
    if [line.strip() for line in _lines(printed)] == [line.strip() for line in _lines(wanted)]:
        return True
    left, right = [_words(text) for text in (printed, wanted)]
    return [len(line) for line in left] == [len(line) for line in right] and all(
        one == other or _near(one, other)
        for ours, theirs in zip(left, right, strict=True)
        for one, other in zip(ours, theirs, strict=True)
    )


def same_value(value: object, wanted: object) -> bool:
    """Equality of JSON values, with floats near; True is not 1."""
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        near = isinstance(value, float) or isinstance(wanted, float)
        return value == wanted or (near and _close(value, wanted))
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(value, dict) and isinstance(wanted, dict):
        return value.keys() == wanted.keys() and all(same_value(value[key], wanted[key]) for key in value)
    return type(value) is type(wanted) and value == wanted


def _lines(text: str) -> Sequence[str]:
    return text.rstrip().split("\n")


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in _lines(text)]


def _near(printed: str, wanted: str) -> bool:
    """True for two decimals that are near each other; integers are exact."""
    if max(len(printed), len(wanted)) > LONGEST_NUMBER or not (set(wanted) | set(printed)) & set(".eE"):
        return False
    if not all(DECIMAL.fullmatch(word) for word in (wanted, printed)):
        return False
    return _close(float(printed), float(wanted))


def _close(value: float, wanted: float) -> bool:
    try:
        return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def shown(value: object) -> str:
    """A value in a few words."""
    text = repr(value) if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
