"""Tokens of an answer in LaTeX or plain text, and the expressions that a parser reads from them. Pure.

`structure` hands in the tokens of one expression, `equality` gives it a value. Invariants
(`tests/reward/verifiers/test_math_tokens.py`): layout makes no token and every meaningful sign makes a token, so
two answers with the same tokens are the same answer. The parser uses all tokens of an expression or refuses it. It
also refuses a text of two possible readings ("3 3", "f(x+y)").
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from itertools import accumulate
from typing import TypeAlias

from laminar_contrib.mathematics import words
from laminar_contrib.mathematics.words import SHORT, word_set

MAX_TOKENS = 600
MAX_NESTED = 30  # brackets in brackets
PATTERN = re.compile(
    r"(?P<row>\\\\)|(?P<environment>\\(?:begin|end)\s*\{[a-zA-Z]+\*?\})|\\(?P<command>[a-zA-Z]+|[^a-zA-Z])"
    r"|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<letters>[^\W\d_]+)|(?P<sign><=|>=|!=|==|\*\*|\S)|(?P<space>\s+)"
)
LONG_RUN = re.compile(r"(?<!\\)\b[A-Za-z]{2,}")
UPRIGHT = ("mathrm", "operatorname")  # also of units
APPLIED = re.compile(r"(sin|cos|tan|cot|sec|csc|ln|log|sqrt)([a-z])")  # "sinx"


class UnreadableError(ValueError):
    """Raised for a text that is no answer, or an answer of a kind that this package does not read."""


class TokenKind(Enum):
    """Kind of a token."""

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
        """Return True if this token is a sign or a command with one of these names."""
        return self.kind in (TokenKind.SIGN, TokenKind.COMMAND) and self.text in texts


def tokenise(text: str) -> tuple[Token, ...]:
    """Split a normalised text into tokens.

    Raises `UnreadableError` for braces that do not match, and above `MAX_TOKENS`.
    """
    tokens = tuple(_tokens(text, in_words=False))
    if len(tokens) > MAX_TOKENS:
        raise UnreadableError(f"{len(tokens)} tokens")
    steps = (token.is_sign("(", "[", "{", "set{") - token.is_sign(")", "]", "}", "set}") for token in tokens)
    if max(accumulate(steps), default=0) > MAX_NESTED:
        raise UnreadableError("nested too deeply")
    return tokens


def _tokens(text: str, *, in_words: bool) -> Iterator[Token]:
    """Yield the tokens of a text; layout only marks the next token as spaced."""
    spaced, after_number, place = False, False, 0
    while place < len(text):
        found = PATTERN.match(text, place)
        assert found is not None, text[place]
        place, kind, part = found.end(), str(found.lastgroup), str(found[str(found.lastgroup)])
        if kind == "space" or (kind == "command" and part in words.LAYOUT) or (part == "~" and kind == "sign"):
            spaced = True
            continue
        part = words.MEANS.get(part, part) if kind == "command" else part
        if kind == "command" and _argument(text, place) is not None and _takes_text(part):
            inner, place = _argument(text, place) or ("", place)
            made = list(_wrapped(part, inner, spaced=spaced, after_number=after_number))
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
    """Return the content of the braces that begin at a place, and the place after them."""
    opening = re.compile(r"\s*\{").match(text, place)
    if opening is None:
        return None
    end = matching_braces(text).get(opening.end() - 1)
    if end is None:
        raise UnreadableError("a brace is not closed")
    return text[opening.end() : end], end + 1


def matching_braces(text: str) -> dict[int, int]:
    """Map the position of each opening brace to its closing one. Escaped braces do not count."""
    closed, open_ = dict[int, int](), list[int]()
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text):
        if found[0] == "{":
            open_.append(found.start())
        elif found[0] == "}" and open_:
            closed[open_.pop()] = found.start()
    return closed


def _wrapped(command: str, inner: str, *, spaced: bool, after_number: bool) -> Iterator[Token]:
    """Return the tokens of a command with its argument in braces."""
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
            yield from _tokens(inner, in_words=in_words)
    else:
        yield from _tokens(inner, in_words=False)


def _letters(run: str, *, spaced: bool, in_words: bool, after_number: bool) -> list[Token]:
    """Return the tokens of plain letters: a word, a function, or variables side by side."""
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
    """Return the token of a number, a sign or a command without an argument."""
    if kind == "number":
        return Token(TokenKind.NUMBER, part, spaced)
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


OPENING = ("(", "[", "{", "set{", "langle", "lfloor", "lceil")
CLOSING = (")", "]", "}", "set}", "rangle", "rfloor", "rceil")
SEPARATORS = (",", ";", "and", "or")

Tokens = Sequence[Token]


def split(tokens: Tokens, is_border: Callable[[Token], bool]) -> tuple[list[list[Token]], list[str]]:
    """Split tokens at borders outside of brackets; return the parts and the borders.

    Raises `UnreadableError` for brackets that do not match.
    """
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
    """Split tokens at these signs outside of brackets."""
    return split(tokens, lambda token: token.is_sign(*signs))


def has_outside(tokens: Tokens, *signs: str) -> bool:
    """Return True if one of these signs stands outside of brackets."""
    return bool(split_at(tokens, *signs)[1])


def is_enclosed(tokens: Tokens) -> bool:
    """Return True if the first token is a bracket and the last token closes it."""
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


MAX_DEPTH = 40
NUMBER, NAME, WORD, FUNCTION = TokenKind.NUMBER, TokenKind.NAME, TokenKind.WORD, TokenKind.FUNCTION
BRACKETS = {  # opening bracket -> (closing bracket, operation on its content)
    "(": (")", ""),
    "[": ("]", ""),
    "{": ("}", ""),
    "lfloor": ("rfloor", "floor"),
    "lceil": ("rceil", "ceiling"),
}
COMMANDS = ("frac", "binom", "sqrt")
INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
EVALUATED = word_set("sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp max min")


@dataclass(frozen=True, slots=True)
class Numeral:
    """Number as it was written, e.g. `Numeral(Fraction(5, 2), "2.5")`."""

    value: Fraction
    text: str = ""

    @property
    def is_decimal(self) -> bool:
        """Whether the number was written with a decimal point."""
        return "." in self.text


@dataclass(frozen=True, slots=True)
class Variable:
    """Variable with its subscript, e.g. `Variable("x_1")`."""

    name: str


@dataclass(frozen=True, slots=True)
class Applied:
    """Operation on expressions, e.g. `Applied("add", (Variable("x"), Numeral(Fraction(1))))`."""

    name: str
    args: tuple["Expression", ...] = ()


Expression: TypeAlias = Numeral | Variable | Applied
ONE = Numeral(Fraction(1), "1")
CONSTANTS = {"pi": Applied("pi"), "infty": Applied("infinity")}
LETTERS = {"e": Applied("e"), "i": Applied("i")}


def variables(expression: Expression) -> set[str]:
    """Return the names of an expression's variables."""
    if isinstance(expression, Variable):
        return {expression.name}
    return set[str]().union(*map(variables, expression.args)) if isinstance(expression, Applied) else set()


def renamed(expression: Expression, names: Mapping[str, str]) -> Expression:
    """Return the expression with other names for some of its variables."""
    if isinstance(expression, Variable):
        return Variable(names.get(expression.name, expression.name))
    if isinstance(expression, Numeral):
        return expression
    return Applied(expression.name, tuple(renamed(arg, names) for arg in expression.args))


def operations(expression: Expression) -> set[str]:
    """Return the names of the operations in an expression."""
    if not isinstance(expression, Applied):
        return set()
    return {expression.name}.union(*map(operations, expression.args))


def negated(expression: Expression) -> Expression:
    """Return the expression with its sign changed."""
    return Applied("negate", (expression,))


def parse_expression(tokens: Sequence[Token]) -> tuple[Expression, Sequence[Token]]:
    """Parse the expression at the start of the tokens; return it and the words after it.

    Raises `UnreadableError`.
    """
    parser = ExpressionParser(tokens)
    expression = parser.sum()
    rest = parser.rest
    if rest and not _begins_unit(rest[0]):
        raise UnreadableError(f"{rest[0].text!r} is not expected")
    return expression, rest


def _begins_unit(token: Token) -> bool:
    return token.kind is WORD or token.is_sign("%", "$", "€", "£", "₹", "¥", "¢")


class ExpressionParser:
    """Recursive descent over tokens: each method reads one rule of the grammar and stops behind it."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.place = 0
        self._tokens = list(tokens)
        self._depth = 0
        self._bars = 0  # open bars of absolute values

    @property
    def rest(self) -> Sequence[Token]:
        """Tokens not read yet."""
        return self._tokens[self.place :]

    def sum(self) -> Expression:
        """Read terms with signs between them."""
        sign = self._take("+", "-")
        total = negated(self._product()) if sign == "-" else self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = Applied("add", (total, term if sign == "+" else negated(term)))
        return total

    def _product(self) -> Expression:
        """Read factors with signs between them or side by side."""
        product = self._signed(self._factor)
        while True:
            if self._take("*"):
                product = Applied("multiply", (product, self._signed(self._factor)))
            elif self._take("/"):
                product = Applied("divide", (product, self._signed(self._factor)))
            elif self._begins_factor():
                product = Applied("multiply", (product, self._factor()))
            else:
                return product

    def _signed(self, rule: Callable[[], Expression]) -> Expression:
        return negated(rule()) if self._take("-") else rule()

    def _begins_factor(self) -> bool:
        """Return True if a factor follows without a sign. Raises for a number after a factor."""
        token = self._peek()
        if token is None:
            return False
        if token.kind is NUMBER:
            raise UnreadableError("a number right after a factor")
        if token.kind in (NAME, FUNCTION):
            return True
        return token.is_sign(*BRACKETS, *CONSTANTS, *COMMANDS) or (token.is_sign("|") and not self._bars)

    def _factor(self) -> Expression:
        """Read an atom with its factorials and powers. Raises `UnreadableError` above `MAX_DEPTH`."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        base = self._atom()
        while sign := self._take("!", "^", "_"):
            if sign == "!" and isinstance(base, Applied) and base.name == "factorial" and self._before(2, "!"):
                raise UnreadableError("a double factorial")
            if sign == "_":
                raise UnreadableError("a subscript of something else than a variable")
            base = Applied("factorial", (base,)) if sign == "!" else self._raised(base)
        self._depth -= 1
        return base

    def _raised(self, base: Expression) -> Expression:
        for degrees in (("circ",), ("{", "circ", "}")):
            ahead = self._tokens[self.place : self.place + len(degrees)]
            if len(ahead) == len(degrees) and all(map(Token.is_sign, ahead, degrees)):
                self.place += len(degrees)
                return Applied("degrees", (base,))
        return Applied("power", (base, self._exponent()))

    def _exponent(self) -> Expression:
        exponent = self._signed(self._atom)
        return Applied("power", (exponent, self._exponent())) if self._take("^") else exponent

    def _atom(self) -> Expression:
        """Read a number, variable, function, root, fraction or bracket. Raises `UnreadableError`."""
        token = self._next()
        if token.kind is NUMBER:
            return self._mixed(Numeral(Fraction(token.text.rstrip(".")), token.text))
        if token.kind is NAME:
            return self._variable(token.text)
        if token.kind is FUNCTION:
            return self._function(token.text)
        if token.is_sign("|"):
            return self._absolute()
        if token.is_sign(*CONSTANTS):
            return CONSTANTS[token.text]
        if token.is_sign(*BRACKETS):
            closing, operation = BRACKETS[token.text]
            inner = self.sum()
            self._expect(closing)
            return Applied(operation, (inner,)) if operation else inner
        if token.is_sign("frac", "binom"):
            name = "divide" if token.text == "frac" else "binomial"
            return Applied(name, (self._argument(), self._argument()))
        if token.is_sign("sqrt"):
            return self._root()
        raise UnreadableError(f"{token.text!r} is not expected")

    def _mixed(self, whole: Numeral) -> Expression:
        """Read a mixed number: `whole`, with the proper fraction that may follow: `2\\frac{1}{2}` or "2 1/2"."""
        token, start = self._peek(), self.place
        if whole.is_decimal or token is None:
            return whole
        if token.is_sign("frac"):
            fraction = self._atom()
            if isinstance(fraction, Applied) and _is_proper(fraction.args):
                return Applied("add", (whole, fraction))
        elif token.kind is NUMBER and token.spaced and len(self._tokens) > start + 2:
            slash, under = self._tokens[start + 1 : start + 3]
            args = tuple(Numeral(Fraction(part.text)) for part in (token, under) if part.text.isdigit())
            if slash.is_sign("/") and len(args) == 2 and _is_proper(args):
                self.place += 3
                return Applied("add", (whole, Applied("divide", args)))
        self.place = start
        return whole

    def _variable(self, name: str) -> Expression:
        if self._take("_"):
            name += f"_{self._raw()}"
        while self._take("'"):
            name += "'"
        after = self._peek()
        if name in ("f", "g") and after is not None and after.is_sign("("):
            raise UnreadableError(f"{name} of something")
        return LETTERS.get(name) or Variable(name)

    def _raw(self) -> str:
        """Read the text of one token, or of all tokens in braces."""
        if not self._take("{"):
            return self._next().text
        parts = []
        while not self._take("}"):
            parts.append(self._next().text)
        return "".join(parts)

    def _function(self, name: str) -> Expression:
        """Read the base, exponent and argument of function `name`. Raises `UnreadableError`."""
        base, exponent = None, None
        while sign := self._take("_", "^"):
            if sign == "_":
                base = self._argument()
            else:
                exponent = self._exponent()
        if exponent == negated(ONE):
            name, exponent = INVERSES.get(name, ""), None
        if name not in EVALUATED or (base is not None and name != "log"):
            raise UnreadableError(f"a function {name!r}")
        if name in ("max", "min") and self._take("("):
            args = [self.sum()]
            while self._take(","):
                args.append(self.sum())
            self._expect(")")
            return Applied(name, tuple(args))
        argument = self._function_argument()
        applied = Applied(name, (argument,) if base is None else (argument, base))
        return applied if exponent is None else Applied("power", (applied, exponent))

    def _function_argument(self) -> Expression:
        token = self._peek()
        if token is not None and token.is_sign(*BRACKETS):
            return self._atom()
        argument = self._signed(self._factor)
        while self._begins_factor() and (token := self._peek()) is not None and token.kind is not FUNCTION:
            argument = Applied("multiply", (argument, self._factor()))
        return argument

    def _absolute(self) -> Expression:
        self._bars += 1
        inner = self.sum()
        self._bars -= 1
        self._expect("|")
        return Applied("absolute", (inner,))

    def _root(self) -> Expression:
        degree: Expression = Numeral(Fraction(2))
        if self._take("["):
            degree = self.sum()
            self._expect("]")
        return Applied("root", (self._atom(), degree))

    def _argument(self) -> Expression:
        """Read the argument of a command: a group or a single token. A number gives only its first digit."""
        token = self._peek()
        if token is not None and token.kind is NUMBER and len(token.text) > 1 and token.text.isdecimal():
            self._tokens[self.place] = Token(NUMBER, token.text[1:])
            return Numeral(Fraction(token.text[0]))
        if token is not None and token.kind is NUMBER and token.text.isdecimal():
            self.place += 1
            return Numeral(Fraction(token.text), token.text)
        return self._atom()

    def _peek(self) -> Token | None:
        return self._tokens[self.place] if self.place < len(self._tokens) else None

    def _before(self, steps: int, sign: str) -> bool:
        return self.place >= steps and self._tokens[self.place - steps].is_sign(sign)

    def _next(self) -> Token:
        token = self._peek()
        if token is None:
            raise UnreadableError("ends too early")
        self.place += 1
        return token

    def _take(self, *signs: str) -> str:
        """Read the next token if it is one of these signs and return its name; else read nothing and return ""."""
        token = self._peek()
        if token is None or not token.is_sign(*signs):
            return ""
        self.place += 1
        return token.text

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise UnreadableError(f"{sign!r} is missing")


def _is_proper(args: Sequence[Expression]) -> bool:
    """Return True for the numerator and denominator of a fraction between 0 and 1."""
    over, under = args
    if not (isinstance(over, Numeral) and isinstance(under, Numeral)):
        return False
    return not (over.is_decimal or under.is_decimal) and 0 < over.value < under.value
