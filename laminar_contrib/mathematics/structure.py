"""Answers read from tokens: what kind of answer they are, by the signs that stand outside of all brackets.

Pure; `verify` hands in the text. A text is read whole or refused, never in part.
"""

from collections.abc import Callable

from laminar_contrib.mathematics import words
from laminar_contrib.mathematics.answers import (
    AnswerValue,
    BasedNumber,
    Bracketed,
    Collection,
    Grid,
    Lettered,
    Listing,
    Phrase,
    Proportion,
    Quantity,
    Region,
    as_region,
    bare,
    everything,
    intersection,
    union,
    without_points,
)
from laminar_contrib.mathematics.expressions import (
    SEPARATORS,
    Applied,
    Expression,
    Token,
    TokenKind,
    Tokens,
    UnreadableError,
    has_outside,
    is_enclosed,
    parse_expression,
    split,
    split_at,
)
from laminar_contrib.mathematics.relations import RELATIONS, read_quantity, read_relation
from laminar_contrib.mathematics.words import look_up

NAME, WORD, NUMBER = TokenKind.NAME, TokenKind.WORD, TokenKind.NUMBER
NOTHING = Phrase("no solution")
PREFIXES = words.word_set("is are equals be answer option choice either approximately about exactly roughly")
BASES = {word: str(number) for word, number in words.NUMBERS.items() if number > 1}
CHOICE_SIGNS = ("(", "[", "{", "set{", "|", "-", "$", "frac", "sqrt", "pi", "infty", "emptyset")  # after "(B)"


def read(tokens: Tokens) -> AnswerValue:
    """Read all tokens as one answer. Raises `UnreadableError`."""
    while tokens and tokens[-1].is_sign("."):
        tokens = tokens[:-1]
    tokens = _without_prefix(_without_commas(tokens))
    lettered = _read_lettered(tokens)
    if lettered is not None:
        return lettered
    phrase = _read_phrase(tokens)
    if phrase is not None:
        return phrase
    parts, joints = split_at(tokens, *SEPARATORS)
    parts = [part for part in parts if part] if set(joints) == {","} else parts
    parts, parameters = _without_parameters(parts)
    items = [item for part in parts for item in _read_with_signs(_renamed(part, parameters))]
    if len(items) == 1:
        return items[0]
    if items and all(isinstance(item, Region) for item in items):
        return _joined([as_region(item) for item in items], set(joints))
    return Listing(tuple(items))


def _without_commas(tokens: Tokens) -> list[Token]:
    """Drop commas before "and" and "or"."""
    return [
        token
        for index, token in enumerate(tokens)
        if not (token.is_sign(",") and any(after.is_sign("and", "or") for after in tokens[index + 1 : index + 2]))
    ]


def _without_prefix(tokens: list[Token]) -> list[Token]:
    """Drop leading words such as "The answer is", "Area:", "Option" or "about"."""
    place = 0
    while place < len(tokens) and tokens[place].kind is WORD:
        place += 1
    said = [token.text.lower() for token in tokens[:place]]
    rest = tokens[place:]
    if not said or set(said) & words.NEGATIONS:
        return tokens
    if not rest:
        verbs = [index for index, word in enumerate(said[:-1]) if word in ("is", "are")]
        return tokens[verbs[-1] + 1 :] if verbs else tokens
    if rest[0].is_sign(":") and len(rest) > 1:
        return rest[1:]
    return rest if said[-1] in PREFIXES else tokens


def _read_lettered(tokens: Tokens) -> Lettered | None:
    """Read the letter of a choice and its content, such as "(B) 12" or "B. 12"; None for any other answer."""
    texts = [token.text for token in tokens[:4]]
    begin = 1 if texts[:1] == ["("] else 0
    if len(texts) < begin + 3 or texts[begin] not in set("ABCDEFGHIJ"):
        return None
    ends = (")",) if begin else (")", ".", ":")
    rest = tokens[begin + 2 :]
    is_value = rest[0].kind not in (TokenKind.SIGN, TokenKind.COMMAND) or rest[0].is_sign(*CHOICE_SIGNS)
    if not tokens[begin + 1].is_sign(*ends) or not is_value:
        return None
    if any(_is_choice(rest, place) for place in range(len(rest))):
        raise UnreadableError("several choices")
    try:
        return Lettered(texts[begin], read(rest))
    except UnreadableError:
        return Lettered(texts[begin], None)


def _is_choice(tokens: Tokens, place: int) -> bool:
    """Return True for "(B)" at a place, unless a name before it makes it an argument, as in "P(B)"."""
    texts = [token.text for token in tokens[place : place + 3]]
    is_letter = len(texts) == 3 and (texts[0], texts[2]) == ("(", ")") and texts[1] in set("ABCDEFGHIJ")
    return is_letter and not (place and tokens[place - 1].kind is NAME)


def _read_phrase(tokens: Tokens) -> AnswerValue | None:
    """Read an answer in words; None for any other answer, and for a number in words."""
    spoken = [token.text.lower() for token in tokens if not token.is_sign(",", "{", "}")]
    if any(word in words.MONTHS for word in spoken) and any(word.isdecimal() for word in spoken):
        return Phrase(" ".join(sorted(set(spoken) - {"of", "the"})))
    is_text = any(token.kind is WORD for token in tokens) and all(
        token.kind in (WORD, NAME, NUMBER) or token.is_sign("-", "'", ".", "{", "}") for token in tokens
    )
    if not is_text or tokens[0].kind not in (WORD, NAME):
        return None
    said = [token.text for token in tokens if token.kind in (WORD, NAME, NUMBER)]
    has_number = any(token.kind is NUMBER for token in tokens)
    if said[0].lower() in words.NUMBERS or (has_number and (tokens[0].kind is NAME or look_up(said[0]))):
        return None
    if said[0].lower() in ("option", "choice"):
        said = said[1:] or said
    if len(said) == 1 and len(said[0]) == 1:
        return Phrase(said[0])
    lowered = " ".join(said).lower()
    if lowered in words.ALL_NUMBERS:
        return union([everything()])
    for article in ("the ", "a ", "an "):
        lowered = lowered.removeprefix(article)
    return NOTHING if lowered in words.NO_ANSWER else Phrase(lowered)


def _without_parameters(parts: list[list[Token]]) -> tuple[list[list[Token]], dict[str, str]]:
    r"""Split off parts that declare a parameter, such as `k \in \mathbb{Z}`; return the rest and the new names."""
    kept, names = [], dict[str, str]()
    for part in parts:
        is_declared = len(part) == 3 and part[0].kind is NAME and part[1].is_sign("in")
        if is_declared and part[2].kind is TokenKind.FIELD and len(parts) > 1:
            if part[2].text != "R":
                names[part[0].text] = f"parameter {len(names)} in {part[2].text}"
        else:
            kept.append(part)
    return kept, names


def _renamed(part: list[Token], parameters: dict[str, str]) -> list[Token]:
    return [
        Token(NAME, parameters.get(token.text, token.text), token.spaced) if token.kind is NAME else token
        for token in part
    ]


def _read_with_signs(tokens: list[Token]) -> list[AnswerValue]:
    """Read the answers of a part: two if it has a sign such as "plus or minus"."""
    in_set = any(token.is_sign("set{") for token in tokens)  # its items are read one by one
    if in_set or not any(token.is_sign("pm", "mp") for token in tokens):
        return [_read_item(tokens)]
    items = []
    for pair in (("+", "-"), ("-", "+")):
        signs = dict(zip(("pm", "mp"), pair, strict=True))
        items.append(_read_item([_signed(token, signs) for token in tokens]))
    return items


def _signed(token: Token, signs: dict[str, str]) -> Token:
    return Token(TokenKind.SIGN, signs[token.text], token.spaced) if token.is_sign("pm", "mp") else token


def _joined(regions: list[Region], joints: set[str]) -> Region:
    """Join the regions of several conditions on one variable: "and" intersects them, "or" unites them.

    A comma means "and" if the intersection is not empty, else "or". Raises `UnreadableError` for conditions on
    several variables, for "and" between conditions that exclude each other, and for "and" mixed with "or".
    """
    name = regions[0].name
    if any(region.name != name for region in regions):
        raise UnreadableError("conditions on several variables")
    both = regions[0].intervals
    for region in regions[1:]:
        both = tuple(intersection(both, region.intervals))
    if "or" not in joints and both:
        return union(both, name)
    if "and" in joints:
        raise UnreadableError("conditions that exclude each other")
    return union([interval for region in regions for interval in region.intervals], name)


def _read_item(tokens: Tokens) -> AnswerValue:
    """Read an answer without a comma outside of brackets."""
    if not tokens:
        raise UnreadableError("nothing between two commas")
    phrase = _read_phrase(tokens)
    if phrase is not None:
        return phrase
    if len(tokens) == 1 and tokens[0].is_sign("emptyset"):
        return NOTHING
    if len(tokens) == 1 and tokens[0].kind is TokenKind.FIELD:
        return union([everything()]) if tokens[0].text == "R" else Phrase(f"set {tokens[0].text}")
    if has_outside(tokens, *RELATIONS):
        return read_relation(tokens, _read_item)
    if has_outside(tokens, "cup", "setminus") or (tokens[0].kind is TokenKind.FIELD and tokens[1].is_sign("-")):
        return _read_union(tokens)
    if has_grid(tokens):
        rows = read_rows(tokens)
        return Listing(tuple(map(_read_item, rows))) if rows else read_grid(tokens, _read_item)
    if has_outside(tokens, ":"):
        return _read_proportion(tokens)
    point = _point(tokens)
    if point:
        return _read_enclosed(point)
    based = _read_based(tokens)
    if based is not None:
        return based
    return _read_enclosed(tokens) if is_enclosed(tokens) else read_quantity(tokens)


def _read_union(tokens: Tokens) -> AnswerValue:
    """Read a union of sets, or a set without some points."""
    if not has_outside(tokens, "cup"):
        whole, *taken = split(tokens, lambda token: token.is_sign("setminus", "-"))[0]
        points = [_read_item(part) for part in taken]
        if not all(isinstance(part, Collection) for part in points):
            raise UnreadableError("a set minus something other than a list of points")
        numbers = [bare(item) for part in points if isinstance(part, Collection) for item in part.items]
        return union(without_points(as_region(_read_item(whole)).intervals, numbers))
    parts, _ = split_at(tokens, "cup")
    regions = [as_region(_read_item(part)) for part in parts]
    return union([interval for region in regions for interval in region.intervals])


def _read_proportion(tokens: Tokens) -> Proportion | Phrase:
    """Read a ratio or a time of day."""
    parts, _ = split_at(tokens, ":")
    raw = "".join(token.text for token in tokens if not token.is_sign(".")).lower()
    if raw.endswith(("am", "pm")) or (parts[-1][:1] and parts[-1][0].text.startswith("0")):
        return Phrase(raw)
    expressions = [parse_expression(part) for part in parts]
    if any(rest for _, rest in expressions):
        raise UnreadableError("words in a ratio")
    return Proportion(tuple(expression for expression, _ in expressions))


def _read_based(tokens: Tokens) -> BasedNumber | None:
    """Read a number with its base as a subscript or in words: "1011_2", "1A_{16}", "1011 base 2"."""
    places = [index for index, token in enumerate(tokens) if token.is_sign("_") or token.text == "base"]
    if not places:
        return None
    digits = "".join(token.text for token in tokens[: places[0]] if not token.is_sign("(", ")", "{", "}"))
    tail = [token.text for token in tokens[places[0] :] if not token.is_sign("_", "{", "}", "(", ")")]
    base = " ".join(tail).lower().removeprefix("base").strip()
    base = BASES.get(base, base)
    if not (base.isdecimal() and digits[:1].isdigit() and digits.isalnum() and 2 <= int(base) <= 36):
        return None
    return BasedNumber(digits.lstrip("0").upper() or "0", base)


def _point(tokens: Tokens) -> Tokens:
    """Return the tokens of a point or vector without its name or transposition; no tokens for any other answer."""
    if tokens[0].kind is NAME and tokens[0].text.isupper():
        tokens = tokens[1:]
    begin = max((place for place, token in enumerate(tokens) if token.is_sign("^")), default=len(tokens))
    ending = [token.text for token in tokens[begin:] if not token.is_sign("{", "}")]
    inner = tokens[:begin] if ending in ([], ["^", "T"], ["^", "top"]) else []
    is_ordered = is_enclosed(inner) and inner[0].is_sign("(", "[") and has_outside(inner[1:-1], ",")
    return inner if is_ordered else []


def _read_enclosed(tokens: Tokens) -> AnswerValue:
    """Read an answer in brackets: a set, an ordered list, or just a group."""
    opening, inner, closing = tokens[0].text, tokens[1:-1], tokens[-1].text
    if opening == "set{":
        return _read_set(inner) if closing == "set}" else _refuse(closing)
    parts, _ = split_at(inner, *SEPARATORS)
    if len(parts) == 1:
        groups = (("(", ")"), ("{", "}"), ("[", "]"))
        if (opening, closing) not in groups:
            return read_quantity(tokens)
        return read(inner) if inner else _refuse("empty")  # brackets without a meaning
    items = tuple(item for part in parts for item in _read_with_signs(part))
    if opening == "{" and closing == "}":
        return Collection(items)
    if opening == "langle" and closing == "rangle":
        return Bracketed("(", ")", items)
    if opening in ("(", "[") and closing in (")", "]"):
        return Bracketed(opening, closing, items)
    return _refuse(closing)


def _refuse(text: str) -> AnswerValue:
    raise UnreadableError(f"brackets with {text!r}")


def _read_set(inner: Tokens) -> AnswerValue:
    """Read a set in braces: its items, or a condition after a bar."""
    if not inner:
        return NOTHING
    parts, bars = split_at(inner, "|", ":")
    if len(bars) == 1 and parts[0] and parts[0][0].kind is NAME and len(parts[0]) in (1, 3):
        condition = read(parts[1])
        return condition if isinstance(condition, Region) else _refuse("a condition")
    items, _ = split_at(inner, *SEPARATORS)
    members = tuple(item for part in items for item in _read_with_signs(part))
    return _refuse("nothing") if NOTHING in members else Collection(members)


SYSTEMS = ("cases", "aligned", "align", "gathered", "split")
MATRICES = ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array")
FENCES = (("(", ")"), ("[", "]"))


def has_grid(tokens: Tokens) -> bool:
    """Return True if a matrix begins somewhere in the tokens."""
    return any(token.text.startswith("begin ") for token in tokens)


def read_grid(tokens: Tokens, read: Callable[[Tokens], AnswerValue]) -> Grid:
    """Read all tokens as a matrix; `read` reads a cell. Raises `UnreadableError`."""
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
    """Return the rows of an equation system; no rows for other tokens."""
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
