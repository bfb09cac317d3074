"""The words of tiny_code: operations on a number `x`, a string `s` and a list of numbers `a`.

Each has a phrase for prompts, a line of Python that does it, two lines that a careless programmer writes instead,
and a reference that computes its result in another way, so that no test is made by the code that it judges. `{}`
is the place of a constant.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from heapq import nlargest, nsmallest
from itertools import islice
from typing import TypeAlias

Value: TypeAlias = int | str | list[int]
Constant: TypeAlias = int | str

DIGITS: tuple[int, ...] = tuple(range(1, 10))
FACTORS = DIGITS[1:]
COUNTS = DIGITS[:4]  # of letters and items: arguments are short
LETTERS = tuple("bdekt")
NONE = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A behaviour, e.g. `phrase="first {}"`, `code="s[:{}]"`, `slips=("s[{}:]",)`, from `s` to `s`."""

    takes: str  # variable of its argument: x, s or a
    gives: str  # and of its result
    phrase: str
    code: str
    slips: tuple[str, ...]  # the likeliest first; each fails where the code passes
    reference: Callable[..., Value]  # of the argument, and of the constant where there is one
    constants: Sequence[Constant]  # to draw from, empty where it has none

    @property
    def name(self) -> str:
        """`s: first {}`; phrases alone are shared between strings and lists."""
        return f"{self.takes}: {self.phrase}"


def digits(x: int) -> list[int]:
    """Decimal digits, the first first: `digits(-120)` is [1, 2, 0]."""
    x, found = abs(x), list[int]()
    while x or not found:
        x, digit = divmod(x, 10)
        found.insert(0, digit)
    return found


def joined(parts: Sequence[object], separator: str) -> str:
    """The parts with the separator between them."""
    text = ""
    for index, part in enumerate(parts):
        text += (separator if index else "") + str(part)
    return text


def without(s: str, letter: str) -> str:
    """The string without any such letter."""
    return "".join(filter(letter.__ne__, s))


def halves(items: Sequence[int], n: int) -> list[int]:
    """The items with the first n moved to the end."""
    cut = min(n, len(items))
    return [items[(i + cut) % len(items)] for i in range(len(items))]


Row: TypeAlias = tuple[str, str, tuple[str, ...], Callable[..., Value], Sequence[Constant]]
TABLE: dict[str, tuple[Row, ...]] = {  # by what they take and give
    "xx": (
        ("add {}", "x+{}", ("x-{}", "x+{}-1"), operator.add, DIGITS),
        ("subtract {}", "x-{}", ("{}-x", "x-{}+1"), operator.sub, DIGITS),
        ("multiply by {}", "x*{}", ("x**{}", "x+{}"), lambda x, n: sum([x] * n), FACTORS),
        ("divide by {}", "x//{}", ("x/{}", "x%{}"), lambda x, n: math.floor(x / n), FACTORS),
        ("remainder by {}", "x%{}", ("x//{}", "x-{}"), lambda x, n: x - n * math.floor(x / n), FACTORS),
        ("square", "x*x", ("x*2", "x^2"), lambda x: abs(x) ** 2, NONE),
        ("negate", "-x", ("~x", "not x"), lambda x: 0 - x, NONE),
        ("absolute value", "abs(x)", ("-x", "x.abs()"), lambda x: max(x, -x), NONE),
        ("at least {}", "max(x,{})", ("min(x,{})", "x>={}"), lambda x, n: n if x < n else x, DIGITS),
        ("at most {}", "min(x,{})", ("max(x,{})", "x<={}"), lambda x, n: n if x > n else x, DIGITS),
    ),
    "xs": (("as text", "str(x)", ("x", "'x'"), lambda x: f"{x:d}", NONE),),
    "xa": (("digits", "[int(c) for c in str(abs(x))]", ("list(str(x))", "[c for c in str(x)]"), digits, NONE),),
    "ss": (
        ("reverse", "s[::-1]", ("s.reverse()", "s[-1]"), lambda s: "".join(reversed(s)), NONE),
        ("first {}", "s[:{}]", ("s[{}:]", "s[{}]"), lambda s, n: "".join(islice(s, n)), COUNTS),
        ("drop {}", "s[{}:]", ("s[:{}]", "s[:-{}]"), lambda s, n: "".join(islice(s, n, None)), COUNTS),
        ("last {}", "s[-{}:]", ("s[:-{}]", "s[-{}]"), lambda s, n: s[max(0, len(s) - n) :], COUNTS),
        ("upper case", "s.upper()", ("s.title()", "upper(s)"), lambda s: "".join(map(str.upper, s)), NONE),
        ("lower case", "s.lower()", ("s.swapcase()", "lower(s)"), lambda s: "".join(map(str.lower, s)), NONE),
        ("repeat {} times", "s*{}", ("s+{}", "s**{}"), lambda s, n: "".join([s] * n), FACTORS[:3]),
        ("append {}", "s+'{}'", ("'{}'+s", "s.append('{}')"), lambda s, c: f"{s}{c}", LETTERS),
        ("prepend {}", "'{}'+s", ("s+'{}'", "s.insert('{}')"), lambda s, c: f"{c}{s}", LETTERS),
        ("remove {}", "s.replace('{}','')", ("s.strip('{}')", "s.remove('{}')"), without, LETTERS),
        ("sort", "''.join(sorted(s))", ("sorted(s)", "s.sort()"), lambda s: "".join(nsmallest(len(s), s)), NONE),
        ("every second", "s[::2]", ("s[1::2]", "s[2:]"), lambda s: "".join(islice(s, 0, None, 2)), NONE),
        ("join with dash", "'-'.join(s)", ("s.join('-')", "s+'-'"), lambda s: joined(s, "-"), NONE),
    ),
    "sx": (
        ("length", "len(s)", ("len(s)-1", "s.len()"), lambda s: sum(1 for _ in s), NONE),
        ("count {}", "s.count('{}')", ("s.find('{}')", "'{}' in s"), lambda s, c: Counter(s)[c], LETTERS),
    ),
    "sa": (("codes", "[ord(c) for c in s]", ("list(s)", "ord(s)"), lambda s: list(s.encode("ascii")), NONE),),
    "aa": (
        ("reverse", "a[::-1]", ("a.reverse()", "a[-1]"), lambda a: list(reversed(a)), NONE),
        ("first {}", "a[:{}]", ("a[{}:]", "a[{}]"), lambda a, n: list(islice(a, n)), COUNTS),
        ("drop {}", "a[{}:]", ("a[:{}]", "a[:-{}]"), lambda a, n: list(islice(a, n, None)), COUNTS),
        ("last {}", "a[-{}:]", ("a[:-{}]", "a[-{}]"), lambda a, n: a[max(0, len(a) - n) :], COUNTS),
        ("sort", "sorted(a)", ("a.sort()", "sort(a)"), lambda a: nsmallest(len(a), a), NONE),
        (
            "sort down",
            "sorted(a)[::-1]",
            ("sorted(a)", "a.sort()[::-1]"),
            lambda a: nlargest(len(a), a),
            NONE,
        ),
        ("distinct", "sorted(set(a))", ("set(a)", "list(a)"), lambda a: sorted(Counter(a)), NONE),
        ("every second", "a[::2]", ("a[1::2]", "a[2:]"), lambda a: list(islice(a, 0, None, 2)), NONE),
        (
            "keep even",
            "[v for v in a if v%2==0]",
            ("[v for v in a if v%2]", "[v for v in a if v//2]"),
            lambda a: [v for v in a if not v & 1],
            NONE,
        ),
        (
            "keep odd",
            "[v for v in a if v%2]",
            ("[v for v in a if v%2==0]", "[v for v in a if v//2]"),
            lambda a: [v for v in a if v & 1],
            NONE,
        ),
        (
            "keep above {}",
            "[v for v in a if v>{}]",
            ("[v for v in a if v>={}]", "a>{}"),
            lambda a, n: list(filter(n.__lt__, a)),
            DIGITS,
        ),
        (
            "keep below {}",
            "[v for v in a if v<{}]",
            ("[v for v in a if v<={}]", "a<{}"),
            lambda a, n: list(filter(n.__gt__, a)),
            DIGITS,
        ),
        (
            "add {} to each",
            "[v+{} for v in a]",
            ("a+[{}]", "a+{}"),
            lambda a, n: list(map(n.__add__, a)),
            DIGITS,
        ),
        (
            "multiply each by {}",
            "[v*{} for v in a]",
            ("a*{}", "[v**{} for v in a]"),
            lambda a, n: list(map(n.__mul__, a)),
            FACTORS,
        ),
        ("append {}", "a+[{}]", ("a.append({})", "a+{}"), lambda a, n: [*a, n], DIGITS),
        ("rotate by {}", "a[{}:]+a[:{}]", ("a[:{}]+a[{}:]", "a[{}:]"), halves, COUNTS),
    ),
    "ax": (
        ("sum", "sum(a)", ("a.sum()", "len(a)"), lambda a: reduce(operator.add, a, 0), NONE),
        ("length", "len(a)", ("len(a)-1", "a.len()"), lambda a: sum(1 for _ in a), NONE),
        ("largest or 0", "max(a,default=0)", ("max(a)", "max(a,0)"), lambda a: sorted(a)[-1] if a else 0, NONE),
        ("smallest or 0", "min(a,default=0)", ("min(a)", "min(a,0)"), lambda a: sorted(a)[0] if a else 0, NONE),
        ("count {}", "a.count({})", ("a.index({})", "{} in a"), lambda a, n: Counter(a)[n], DIGITS),
    ),
    "as": (
        (
            "join with dash",
            "'-'.join(str(v) for v in a)",
            ("'-'.join(a)", "str(a)"),
            lambda a: joined(a, "-"),
            NONE,
        ),
    ),
}
OPERATIONS = tuple(
    Operation(
        takes=way[0],
        gives=way[1],
        phrase=phrase,
        code=code,
        slips=slips,
        reference=reference,
        constants=constants,
    )
    for way, rows in TABLE.items()
    for phrase, code, slips, reference, constants in rows
)
