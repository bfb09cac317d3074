"""Expressions of an answer, and the parser that reads them from tokens.

Pure; `structure` hands in the tokens of one expression, `evaluate` gives it a value. Invariant: every token is
used up, or the expression is refused; a reading that one could dispute ("3 3", "f(x+y)") is refused too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from laminar_contrib.mathematics.tokens import Token, TokenKind, UnreadableError
from laminar_contrib.mathematics.words import word_set

MAX_DEPTH = 40
NUMBER, NAME, WORD, FUNCTION = TokenKind.NUMBER, TokenKind.NAME, TokenKind.WORD, TokenKind.FUNCTION
BRACKETS = {  # with what closes them, and what they do
    "(": (")", ""),
    "[": ("]", ""),
    "{": ("}", ""),
    "lfloor": ("rfloor", "floor"),
    "lceil": ("rceil", "ceiling"),
}
COMMANDS = ("frac", "binom", "sqrt")
INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
EVALUATED = word_set("sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan ln log lg exp")


@dataclass(frozen=True, slots=True)
class Numeral:
    """Number as it was written, e.g. `Numeral(Fraction(5, 2), "2.5")`."""

    value: Fraction
    text: str = ""

    @property
    def is_decimal(self) -> bool:
        """True where it was written with a decimal point."""
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
    """Names of the variables of an expression."""
    if isinstance(expression, Variable):
        return {expression.name}
    return set[str]().union(*map(variables, expression.args)) if isinstance(expression, Applied) else set()


def operations(expression: Expression) -> set[str]:
    """Names of the operations in an expression."""
    if not isinstance(expression, Applied):
        return set()
    return {expression.name}.union(*map(operations, expression.args))


def negated(expression: Expression) -> Expression:
    """Expression with the other sign."""
    return Applied("negate", (expression,))


def parse_expression(tokens: Sequence[Token]) -> tuple[Expression, Sequence[Token]]:
    """Expression at the start of the tokens, and the words after it. Raises `UnreadableError`."""
    parser = ExpressionParser(tokens)
    expression = parser.sum()
    rest = parser.rest
    if rest and not _begins_unit(rest[0]):
        raise UnreadableError(f"{rest[0].text!r} is not expected")
    return expression, rest


def _begins_unit(token: Token) -> bool:
    return token.kind is WORD or token.is_sign("%", "$", "€", "£", "₹", "¥", "¢")


class ExpressionParser:
    """Recursive descent over tokens; methods are the rules of the grammar and stop where theirs ends."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.place = 0
        self._tokens = list(tokens)
        self._depth = 0
        self._bars = 0  # open bars of absolute values

    @property
    def rest(self) -> Sequence[Token]:
        """Tokens that are left."""
        return self._tokens[self.place :]

    def sum(self) -> Expression:
        """Terms with signs between them."""
        sign = self._take("+", "-")
        total = negated(self._product()) if sign == "-" else self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            total = Applied("add", (total, term if sign == "+" else negated(term)))
        return total

    def _product(self) -> Expression:
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
        """True where a product goes on without a sign. Raises for a number after a factor."""
        token = self._peek()
        if token is None:
            return False
        if token.kind is NUMBER:
            raise UnreadableError("a number right after a factor")
        if token.kind in (NAME, FUNCTION):
            return True
        return token.is_sign(*BRACKETS, *CONSTANTS, *COMMANDS) or (token.is_sign("|") and not self._bars)

    def _factor(self) -> Expression:
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
        """Number, with the proper fraction that may follow: `2\\frac{1}{2}` or "2 1/2"."""
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
        """Text of one token, or of all in braces."""
        if not self._take("{"):
            return self._next().text
        parts = []
        while not self._take("}"):
            parts.append(self._next().text)
        return "".join(parts)

    def _function(self, name: str) -> Expression:
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
        """Argument of a command: a group, or a single token of which a number gives its first digit."""
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
        """Name of the next token, taken, if it is one of these signs; else nothing."""
        token = self._peek()
        if token is None or not token.is_sign(*signs):
            return ""
        self.place += 1
        return token.text

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise UnreadableError(f"{sign!r} is missing")


def _is_proper(args: Sequence[Expression]) -> bool:
    """True for the parts of a fraction between 0 and 1."""
    over, under = args
    if not (isinstance(over, Numeral) and isinstance(under, Numeral)):
        return False
    return not (over.is_decimal or under.is_decimal) and 0 < over.value < under.value
