"""Countdown to 24: put operators between given numbers so that they make 24, and write down the whole search.

Operators go between the numbers of the prompt, which keep their order, and are applied from left to right; no
result may leave 0 to 30. The right response tries them all, one trial after the other, with every intermediate
result, until one makes 24. To `7 3 4 1?` it is

    7+3=10+4=14+1=15;7-3=4+4=8+1=9;7*3=21+4=25+1=26;
    7+3=10-4=6+1=7;7-3=4-4=0+1=1;7*3=21-4=17+1=18;
    7+3=10*4=x+1=x;7-3=4*4=16+1=17;7*3=21*4=x+1=x;
    7+3=10+4=14-1=13;7-3=4+4=8-1=7;7*3=21+4=25-1=24!

but in one line. Operators change in the order `+-*`: the first one with every trial, the second with every
third, the third with every ninth; `x` is a result out of bounds. The trial that makes 24 ends with `!`.
`reward.py` evaluates the expression of the trial that a response ends on and nothing else.

Right demonstrations have nine trials at most, so none ever changes a third operator. Longer demonstrations are
careless, and wrong without exception: mostly they forget to change the third operator, never do they change it
twice, and so they go round in circles, until they tire and end on a trial that does not make 24. `make_data.py`
draws the data from here.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

OPERATORS = "+-*"
TARGET = 24
MOST = 30  # largest result; the least is 0
NUMBERS = range(1, 11)
COUNTS = (3, 4)  # numbers of a problem
DEMONSTRATED = 9  # trials of a right demonstration, at most
PATIENCE = 30  # trials of a careless one, at most; more than any problem needs
CHANGES = 0.35  # share of moments in which a careless one first changes the third operator, as it should

WORDS = (
    *" ?;!",
    *map(str, NUMBERS),
    *(f"{operator}{number}" for operator in OPERATORS for number in NUMBERS),
    *(f"={result}" for result in (*range(MOST + 1), "x")),
)
WORD_PATTERN = r"[+*-]\d+|=\d+|=x|\d+|."  # one match is one word


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers that can make 24, e.g. `Problem((7, 3, 2, 1))`."""

    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """`7 3 2 1?`"""
        return f"{' '.join(map(str, self.numbers))}?"

    @property
    def num_possible(self) -> int:
        """Different trials."""
        return int(len(OPERATORS) ** (len(self.numbers) - 1))

    @property
    def num_trials(self) -> int:
        """Trials until the first that makes 24; 0 where none does."""
        return next((trial + 1 for trial in range(self.num_possible) if self.results(trial)[-1] == TARGET), 0)

    @property
    def level(self) -> int:
        """1 where the third operator need not change, else 1 more for each of its changes."""
        return -(-self.num_trials // DEMONSTRATED)

    @property
    def search(self) -> str:
        """The right response."""
        return self.write(range(self.num_trials))

    def careless_search(self, rng: random.Random) -> str:
        """A wrong response of more than `DEMONSTRATED` trials to a problem that needs as many."""
        while True:
            trials = list(careless_trials(rng))
            if all(self.results(trial)[-1] != TARGET for trial in trials):
                return self.write(trials)

    def write(self, trials: Iterable[int]) -> str:
        """Trials in this order, of which the last is claimed to make 24."""
        return ";".join(self.write_trial(trial) for trial in trials) + "!"

    def write_trial(self, trial: int) -> str:
        """E.g. `7-3=4+2=6+1=7`."""
        steps = zip(self.operators(trial), self.numbers[1:], self.results(trial), strict=True)
        return str(self.numbers[0]) + "".join(
            f"{operator}{number}={'x' if result is None else result}" for operator, number, result in steps
        )

    def operators(self, trial: int) -> str:
        """Operators of a trial, e.g. `-++` of trial 1; the first changes fastest."""
        places = range(len(self.numbers) - 1)
        return "".join(OPERATORS[trial // len(OPERATORS) ** place % len(OPERATORS)] for place in places)

    def results(self, trial: int) -> list[int | None]:
        """Result of each operator, None from the first on that is out of bounds."""
        value: int | None = self.numbers[0]
        found = []
        for operator, number in zip(self.operators(trial), self.numbers[1:], strict=True):
            value = None if value is None else apply_operator(operator, value, number)
            found.append(value)
        return found


def careless_trials(rng: random.Random) -> Iterator[int]:
    """Trials with four numbers, going round in circles: in the first, or in the second too; never in the third."""
    trial, last = 0, 2 * DEMONSTRATED
    for _ in range(rng.randint(DEMONSTRATED + 1, PATIENCE)):
        yield trial
        trial += 1
        if trial % DEMONSTRATED == 0 and (trial == last or rng.random() >= CHANGES):
            trial -= DEMONSTRATED


def apply_operator(operator: str, value: int, number: int) -> int | None:
    """Result, or None where it is out of bounds, as that of `apply_operator("-", 3, 5)` is."""
    result = {"+": value + number, "-": value - number, "*": value * number}[operator]
    return result if 0 <= result <= MOST else None


def all_problems() -> list[Problem]:
    """Every problem that has a solution."""
    drawn = (Problem(numbers) for count in COUNTS for numbers in product(NUMBERS, repeat=count))
    return [problem for problem in drawn if problem.num_trials]
