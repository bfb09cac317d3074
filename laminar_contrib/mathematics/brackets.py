"""Splits of tokens at signs that stand outside of all brackets.

Pure; used by the readers. Invariant: any closing bracket closes the last opening one, as in the interval (1, 2].
"""

from collections.abc import Callable, Sequence

from laminar_contrib.mathematics.tokens import Token, UnreadableError

OPENING = ("(", "[", "{", "set{", "langle", "lfloor", "lceil")
CLOSING = (")", "]", "}", "set}", "rangle", "rfloor", "rceil")
SEPARATORS = (",", ";", "and", "or")

Tokens = Sequence[Token]


def split(tokens: Tokens, is_border: Callable[[Token], bool]) -> tuple[list[list[Token]], list[str]]:
    """Parts between the borders outside of brackets, and the borders. Raises for brackets that do not match."""
    parts: list[list[Token]] = [[]]
    borders: list[str] = []
    depth = 0
    for token in tokens:
        depth += _step(token)
        if depth < 0:
            raise UnreadableError("a bracket closes that was not opened")
        if depth == 0 and is_border(token):
            borders.append(token.text)
            parts.append([])
        else:
            parts[-1].append(token)
    if depth:
        raise UnreadableError("a bracket is not closed")
    return parts, borders


def split_at(tokens: Tokens, *signs: str) -> tuple[list[list[Token]], list[str]]:
    """Parts between these signs, outside of brackets."""
    return split(tokens, lambda token: token.is_sign(*signs))


def has_outside(tokens: Tokens, *signs: str) -> bool:
    """True where one of these signs stands outside of brackets."""
    return bool(split_at(tokens, *signs)[1])


def is_enclosed(tokens: Tokens) -> bool:
    """True where the first token is a bracket that the last one closes."""
    if len(tokens) < 2 or not tokens[0].is_sign(*OPENING):
        return False
    depth = 0
    for index, token in enumerate(tokens):
        depth += _step(token)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _step(token: Token) -> int:
    if token.is_sign(*OPENING) or token.text.startswith("begin "):
        return 1
    return -1 if token.is_sign(*CLOSING) or token.text.startswith("end ") else 0
