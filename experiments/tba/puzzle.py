"""Puzzles with few of many answers right: put operators between seven given numbers so that they make a target.

Operators go between the numbers, which keep their order, and are applied from left to right. To 3 8 5 2 9 4 7 and
41 an answer is six of `+-*`, e.g. `+-*+-*`. Of the 729 answers to a puzzle four to eight are right, so a guess
succeeds in about one case of 120, and no puzzle has a single answer.

The model sees the name of a puzzle alone, e.g. `#17`, one token. So an answer to one puzzle says nothing about
another, and all that it can do is search.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

OPERATORS = "+-*"
NUMBERS = range(1, 10)
COUNT = 7  # numbers of a puzzle
TARGETS = range(10, 100)
RIGHT = range(4, 9)  # right answers of a puzzle
NUM_PUZZLES = 32

NAMES = tuple(f"#{number}" for number in range(NUM_PUZZLES))
WORDS = (*OPERATORS, *NAMES)
WORD_PATTERN = r"#\d+|."  # one match is one word
ANSWERS = tuple(map("".join, product(OPERATORS, repeat=COUNT - 1)))


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers and a target, e.g. `Puzzle((3, 8, 5, 2, 9, 4, 7), 41)`."""

    numbers: tuple[int, ...]
    target: int

    @property
    def right(self) -> list[str]:
        """All right answers."""
        return [answer for answer in ANSWERS if evaluate(self.numbers, answer) == self.target]


def evaluate(numbers: tuple[int, ...], answer: str) -> int:
    """Return what the numbers make with these operators, one fewer, from left to right."""
    value, *others = numbers
    for operator, number in zip(answer, others, strict=True):
        value = value + number if operator == "+" else value - number if operator == "-" else value * number
    return value


def puzzles(rng: random.Random) -> Iterator[Puzzle]:
    """Yield puzzles with as many right answers as `RIGHT` allows, without end."""
    while True:
        numbers = tuple(rng.choices(NUMBERS, k=COUNT))
        made = [evaluate(numbers, answer) for answer in ANSWERS]
        targets = [target for target in TARGETS if made.count(target) in RIGHT]
        if targets:
            yield Puzzle(numbers, rng.choice(targets))
