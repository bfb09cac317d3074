r"""Verdict on a response to a problem of mathematics whose answer is known.

A cascade: equal tokens; then our own reading of both and a comparison by kind (`answers` and `equality` have the
rules); then the `math-verify` library, for answers that we do not read. Pure. The library's time has no bound, so
responses are verified in a process that the scorer ends when its time is up (`reward.calls`).
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

import msgspec
from latex2sympy2_extended import NormalizationConfig  # type: ignore[import-untyped]
from math_verify import LatexExtractionConfig, parse  # type: ignore[import-untyped]
from math_verify import verify as verify_by_library
from sympy import Basic, Expr, Float, Integer, Rational  # type: ignore[import-untyped]

from laminar_contrib.mathematics.answers import AnswerValue, Quantity, same, share
from laminar_contrib.mathematics.equality import TooLargeError, evaluate
from laminar_contrib.mathematics.expressions import (
    Token,
    TokenKind,
    UnreadableError,
    has_outside,
    matching_braces,
    tokenise,
    variables,
)
from laminar_contrib.mathematics.structure import readings
from laminar_contrib.mathematics.words import normalise


class MathOutcome(Enum):
    """The verdict in one word."""

    RIGHT = "right"
    WRONG = "wrong"
    UNPARSABLE = "unparsable"  # no answer was found, or none that can be read


class MathVerdict(msgspec.Struct, frozen=True):
    """A verdict with the answer found, e.g. `MathVerdict(MathOutcome.RIGHT, "1/2", "values")`.

    `reason` is the stage of the cascade that decided, or why nothing could be read.
    """

    outcome: MathOutcome
    answer: str = ""
    reason: str = ""


def verify(response: str, reference: str) -> MathVerdict:
    """Judge the final answer of a response."""
    answer = extract_answer(response)
    if answer is None:
        return MathVerdict(MathOutcome.UNPARSABLE, reason="no final answer")
    return verify_answer(answer, reference)


def verify_answer(answer: str, reference: str) -> MathVerdict:
    """Judge an answer without a response around it."""
    try:
        given = tokenise(normalise(answer), grouped=False)
        wanted = tokenise(normalise(reference), grouped=False)
        if not given:
            raise UnreadableError("nothing")
    except UnreadableError as error:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, str(error))
    except RecursionError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "nested too deeply")
    if _comparable(given) == _comparable(wanted):
        return MathVerdict(MathOutcome.RIGHT, answer, "tokens")
    try:
        right = _any_same(readings(reference), readings(answer))
        return MathVerdict(MathOutcome.RIGHT if right else MathOutcome.WRONG, answer, "values")
    except TooLargeError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "a number too large to be worked out")
    except RecursionError:
        return MathVerdict(MathOutcome.UNPARSABLE, answer, "nested too deeply")
    except UnreadableError as error:
        accepts = library_accepts(normalise(reference), normalise(answer)) if may_judge(wanted, given) else None
        if accepts is None:
            return MathVerdict(MathOutcome.UNPARSABLE, answer, str(error))
        return MathVerdict(MathOutcome.RIGHT if accepts else MathOutcome.WRONG, answer, "library")


def _any_same(references: list[AnswerValue], answers: list[AnswerValue]) -> bool:
    return any(same(one, other) for one in references for other in answers)


def _comparable(tokens: tuple[Token, ...]) -> list[tuple[bool, str]]:
    """Return the texts of an answer's tokens, such that two spellings of one answer give equal lists.

    Braces around a single token are left out, so `x^{2}` equals `x^2`. Letters side by side become one text, so
    `a b` equals `ab`. Each entry is (whether the text consists of letters, text).
    """
    texts: list[tuple[bool, str]] = []
    for index, token in enumerate(tokens):
        if _is_in_own_braces(tokens, index - 1) or _is_in_own_braces(tokens, index + 1):
            continue  # one of the two braces
        is_letters = token.kind in (TokenKind.NAME, TokenKind.WORD) and token.text.isalpha()
        if is_letters and texts and texts[-1][0]:
            texts[-1] = (True, texts[-1][1] + token.text)
        else:
            texts.append((is_letters, token.text))
    return texts


def _is_in_own_braces(tokens: tuple[Token, ...], index: int) -> bool:
    """Return True for a token with a brace directly before and after it, such as the 2 of `x^{2}`."""
    if not 0 < index < len(tokens) - 1 or tokens[index].is_sign("{", "}"):
        return False
    return tokens[index - 1].is_sign("{") and tokens[index + 1].is_sign("}")


def check_reference(text: str) -> str | None:
    """Return why no answer can be compared with a reference; None for a good reference."""
    if not text.strip():
        return "the reference answer is empty"
    if len(text) > MAX_ANSWER:
        return f"the reference answer has {len(text)} characters, more than {MAX_ANSWER}"
    shown = text if len(text) <= 60 else f"{text[:60]}..."
    try:
        value = readings(text)
        same(value[0], value[0])
    except UnreadableError as error:
        return None if _is_judged_by_library(text) else f"the reference answer {shown!r} cannot be read: {error}"
    except (TooLargeError, RecursionError):
        return f"the reference answer {shown!r} is too large to be worked out"
    return None


def _is_judged_by_library(text: str) -> bool:
    try:
        tokens = tokenise(normalise(text), grouped=False)
    except UnreadableError:
        return False
    return may_judge(tokens) and library_accepts(normalise(text), normalise(text)) is not None


MAX_RESPONSE = 16_000
MAX_ANSWER = 1_000
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
NAME = r"[A-Za-z](?:_\{?\w+\}?)?"
NAME_BEFORE = re.compile(rf"\b({NAME})\s*=\s*$")
MINUS_BEFORE = re.compile(r"[=$]\s*[-−]\s*$")
BETWEEN = re.compile(  # answers side by side
    r"(?:[\s$,;*]|\\[()\[\]]|\\q?quad\b|\\[,;:! ]|\\text\s*\{\s*,?\s*(?:and|or)?\s*,?\s*\}|\b(?:and|or)\b"
    rf"|{NAME}\s*=)*"
)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
PHRASE = re.compile(
    r"\b(?:answer|result|solution)s?\b[^.\n$\\]{0,40}?\b(?:is|are|equals)\b(?!\s+as\s+follows)"
    r"|\bans(?:wer)?s?\b[^\n$\\=]{0,40}?[:=]|答案(?:是|为)?[:：]?|^[ \t#*]*(?:final\s+)?answer[ \t*]*$|####",
    re.IGNORECASE | re.MULTILINE,
)
FILLERS = re.compile(
    r"(?:[\s:*=]|\b(?:therefore|thus|hence|simply|exactly|equal to|given by|indeed|then|just)\b)+",
    re.IGNORECASE,
)
FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<display>.+?)(?<!\\)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<![\\$])\$(?P<inline>(?:\\\$|[^$\n])+?)(?<!\\)\$",
    re.DOTALL,
)
NUMBER = re.compile(r"(?<![\w.])[-−]?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?(?!\w)")
ASSIGNED = re.compile(r"\b[A-Za-z]\w{0,20}\s*=[^=].*|(?<==)[^=]*$")
STATES = re.compile(
    r"\b(?:is|are|equals?|gets?|gives?|has|have|makes?|leaves?|left|total|totals|therefore|so|thus|hence)\b",
    re.IGNORECASE,
)
HEDGE = re.compile(
    r"\b(?:might|maybe|perhaps|could|would|if|not|sure|step|let|guess|possibly|probably|assume|suppose)\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(r"\.(?=\s|$)|。|\n|;(?=\s)|,?\s+(?:because|since|as|which|where|so)\b")
ALTERNATIVE = re.compile(r"\s*,?\s*\bor\b")


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """A box or formula with its place in the text."""

    start: int
    end: int
    content: str


def extract_answer(response: str) -> str | None:
    """Return the text of the final answer; None if there is none, or if it exceeds `MAX_ANSWER` characters."""
    text = final_part(response)
    found = boxes(text)
    if found:
        answer = _together(_neighbours(found, text), text)
    else:
        text = BOX.split(text, maxsplit=1)[0]  # a box that was begun says that all before was not yet the answer
        answer = _tagged(text) or _phrased(text) or _last_of(text)
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def final_part(response: str) -> str:
    """Return the text after the thinking; "" if the thinking does not end."""
    _, closed, after = response.rpartition("</think>")
    if not closed and "<think>" in response:
        return ""
    return after[-MAX_RESPONSE:]


def boxes(text: str) -> list[FoundAnswer]:
    """Return the closed boxes outside of other boxes; a box across paragraphs counts as open."""
    found: list[FoundAnswer] = []
    ends = matching_braces(text)
    place = 0
    while (begin := BOX.search(text, place)) is not None:
        place = begin.end()
        if begin[1]:
            end = ends.get(begin.end() - 1)
            if end is None or text.find("\n\n", place, end) >= 0:
                continue
            content, place = text[place:end], end + 1
        else:
            single = re.compile(r"\s*(\d+|[A-Za-z])").match(text, place)
            if single is None:
                continue
            content, place = single[1], single.end()
        sign = "-" if MINUS_BEFORE.search(text[max(0, begin.start() - 9) : begin.start()]) else ""
        found.append(FoundAnswer(begin.start(), place, sign + content))
    return found


def _neighbours(found: Sequence[FoundAnswer], text: str) -> list[FoundAnswer]:
    """Return the last answer, together with answers right before it."""
    last = [found[-1]]
    for before in reversed(found[:-1]):
        if not BETWEEN.fullmatch(text, before.end, last[0].start):
            break
        last.insert(0, before)
    return last


def _together(found: Sequence[FoundAnswer], text: str) -> str:
    if len(found) == 1:
        return found[0].content
    return ", ".join(dict.fromkeys(_with_name(each, text) for each in found))


def _with_name(found: FoundAnswer, text: str) -> str:
    r"""Return the content with the variable before it, as in `x = \boxed{3}`."""
    name = NAME_BEFORE.search(text[max(0, found.start - 20) : found.start].rstrip("$ "))
    return f"{name[1]} = {found.content}" if name and "=" not in found.content else found.content


def _formulas(text: str) -> list[FoundAnswer]:
    return [
        FoundAnswer(each.start(), each.end(), str(each[str(each.lastgroup)])) for each in FORMULA.finditer(text)
    ]


def _tagged(text: str) -> str:
    found = TAGGED.findall(text)
    if not found:
        return ""
    formulas = _formulas(found[-1])
    return formulas[0].content if len(formulas) == 1 else str(found[-1])


def _phrased(text: str) -> str:
    """Return the text after the last "the answer is", to the end of the sentence."""
    found = list(PHRASE.finditer(text))
    if not found:
        return ""
    rest = text[found[-1].end() :]
    filler = FILLERS.match(rest)
    rest = rest[filler.end() :] if filler else rest
    formulas = _formulas(rest)
    if formulas and formulas[0].start == 0:
        return _first_of(formulas, rest)
    sentence = SENTENCE_END.split(rest, maxsplit=1)[0]
    formulas = _formulas(sentence)
    return _first_of(formulas, sentence) if formulas else sentence.strip(" *`_\"'")


def _first_of(formulas: Sequence[FoundAnswer], text: str) -> str:
    """Return the first formula and formulas right after it; the whole sentence if "or" follows."""
    together = [formulas[0]]
    for after in formulas[1:]:
        if not BETWEEN.fullmatch(text, together[-1].end, after.start):
            break
        together.append(after)
    if ALTERNATIVE.match(text, together[-1].end):
        return SENTENCE_END.split(text, maxsplit=1)[0]
    return _together(together, text)


def _last_of(text: str) -> str:
    """Return the last formula of the last paragraph, else the equation or the only number in its last sentence."""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if not paragraphs:
        return ""
    formulas = _formulas(paragraphs[-1])
    if formulas:
        return _together(_neighbours(formulas, paragraphs[-1]), paragraphs[-1])
    lines = [line for line in paragraphs[-1].splitlines() if re.search(r"\w", line)]
    sentence = re.split(r"\.\s+", lines[-1].strip(" .*`"))[-1] if lines else ""
    numbers = NUMBER.findall(sentence)
    if HEDGE.search(sentence):
        return ""
    assigned = ASSIGNED.search(sentence)
    if assigned is not None:
        return assigned[0]
    says_so = STATES.search(sentence) or NUMBER.fullmatch(sentence)
    return numbers[0] if len(numbers) == 1 and says_so else ""


PLAIN_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
)
EXTRACTION = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=PLAIN_LATEX)]
REFUSED = (
    "_",
    "!",
    "%",
    "row",
    "dots",
    "approx",
    "pm",
    "mp",
    "circ",
    "bmod",
    "pmod",
    "equiv",
    "|",
    "=",
    "ne",
    "in",
)
DIGITS, SLACK = 50, 10**-35

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time-outs are off, which they must be


def may_judge(*sides: tuple[Token, ...]) -> bool:
    """Return True for answers that the library reads whole. It reads only the end of chained equations."""
    try:
        return not any(has_outside(side, "row") or any(map(_is_refused, side)) for side in sides)
    except UnreadableError:  # brackets that do not match
        return False


def _is_refused(token: Token) -> bool:
    is_decimal = token.kind is TokenKind.NUMBER and "." in token.text
    return token.kind is TokenKind.WORD or token.is_sign(*REFUSED) or is_decimal


def library_accepts(reference: str, answer: str) -> bool | None:
    """Return the library's judgement, False if values differ; None if the library cannot read one of the two."""
    try:
        wanted, given = (_parsed(text) for text in (reference, answer))
        if wanted is None or given is None:
            return None
        is_equal = verify_by_library(wanted, given, allow_set_relation_comp=True, timeout_seconds=None)
        return bool(is_equal) and _have_equal_values(wanted, given)
    except Exception as error:  # noqa: BLE001 - a library on a text of a model's
        logging.getLogger(__name__).debug("not judged: %r", error)
        return None


def _parsed(text: str) -> Basic | None:
    """Return the library's expression of a text; None if the library dropped a variable."""
    found = parse(
        f"${text}$", EXTRACTION, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    if len(found) != 1 or not isinstance(found[0], Basic):
        return None
    tokens = tokenise(text, grouped=False)
    names = {token.text for token in tokens if token.kind is TokenKind.NAME} - {"e", "i"}
    return found[0] if len(found[0].free_symbols) == len(names) else None


def _have_equal_values(wanted: Basic, given: Basic) -> bool:
    """Return True if two formulas have equal values at three points; other kinds must only be of one type."""
    if wanted.has(Float) or given.has(Float) or wanted.free_symbols != given.free_symbols:
        return False
    if not (isinstance(wanted, Expr) and isinstance(given, Expr)):
        return isinstance(wanted, Expr) == isinstance(given, Expr)
    names = sorted(wanted.free_symbols, key=str)
    for shift in (2, 5, 11):
        point = {name: Rational(7 * index + shift, 3) for index, name in enumerate(names)}
        values = [side.doit().subs(point).evalf(DIGITS) for side in (wanted, given)]
        if not all(value.is_number for value in values) or not _are_near(*values):
            return False
    return True


def _are_near(left: Any, right: Any) -> bool:
    size = max(abs(left), abs(right), Integer(0))
    return bool(abs(left - right) <= SLACK * size)


MOST_BITS = 256  # of a number that is written out


def canonical(answer: str) -> str:
    r"""Return the exact value of a number, e.g. "1/2" for 0.5 and \frac{1}{2}; normalised text otherwise."""
    try:
        number = _number(answer)
        if number is not None:
            return str(number)
        return " ".join(token.text for token in tokenise(normalise(answer), grouped=False))
    except (UnreadableError, ArithmeticError, RecursionError):
        return " ".join(answer.split())


def _number(answer: str) -> Fraction | None:
    """Return the exact number without a unit that one reading of an answer gives; None for other answers."""
    numbers = (share(one) for one in readings(answer) if isinstance(one, Quantity) and one.unit is None)
    expression = next((one for one in numbers if not variables(one)), None)
    if expression is None:
        return None
    value = evaluate(expression, {})
    if not isinstance(value, Fraction):
        return None
    return value if max(abs(value.numerator), value.denominator).bit_length() <= MOST_BITS else None
