"""Matrices read from tokens, with a factor before them and a sign of transposition after them.

Pure; `structure` calls it, and is called for the cells.
"""

from collections.abc import Callable

from laminar_contrib.mathematics.brackets import Tokens, split_at
from laminar_contrib.mathematics.expressions import Applied, Expression, parse_expression
from laminar_contrib.mathematics.sets import bare
from laminar_contrib.mathematics.tokens import UnreadableError
from laminar_contrib.mathematics.values import AnswerValue, Grid, Quantity

SYSTEMS = ("cases", "aligned", "align", "gathered", "split")
MATRICES = ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array")
FENCES = (("(", ")"), ("[", "]"))


def has_grid(tokens: Tokens) -> bool:
    """True where a matrix begins somewhere."""
    return any(token.text.startswith("begin ") for token in tokens)


def read_grid(tokens: Tokens, read: Callable[[Tokens], AnswerValue]) -> Grid:
    """Matrix that all the tokens make; `read` reads a cell. Raises `UnreadableError`."""
    begin = next(index for index, token in enumerate(tokens) if token.text.startswith("begin "))
    end = next((index for index, token in enumerate(tokens) if token.text.startswith("end ")), 0)
    kind = tokens[begin].text.removeprefix("begin ").rstrip("*")
    if kind not in MATRICES or tokens[end].text.removeprefix("end ").rstrip("*") != kind:
        raise UnreadableError(f"an environment {kind!r}")
    before, inside, after = list(tokens[:begin]), list(tokens[begin + 1 : end]), list(tokens[end + 1 :])
    if before and after and (before[-1].text, after[0].text) in FENCES:
        before, after = before[:-1], after[1:]
    if kind == "array" and inside and inside[0].is_sign("{"):  # the columns
        inside = inside[next((index for index, token in enumerate(inside) if token.is_sign("}")), 0) + 1 :]
    grid = Grid(tuple(tuple(read(cell) for cell in row) for row in _cells(inside)))
    if len({len(row) for row in grid.rows}) != 1:
        raise UnreadableError("rows of several lengths")
    if after:
        grid = _transposed(grid, after)
    return _scaled(grid, before) if before else grid


def read_rows(tokens: Tokens) -> list[Tokens]:
    """Rows of a system of equations that all the tokens make; none of anything else."""
    kind = tokens[0].text.removeprefix("begin ").rstrip("*")
    if kind not in SYSTEMS or tokens[-1].text.removeprefix("end ").rstrip("*") != kind:
        return []
    rows = [row for row in split_at(tokens[1:-1], "row")[0] if row]
    if kind == "cases" and any(token.is_sign("&") for row in rows for token in row):
        raise UnreadableError("a function by cases")
    return [[token for token in row if not token.is_sign("&", ",")] for row in rows]


def _cells(tokens: Tokens) -> list[list[Tokens]]:
    rows = [row for row in split_at(tokens, "row")[0] if row]
    return [list(split_at(row, "&")[0]) for row in rows]


def _transposed(grid: Grid, after: Tokens) -> Grid:
    said = [token.text for token in after if not token.is_sign("{", "}")]
    if said not in (["^", "T"], ["^", "top"], ["^", "t"]):
        raise UnreadableError("something after a matrix")
    return Grid(tuple(zip(*grid.rows, strict=True)))


def _scaled(grid: Grid, before: Tokens) -> Grid:
    tokens = list(before[:-1]) if before[-1].is_sign("*") else list(before)
    if len(tokens) == 1 and tokens[0].is_sign("-"):
        return _mapped(grid, lambda cell: Applied("negate", (cell,)))
    factor, rest = parse_expression(tokens)
    if rest:
        raise UnreadableError("words before a matrix")
    return _mapped(grid, lambda cell: Applied("multiply", (factor, cell)))


def _mapped(grid: Grid, change: Callable[[Expression], Expression]) -> Grid:
    return Grid(tuple(tuple(Quantity(change(bare(cell))) for cell in row) for row in grid.rows))
