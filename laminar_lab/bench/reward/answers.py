r"""Answers to problems of mathematics with their verdicts, and some that no verifier is done with in time.

`mathematics` verifies them. Invariant: no two answers of a list are the same text.
"""

import msgspec


class GivenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    r"""A final answer, e.g. `GivenAnswer(text=r"\frac{2}{8}", reference=r"\frac{1}{4}", right=True)`."""

    text: str
    reference: str
    right: bool | None  # None: nobody finds out in time


def make_answers(number: int, *, hang_one_in: int) -> list[GivenAnswer]:
    """So many different ones; the last of every `hang_one_in` hangs."""
    return [
        _hanging(seed)
        if (seed + 1) % hang_one_in == 0
        else _usual(seed // len(KINDS) + 2, KINDS[seed % len(KINDS)])
        for seed in range(number)
    ]


def _usual(seed: int, kind: tuple[str, str, bool]) -> GivenAnswer:
    text, reference, right = kind
    numbers = {"a": seed, "b": seed + 1, "c": 2 * seed, "d": 6 * seed + 2, "e": 3 * seed + 1, "f": 9 * seed**2 + 9}
    numbers |= {
        "g": seed**2 + 1,
        "h": seed * (seed + 1),
        "m": 1000 * seed,
        "p": 12 * seed,
        "q": 18 * seed,
        "r": 6 * seed,
    }
    for name, value in numbers.items():
        text, reference = (side.replace(f"<{name}>", str(value)) for side in (text, reference))
    return GivenAnswer(text=text, reference=reference, right=right)


def _hanging(seed: int) -> GivenAnswer:
    """Answer of which the library writes out a number of 370 million digits first."""
    return GivenAnswer(text=rf"\gcd(9^{{9^9}}, {seed})", reference="7", right=None)


KINDS = (
    (r"\frac{<c>}{<d>}", r"\frac{<a>}{<e>}", True),
    (r"\frac{<a>}{<d>}", r"\frac{<a>}{<e>}", False),
    (r"\sqrt{<f>}", r"3\sqrt{<g>}", True),
    (r"(x+<a>)(x-<b>)", r"x^2-x-<h>", True),
    (r"x^2 - <a>x + 1", r"x^2 + <a>x + 1", False),
    (r"\{<b>, <a>, 0\}", r"\{0, <a>, <b>\}", True),
    (r"x \le <a>", r"(-\infty, <a>]", True),
    (r"[<a>, \infty)", r"(<a>, \infty)", False),
    (r"<a>.5", r"<a>\frac{1}{2}", True),
    (r"\begin{pmatrix}<a> & 1\\0 & <b>\end{pmatrix}", r"\begin{pmatrix}<a> & 1\\0 & <c>\end{pmatrix}", False),
    (r"<a>\text{ km}", r"<m>\text{ m}", True),
    (r"<a>\%", r"\frac{<a>}{100}", True),
    (r"<a>+<b>i", r"<b>i+<a>", True),
    (r"\sin(<a>)\cos(<a>)", r"\frac{1}{2}\sin(<c>)", True),
    (r"<c>\text{ apples}", r"<a>", False),
    (r"\gcd(<p>, <q>)", r"<r>", True),
)
