"""Tools that come with the package.

`calculator` is exact arithmetic whose cost is bounded for every expression. Numbers are fractions, so that
integers and decimals have no rounding. Only a power with a broken exponent is a floating-point number. It computes
no power with many more than `MOST_DIGITS` digits (`tests/environment/tools/test_calculator.py`). `search` finds
passages of a local corpus by BM25 (Robertson and Zaragoza, 2009), with the library bm25s.
"""

import ast
import importlib.util
import operator
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import msgspec

from laminar_contrib.tools.signature import ToolError
from laminar_py.config import ConfigError

MOST_CHARS = 1000  # of an expression
MOST_DIGITS = 1000  # of a number; Python itself writes 4300
MOST_BITS = int(MOST_DIGITS * 3.33)
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
    if len(text) > MOST_CHARS:
        raise ToolError(f"longer than {MOST_CHARS} characters")
    if not ALLOWED.fullmatch(text):
        raise ToolError(HINT)
    try:
        return _written(_value(ast.parse(text, mode="eval").body))
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two of parentheses and signs
        raise ToolError(f"cannot be read; {HINT}") from error


def _value(node: ast.expr) -> Fraction:
    """Compute an expression exactly. Raises `ToolError` for other syntax and for too many digits."""
    match node:
        case ast.Constant(value=int() | float() as number):
            if abs(number) == float("inf"):
                raise ToolError(f"a number of more than {MOST_DIGITS} digits")
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
        if bits > 1 and (bits - 1) * abs(exponent) > MOST_BITS:
            raise ToolError(f"a number of more than {MOST_DIGITS} digits")
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
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > MOST_BITS:
        raise ToolError(f"a number of more than {MOST_DIGITS} digits")
    return number


def _written(number: Fraction) -> str:
    """Write an integer with all digits, and other numbers with as many as a float has."""
    if number.denominator == 1:
        return str(number.numerator)
    if Fraction(1, 10**300) < abs(number) < 10**300:
        return repr(float(number))
    with localcontext(prec=16):
        return str(Decimal(number.numerator) / Decimal(number.denominator))


WORD = re.compile(r"\w+")


class Passage(msgspec.Struct, frozen=True):
    """Line of a corpus, e.g. `Passage("Paris is the capital of France.", title="Paris")`."""

    text: str
    title: str = ""

    @property
    def whole(self) -> str:
        """Title and text."""
        return f"{self.title}: {self.text}" if self.title else self.text


def read_corpus(path: Path) -> list[Passage]:
    """Read passages of a `.jsonl` or text file. Raises `ConfigError` if no passage has a word."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise ConfigError(f"tools.corpus={path}: cannot be read ({line}); name a file of text in UTF-8") from error
    passages = _lines(path, text) if path.suffix == ".jsonl" else _paragraphs(text)
    if not any(WORD.search(passage.whole) for passage in passages):
        raise ConfigError(f"tools.corpus={path}: has no passage with a word; name another file")
    return passages


def _lines(path: Path, text: str) -> list[Passage]:
    """Read passages from JSON lines. Raises `ConfigError` with the line of a fault."""
    passages = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            passages.append(msgspec.json.decode(line, type=Passage))
        except msgspec.DecodeError as error:
            fault = f'no {{"text": "..."}} ({error}); mend the line'
            raise ConfigError(f"tools.corpus={path}:{number}: {fault}") from error
    return passages


def _paragraphs(text: str) -> list[Passage]:
    return [Passage(part.strip()) for part in re.split(r"\n\s*\n", text) if part.strip()]


class PassageSearch:
    """An index of passages in memory, which many trajectories may search at the same time."""

    def __init__(self, passages: list[Passage], *, most: int, chars: int) -> None:
        _require_bm25s()
        import bm25s

        self._passages = passages
        self._most = min(most, len(passages))
        self._chars = chars
        self._index = bm25s.BM25()
        self._index.index([_words(passage.whole) for passage in passages], show_progress=False)

    def search(self, query: str) -> str:
        """Return the passages of a text collection that match the words best, the best first."""
        found, scores = self._index.retrieve([_words(query)], k=self._most, show_progress=False)
        best = [self._passages[place] for place, score in zip(found[0], scores[0], strict=True) if score > 0]
        texts = [f"[{number}] {passage.whole[: self._chars]}" for number, passage in enumerate(best, 1)]
        return "\n".join(texts) or "nothing found"


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _require_bm25s() -> None:
    if importlib.util.find_spec("bm25s") is None:
        raise ConfigError(
            "tools.use=search: the package bm25s is not installed; pip install laminar-py[search], or leave it out"
        )
