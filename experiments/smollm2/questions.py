r"""Arithmetic in plain words: a sum, a difference or a product of small numbers, asked for in several ways.

    What is 8 less than 17?        17 - 8 = 9

A conversation shows the form of an answer once, before the question: a model learns arithmetic, not the form.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

WORDINGS = {
    "sum": (
        "What is {x} plus {y}?",
        "What is the sum of {x} and {y}?",
        "Add {y} to {x}.",
        "What is {y} more than {x}?",
    ),
    "difference": (
        "What is {x} minus {y}?",
        "What is the difference of {x} and {y}?",
        "Subtract {y} from {x}.",
        "What is {y} less than {x}?",
    ),
    "product": (
        "What is {x} times {y}?",
        "Multiply {x} by {y}.",
        "What is the product of {x} and {y}?",
    ),
}
KINDS = ("sum", "difference", "difference", "product")  # as often as they are drawn
SHOWN = (
    {"role": "system", "content": ""},  # else the template writes a longer one of its own
    {"role": "user", "content": "What is 2 plus 1?"},
    {"role": "assistant", "content": "2 + 1 = 3"},
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question of a kind, e.g. `Question("difference", (17, 8), "What is 8 less than 17?", 9)`."""

    kind: str
    operands: tuple[int, int]
    text: str
    answer: int

    @property
    def family(self) -> str:
        """Fact behind the question, e.g. `8+9` for 8 + 9, 9 + 8, 17 - 8 and 17 - 9, in any words."""
        x, y = self.operands
        parts = (y, self.answer) if self.kind == "difference" else (x, y)
        return f"{min(parts)}{'*' if self.kind == 'product' else '+'}{max(parts)}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation that it ends."""
        return [*SHOWN, {"role": "user", "content": self.text}]


def draw_questions(rng: random.Random) -> Iterator[Question]:
    """Questions without end: the second number is of 2 to 9, the first up to 29, 18 or 9 by the kind.

    A difference is at least 1.
    """
    while True:
        kind = rng.choice(KINDS)
        wording, y = rng.choice(WORDINGS[kind]), rng.randint(2, 9)
        if kind == "sum":
            x = rng.randint(2, 29)
            answer = x + y
        elif kind == "difference":
            x = rng.randint(y + 1, 18)
            answer = x - y
        else:
            x = rng.randint(2, 9)
            answer = x * y
        yield Question(kind, (x, y), wording.format(x=x, y=y), answer)
