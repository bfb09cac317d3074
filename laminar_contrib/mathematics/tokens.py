"""Tokens of an answer in LaTeX or plain text.

Pure; `normalise` prepares the text and `structure` reads the tokens. Invariant: layout makes no token and whatever
means something makes one, so that two answers with the same tokens are the same answer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate

from laminar_contrib.mathematics import words
from laminar_contrib.mathematics.units import SHORT

MAX_TOKENS = 600
MAX_NESTED = 30  # brackets in brackets
GROUPED = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|"
PATTERN = (
    r"(?P<row>\\\\)|(?P<environment>\\(?:begin|end)\s*\{[a-zA-Z]+\*?\})|\\(?P<command>[a-zA-Z]+|[^a-zA-Z])"
    r"|(?P<number>GROUPED\d+(?:\.\d*)?|\.\d+)|(?P<letters>[^\W\d_]+)|(?P<sign><=|>=|!=|==|\*\*|\S)|(?P<space>\s+)"
)
ONE_BY_ONE = re.compile(PATTERN.replace("GROUPED", ""))
BY_GROUPS = re.compile(PATTERN.replace("GROUPED", GROUPED))
LONG_RUN = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
UPRIGHT = ("mathrm", "operatorname")  # also of units
APPLIED = re.compile(r"(sin|cos|tan|cot|sec|csc|ln|log|sqrt)([a-z])")  # "sinx"


class UnreadableError(ValueError):
    """Raised for a text that is no answer, or one of a kind that is not read here."""


class TokenKind(Enum):
    """Part that a token plays."""

    NUMBER = auto()
    NAME = auto()  # of a variable
    WORD = auto()
    FUNCTION = auto()
    COMMAND = auto()  # named sign, e.g. `frac` or `le`
    SIGN = auto()
    FIELD = auto()  # set of numbers, e.g. `R`


@dataclass(frozen=True, slots=True)
class Token:
    """Piece of an answer, e.g. `Token(TokenKind.COMMAND, "frac")`; `spaced` says that space comes before."""

    kind: TokenKind
    text: str
    spaced: bool = field(default=False, compare=False)

    def is_sign(self, *texts: str) -> bool:
        """True for a sign or a command of one of these names."""
        return self.kind in (TokenKind.SIGN, TokenKind.COMMAND) and self.text in texts


def tokenise(text: str, *, grouped: bool) -> tuple[Token, ...]:
    """Tokens of a normal text; `grouped` reads "1,234" as one number.

    Raises `UnreadableError` for braces that do not match, and above `MAX_TOKENS`.
    """
    tokens = tuple(_tokens(text, BY_GROUPS if grouped else ONE_BY_ONE, in_words=False))
    if len(tokens) > MAX_TOKENS:
        raise UnreadableError(f"{len(tokens)} tokens")
    steps = (token.is_sign("(", "[", "{", "set{") - token.is_sign(")", "]", "}", "set}") for token in tokens)
    if max(accumulate(steps), default=0) > MAX_NESTED:
        raise UnreadableError("nested too deeply")
    return tokens


def _tokens(text: str, pattern: re.Pattern[str], *, in_words: bool) -> Iterator[Token]:
    spaced, after_number, place = False, False, 0
    while place < len(text):
        found = pattern.match(text, place)
        assert found is not None, text[place]
        place, kind, part = found.end(), str(found.lastgroup), str(found[str(found.lastgroup)])
        if kind == "space" or (kind == "command" and part in words.LAYOUT) or (part == "~" and kind == "sign"):
            spaced = True
            continue
        part = words.MEANS.get(part, part) if kind == "command" else part
        if kind == "command" and _argument(text, place) is not None and _takes_text(part):
            inner, place = _argument(text, place) or ("", place)
            made = list(_wrapped(part, inner, pattern, spaced=spaced, after_number=after_number))
        elif kind == "letters":
            made = _letters(part, spaced=spaced, in_words=in_words, after_number=after_number)
        else:
            made = [_token(kind, part, spaced=spaced)]
        yield from made
        spaced = False
        if made:
            last = made[-1]
            after_number = last.kind in (TokenKind.NUMBER, TokenKind.WORD) or last.is_sign("}", ")")


def _takes_text(command: str) -> bool:
    return command in words.TEXTS | words.FONTS | words.DROPPED | words.ACCENTS or command == "mathbb"


def _argument(text: str, place: int) -> tuple[str, int] | None:
    """Content of the braces that begin at a place, and the place after them."""
    opening = re.compile(r"\s*\{").match(text, place)
    if opening is None:
        return None
    end = matching_braces(text).get(opening.end() - 1)
    if end is None:
        raise UnreadableError("a brace is not closed")
    return text[opening.end() : end], end + 1


def matching_braces(text: str) -> dict[int, int]:
    """Place of the closing brace by that of the opening one, of those that match; escaped ones do not count."""
    closed, open_ = dict[int, int](), list[int]()
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text):
        if found[0] == "{":
            open_.append(found.start())
        elif found[0] == "}" and open_:
            closed[open_.pop()] = found.start()
    return closed


def _wrapped(
    command: str, inner: str, pattern: re.Pattern[str], *, spaced: bool, after_number: bool
) -> Iterator[Token]:
    """Tokens of a command with its argument in braces."""
    name = inner.strip()
    if command in words.DROPPED:
        return
    if command == "mathbb" or (command in words.FONTS and name in ("R", "Z", "N", "Q", "C") and not after_number):
        yield Token(TokenKind.FIELD if command == "mathbb" else TokenKind.NAME, name, spaced)
    elif command in words.ACCENTS:
        yield Token(TokenKind.NAME, f"{command}({''.join(name.split())})", spaced)
    elif command in words.TEXTS or (command in UPRIGHT and after_number) or len(name) > 1:
        if name in words.FUNCTIONS and not (after_number and name in SHORT):
            yield Token(TokenKind.FUNCTION, name, spaced)
        elif name in ("e", "i", "d") and command not in words.TEXTS:
            yield Token(TokenKind.NAME, name, spaced)
        else:
            is_unit = command in UPRIGHT and after_number
            in_words = command in words.TEXTS or is_unit or LONG_RUN.search(name) is not None
            yield from _tokens(inner, pattern, in_words=in_words)
    else:
        yield from _tokens(inner, pattern, in_words=False)


def _letters(run: str, *, spaced: bool, in_words: bool, after_number: bool) -> list[Token]:
    """Tokens of letters without a command: a word, a function, or variables side by side."""
    lowered = run.lower()
    if lowered in ("and", "or"):
        return [Token(TokenKind.COMMAND, lowered, spaced)]
    if in_words or (after_number and lowered in SHORT):
        return [Token(TokenKind.WORD, run, spaced)]
    if words.MEANS.get(run, run) in words.FUNCTIONS:
        return [Token(TokenKind.FUNCTION, words.MEANS.get(run, run), spaced)]
    if run in words.SPELLED:
        return [_token("command", words.SPELLED[run], spaced=spaced)]
    applied = APPLIED.fullmatch(run)
    if applied is not None:
        return [_token("command", applied[1], spaced=spaced), Token(TokenKind.NAME, applied[2])]
    is_word = len(run) > 3 or lowered in words.SHORT_WORDS or not run.isascii()
    if len(run) > 1 and is_word:
        return [Token(TokenKind.WORD, run, spaced)]
    return [Token(TokenKind.NAME, letter, spaced and not index) for index, letter in enumerate(run)]


def _token(kind: str, part: str, *, spaced: bool) -> Token:
    """Token of a number, a sign or a command without an argument."""
    if kind == "number":
        return Token(TokenKind.NUMBER, part.replace(",", ""), spaced)
    if kind == "environment":
        return Token(TokenKind.COMMAND, re.sub(r"[\s\\{}]", " ", part).strip(), spaced)
    if kind == "row":
        return Token(TokenKind.COMMAND, "row", spaced)
    if kind == "command":
        if part in words.FUNCTIONS:
            return Token(TokenKind.FUNCTION, part, spaced)
        if part in words.GREEK:
            return Token(TokenKind.NAME, part, spaced)
        if part in ("{", "}"):
            return Token(TokenKind.COMMAND, "set" + part, spaced)
        is_sign = len(part) == 1 and not part.isalpha() and part not in "$%#"
        return Token(TokenKind.SIGN if is_sign else TokenKind.COMMAND, part, spaced)
    part = words.PLAIN.get(part, part)
    return Token(TokenKind.COMMAND if part.isalpha() or part in "%$" else TokenKind.SIGN, part, spaced)
