"""The little machine: a task whose answer takes as many tokens as its prompt asks for.

A machine holds one digit. In each step it applies one rule if the digit is even and another if it is odd, and
keeps the last digit of the result. The prompt `e-2;o*7;1x5?` says: on even digits subtract 2, on odd digits
multiply by 7, start at 1, do 5 steps. The right response writes every step as `rule=digit x steps left`:

    o*7=7x4;o*7=9x3;o*7=3x2;o*7=1x1;o*7=7x0;#7

that is 1 -> 7 -> 9 -> 3 -> 1 -> 7, and the answer 7 after the `#`. Only the answer is rewarded.

The number of steps is log-normal (median 6, at most 64), so some responses are ten times as long as the usual
one. Demonstrations are careless: a step that needs a carry or a borrow (a result outside 0 to 9) is off by one
6 times in 10. A model that imitates them knows the form but not the arithmetic; reinforcement learning, which
sees nothing but right and wrong answers, teaches it to carry. `prepare.py` draws the data from here.
"""

import math
import random
from dataclasses import dataclass

MAX_STEPS = 64
MEDIAN_STEPS = 6.0
SIGMA_STEPS = 0.95  # of the logarithm of the number of steps
CARELESSNESS = 0.6  # share of carry and borrow steps that a demonstration gets wrong

FACTORS = (3, 7, 9)  # units modulo 10: no digit is a dead end
RULES = tuple(f"{op}{y}" for op in "+-*" for y in (FACTORS if op == "*" else range(1, 10)))

WORDS = (
    *"0123456789=;?#",
    *(f"x{left}" for left in range(MAX_STEPS + 1)),
    *(parity + rule for parity in "eo" for rule in RULES),
)
WORD_PATTERN = r"[eo][+*-]\d|x\d+|."  # one match is one word


@dataclass(frozen=True, slots=True)
class Problem:
    """A machine, its start and its number of steps, e.g. `Problem("-2", "*7", 1, 5)`."""

    even: str  # rule for even digits
    odd: str  # rule for odd digits
    start: int
    steps: int

    @property
    def prompt(self) -> str:
        """`e-2;o*7;1x5?`"""
        return f"e{self.even};o{self.odd};{self.start}x{self.steps}?"

    @property
    def answer(self) -> str:
        """The digit after the last step, e.g. `7`."""
        return self.solution()[-1]

    def solution(self, *, careless: random.Random | None = None) -> str:
        """Every step and the answer; wrong now and then where it needs care, if `careless` is given."""
        digit, lines = self.start, []
        for left in range(self.steps - 1, -1, -1):
            parity, rule = ("o", self.odd) if digit % 2 else ("e", self.even)
            result = apply_rule(rule, digit)
            digit = result % 10
            if careless and not 0 <= result <= 9 and careless.random() < CARELESSNESS:
                digit = (digit + (1 if rule[0] == "-" else -1)) % 10
            lines.append(f"{parity}{rule}={digit}x{left};")
        return "".join(lines) + f"#{digit}"


def apply_rule(rule: str, digit: int) -> int:
    """What the rule makes of a digit, before the last digit is taken: `apply_rule("*7", 9)` is 63."""
    operand = int(rule[1])
    return {"+": digit + operand, "-": digit - operand, "*": digit * operand}[rule[0]]


def draw_problem(rng: random.Random) -> Problem:
    """A random problem."""
    steps = round(math.exp(rng.gauss(math.log(MEDIAN_STEPS), SIGMA_STEPS)))
    return Problem(draw_rule(rng), draw_rule(rng), rng.randrange(10), min(MAX_STEPS, max(1, steps)))


def draw_rule(rng: random.Random) -> str:
    """A random rule; the three operations are equally likely."""
    op = rng.choice("+-*")
    return f"{op}{rng.choice(FACTORS) if op == '*' else rng.randrange(1, 10)}"
