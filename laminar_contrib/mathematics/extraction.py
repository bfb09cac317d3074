r"""The final answer in a response. Pure.

An explicit mark comes before prose: a closed `\boxed{...}`, `<answer>`, "####" or "Answer:". The last mark that
has a value counts. Without a mark the last phrase such as "the answer is" with a value counts, else the bold text,
formula or only number of the last paragraph, if its last sentence states it. Where no box closes, the text behind
the first open box does not count. A formula or number is no answer where the words around it change it, as in
"less than $7$"; then the whole sentence is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_contrib.mathematics.expressions import matching_braces
from laminar_contrib.mathematics.words import is_unit
from laminar_py.records.reasoning import after_reasoning

MAX_RESPONSE = 16_000
MAX_ANSWER = 1_000
LOOK_AHEAD = 2 * MAX_ANSWER  # characters behind a mark or phrase, in which its value begins
BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
NAME = r"[A-Za-z](?:_\{?\w+\}?)?"
NAME_BEFORE = re.compile(rf"\b({NAME})\s*=\s*$")
MINUS_BEFORE = re.compile(r"[=$]\s*[-−]\s*$")
UNIT_AFTER = re.compile(r"[\s$]*(?:\\[,; ]\s*)*(?:\\(?:text|mathrm)\s*\{\s*)?([A-Za-z]+(?:/[A-Za-z]+)?)\b")
DEGREES_AFTER = re.compile(r"[\s$]*(?:\^\s*\{?\s*\\circ|°)")
BETWEEN = re.compile(  # answers side by side
    r"(?:[\s$,;*]|\\[()\[\]]|\\q?quad\b|\\[,;:! ]|\\text\s*\{\s*,?\s*(?:and|or)?\s*,?\s*\}|\b(?:and|or)\b"
    rf"|{NAME}\s*=)*"
)
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MARK = re.compile(
    r"####(?![^\w\\]{0,9}(?:\d+[.:)]\s)?(?-i:[A-Z][a-z]+\b).{0,80}\n\s{0,9}\S)"  # no heading of a section
    r"|\bans(?:wer)?s?\b(?:\s+(?:to|for|of)\b[^\n$\\=.:]{1,30})?(?:\s*\([^)\n]{0,30}\))?(?:\s+is)?\W{0,4}?:"
    r"|\bans(?:wer)?s?\W{0,4}?=|答案(?:是|为)?[:：]?|^[ \t#*]*(?:final\s+)?answer[ \t*]*$",
    re.IGNORECASE | re.MULTILINE,
)
PHRASE = re.compile(
    r"\b(?P<noun>answer|result|solution)s?\b[^.\n$\\]{0,40}?\b(?:is|are|equals)\b(?!\s+as\s+follows)",
    re.IGNORECASE,
)
FILLERS = re.compile(
    r"(?:[\s:*=]|\b(?:therefore|thus|hence|simply|exactly|equal to|given by|indeed|then|just)\b)+",
    re.IGNORECASE,
)
NO_VALUE = re.compile(
    r"(?:\W|\b(?:exact|valid|correct|right|wrong|verified|checked|confirmed|consistent|reasonable|unique|final"
    r"|complete|clear|as|shown|given|not|found|therefore|above|below|obtained|now|also|the|a|an|and|step)\b)*"
    r"(?:$|\b(?:and|as|because|since|needs?|that|when|for|in|by|with|from)\b)",
    re.IGNORECASE,
)
CLAUSE = re.compile(  # its start
    r"\b(?:is|are|equals|gives?|has|have|gets?|obtain|find|yields?|that)\b|[.,:;?!]\s|\n", re.IGNORECASE
)
CHANGED_BEFORE = re.compile(
    r"\b(?:not?|never|neither|\w+n['’]t|minus|negative|than|at\s+(?:least|most)|up\s+to|half|twice|double|square|root"
    r"|cube|multiples?|between|from|under|over|below|above)\b|(?<!\w)[-−]\Z",
    re.IGNORECASE,
)
CHANGED_AFTER = re.compile(
    r"\W{0,3}?(?:[-−–+/×·^]\s*[\d$(\\]|\+|\\?%|(?:times|to)\W*\d"
    r"|\b(?:plus|minus|divided|(?:more|less|fewer|greater)\s+than|dozen|hundred|thousand|[mb]illion|percent|factorial"
    r"|squared|cubed|(?:is|does|can)\s?(?:not|n['’]t|wrong))\b)",
    re.IGNORECASE,
)
ANYTHING = re.compile(r"\S")
VALUE_BEHIND_BOX = re.compile(r"^\W*(?:\d|\\|\w\s*=|[A-J]\W*$)")
CHOICE = re.compile(r"\(?[A-J]\)(?=\W)")
FORMULA = re.compile(
    r"(?<!\\)\$\$(?P<display>.+?)(?<!\\)\$\$|\\\[(?P<bracket>.+?)\\\]|\\\((?P<paren>.+?)\\\)"
    r"|(?<![\\$])\$(?P<inline>(?:\\\$|[^$\n])+?)(?<!\\)\$",
    re.DOTALL,
)
BOLD = re.compile(r"\*\*([^*\n]{1,60}[^*\n:])\*\*")
BOLD_MARK = re.compile(r"(?<![\w)}])\*\*|\*\*(?![\w({\\])")  # but not the power of x**2
NUMBER = re.compile(r"(?<![\w.])[-−]?\$?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?(?:\s?\\?%)?(?!\w)")
ASSIGNED = re.compile(r"\b[A-Za-z]\w{0,20}\s*=[^=].*|(?<==)[^=]*$")
STATES = re.compile(
    r"\b(?:is|are|equals?|gets?|gives?|has|have|makes?|leaves?|left|total|totals|therefore|so|thus|hence)\b",
    re.IGNORECASE,
)
HEDGE = re.compile(
    r"\b(?:might|maybe|perhaps|could|would|if|not|cannot|unable|sure|step|let|guess|possibly|probably|assume|suppose)\b"
    r"|n['’]t\b",
    re.IGNORECASE,
)
SENTENCE_END = re.compile(
    r"(?<![ap]\.m)\.(?=\s|$)|。|\n|</answer>|;(?=\s)|,?\s+(?:because|since|as|which|where|so)\b"
)
ALTERNATIVE = re.compile(r"\s*,?\s*\bor\b")


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    """A box or a formula, with its place in the text."""

    start: int
    end: int
    content: str


def extract_answer(response: str) -> str | None:
    """Return the text of the final answer; None if there is none, or if it exceeds `MAX_ANSWER` characters."""
    text = after_reasoning(response)[-MAX_RESPONSE:]
    boxed = boxes(text)
    before_box = BOX.split(text, maxsplit=1)[0]
    if boxed:  # a mark behind the box counts if a number, a formula or a choice follows
        answer = _marked(text[boxed[-1].end :], VALUE_BEHIND_BOX) or _together(_neighbours(boxed, text), text)
    else:
        answer = _marked(before_box) or _phrased(before_box) or _last_of(before_box)
    answer = answer.strip()
    return answer if 0 < len(answer) <= MAX_ANSWER else None


def boxes(text: str) -> list[FoundAnswer]:
    """Return the closed boxes with a content, outside of other boxes; a box across paragraphs counts as open."""
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
        if content.strip():
            sign = "-" if MINUS_BEFORE.search(text[max(0, begin.start() - 9) : begin.start()]) else ""
            found.append(FoundAnswer(begin.start(), place, sign + content + _unit_after(text, place)))
    return found


def _unit_after(text: str, place: int) -> str:
    r"""Return the unit that stands right after a box or a formula, as in `\boxed{60}$ radians`; "" without one."""
    if DEGREES_AFTER.match(text, place):
        return r"^\circ"
    unit = UNIT_AFTER.match(text, place)
    return rf"\text{{ {unit[1]}}}" if unit and is_unit(unit[1]) else ""


def _marked(text: str, having: re.Pattern[str] = ANYTHING) -> str:
    """Return the value of the last explicit mark, other than a box, whose value matches `having`; "" for none."""
    for mark in sorted([*TAGGED.finditer(text), *MARK.finditer(text)], key=re.Match.start, reverse=True):
        value = _content(mark[1]) if mark.re is TAGGED else _value_after(text[mark.end() :][:LOOK_AHEAD])
        if having.search(value) and (mark.re is TAGGED or _says_something(value)):
            return value
    return ""


def _content(text: str) -> str:
    """Return the only formula of a text, else the text."""
    formulas = _formulas(text)
    is_only = len(formulas) == 1 and not _is_changed(formulas[0].start, formulas[0].end, text)
    return formulas[0].content if is_only else text


def _is_changed(start: int, end: int, text: str) -> bool:
    """Return True if the words around a value change it: "less than $7$", "-$7$", "$7$ dozen", "$7$ - $9$"."""
    before = CLAUSE.split(text[:start])[-1]
    return CHANGED_BEFORE.search(before) is not None or CHANGED_AFTER.match(text, end) is not None


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


def _phrased(text: str) -> str:
    """Return the value after the last phrase such as "the answer is" that one follows; "" without any."""
    for phrase in reversed(list(PHRASE.finditer(text))):
        value = _value_after(text[phrase.end() : phrase.end() + LOOK_AHEAD])
        is_number = re.search(r"[\d\\=]", value) is not None
        if is_number or (phrase["noun"].lower() == "answer" and _says_something(value)):
            return value
    return ""


def _says_something(value: str) -> bool:
    """Return True unless a text only says how good an answer is, as "exact and needs no rounding"."""
    return re.search(r"[\d\\]", value) is not None or not NO_VALUE.match(value)


def _value_after(text: str) -> str:
    """Return the value at the start of a text: its first formulas, else all to the end of the sentence."""
    filler = FILLERS.match(text)
    rest = text[filler.end() :] if filler else text
    formulas = _formulas(rest)
    if formulas and formulas[0].start == 0:
        return _first_of(formulas, rest)
    sentence = SENTENCE_END.split(rest, maxsplit=1)[0]
    formulas = _formulas(sentence)
    if formulas and not CHOICE.match(sentence):
        return _first_of(formulas, sentence)
    return BOLD_MARK.sub("", sentence).strip(" *`_\"'")


def _first_of(formulas: Sequence[FoundAnswer], text: str) -> str:
    """Return the first formula and formulas right after it; the sentence if "or" or a change follows."""
    together = [formulas[0]]
    for after in formulas[1:]:
        if not BETWEEN.fullmatch(text, together[-1].end, after.start):
            break
        together.append(after)
    last = together[-1].end
    if ALTERNATIVE.match(text, last) or _is_changed(together[0].start, last, text):
        return BOLD_MARK.sub("", SENTENCE_END.split(text, maxsplit=1)[0])
    return _together(together, text) + _unit_after(text, last)


def _last_of(text: str) -> str:
    """Return the last formula of the last paragraph, else what its last sentence states.

    That is an equation, the only bold text, or the only number.
    """
    paragraphs = [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
    if not paragraphs:
        return ""
    lines = [line for line in paragraphs[-1].splitlines() if re.search(r"\w", line)]
    sentence = re.split(r"\.\s+", lines[-1].strip(" .`"))[-1] if lines else ""
    bold, formulas = list(BOLD.finditer(sentence)), _formulas(paragraphs[-1])
    is_hedged = HEDGE.search(sentence) is not None
    if len(bold) == 1 and not is_hedged and len(bold[0][1]) < len(sentence) - 4:
        return "" if _is_changed(*bold[0].span(), sentence) else bold[0][1]
    if formulas:
        last = _neighbours(formulas, paragraphs[-1])
        is_changed = _is_changed(last[0].start, last[-1].end, paragraphs[-1])
        return "" if is_changed else _together(last, paragraphs[-1])
    if is_hedged:
        return ""
    sentence = sentence.strip(" .*`")
    assigned = ASSIGNED.search(sentence)
    if assigned is not None:
        return assigned[0]
    numbers = list(NUMBER.finditer(sentence))
    says_so = STATES.search(sentence) or NUMBER.fullmatch(sentence)
    is_stated = len(numbers) == 1 and says_so and not _is_changed(*numbers[0].span(), sentence)
    return numbers[0][0] if is_stated else ""
