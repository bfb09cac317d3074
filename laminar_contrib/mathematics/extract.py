r"""Final answer of a response, as text.

Pure. Order: the last closed box; else the last `<answer>`; else the last phrase such as "the answer is ..."; else
the last formula, or the only number, of the last paragraph. Answers side by side, as in `$2$ or $\boxed{3}$`, are
taken together. Invariant: only what comes after the last `</think>` counts, and of that no more than the last
`MAX_RESPONSE` characters.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_contrib.mathematics.tokens import matching_braces

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
    """Box or formula with its place in the text."""

    start: int
    end: int
    content: str


def extract_answer(response: str) -> str | None:
    """Text of the final answer; None where there is none, or one of more than `MAX_ANSWER` characters."""
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
    """Text after the thoughts, which are not looked at; nothing where they do not end."""
    _, closed, after = response.rpartition("</think>")
    if not closed and "<think>" in response:
        return ""
    return after[-MAX_RESPONSE:]


def boxes(text: str) -> list[FoundAnswer]:
    """Closed boxes that are in no other box; one across paragraphs is not closed."""
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
    """The last answer with those that stand right before it."""
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
    r"""Content with the variable that stands before it, as in `x = \boxed{3}`."""
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
    """Text after the last "the answer is", to the end of the sentence."""
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
    """First formula with those that stand right after it; all of the sentence where it goes on with "or"."""
    together = [formulas[0]]
    for after in formulas[1:]:
        if not BETWEEN.fullmatch(text, together[-1].end, after.start):
            break
        together.append(after)
    if ALTERNATIVE.match(text, together[-1].end):
        return SENTENCE_END.split(text, maxsplit=1)[0]
    return _together(together, text)


def _last_of(text: str) -> str:
    """Last formula of the last paragraph, else the equation or the only number that its last sentence states."""
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
