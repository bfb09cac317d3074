"""Sums and products that a tiny model cannot do in its head, and how it may ask a calculator.

prompt           37*48+5=
a turn           <calculator>37*48+5</calculator>
the environment  <result>1781</result>
a turn           #1781
"""

import random
from dataclasses import dataclass

TAGS = ("<calculator>", "</calculator>", "<result>", "</result>")
WORDS = (*"0123456789", *"+*=#", *TAGS)
WORD_PATTERN = r"</?[a-z]+>|."
EASY = 0.2  # share of problems with two single digits, which can be learned by heart


@dataclass(frozen=True)
class Problem:
    """An expression, e.g. `Problem("37*48+5", 1781)`."""

    expression: str
    value: int

    @property
    def prompt(self) -> str:
        """`37*48+5=`"""
        return f"{self.expression}="

    @property
    def call(self) -> str:
        """The turn that asks the calculator."""
        return f"<calculator>{self.expression}</calculator>"

    @property
    def answered(self) -> str:
        """All that precedes the last turn where the calculator was asked."""
        return f"{self.prompt}{self.call}<eos><result>{self.value}</result>"

    @property
    def answer(self) -> str:
        """The turn that ends with the right answer."""
        return f"#{self.value}"

    def guess(self, rng: random.Random) -> str:
        """Guess: the right answer where it is easy, else a number of about that size."""
        if self.value < 20 and rng.random() < 0.7:
            return self.answer
        return f"#{rng.randrange(max(1, self.value // 2), 2 * self.value + 2)}"


def draw_problem(rng: random.Random) -> Problem:
    """A random problem."""
    if rng.random() < EASY:
        a, b = rng.randrange(10), rng.randrange(10)
        return Problem(f"{a}+{b}", a + b)
    a, b, c = (rng.randrange(11, 100) for _ in range(3))
    kind = rng.randrange(3)
    if kind == 0:
        return Problem(f"{a}*{b}", a * b)
    if kind == 1:
        return Problem(f"{a}*{b}+{c}", a * b + c)
    return Problem(f"{a}+{b}*{c}", a + b * c)
