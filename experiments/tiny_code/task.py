"""Programs of a few lines: a task whose responses are run.

A prompt says what a function does, in words; the right response defines it in Python:

    f(s): drop 2, then reverse, then count b

    def f(s):
     s=s[2:]
     s=s[::-1]
     return s.count('b')

The function takes a number `x`, a string `s` or a list of numbers `a`, and perhaps a number `y`, which stands
where else a constant would. One to three operations follow each other; a word such as `reverse` is other code for
a list than for a string. The response is run against hidden tests: arguments, and values that references compute.

A quarter of the pairs of operations that could follow each other are held out: they occur in no training prompt
and in no demonstration, and half of the held-out problems are made of them. Demonstrations are careless: most
lines are what a programmer in a hurry writes (`a.sort()` for `sorted(a)`), so a model that imitates them writes
Python that is nearly always wrong. `make_data.py` draws the data from here.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from operations import LETTERS, OPERATIONS, Constant, Operation, Value

SEED = 20_260_201
LEVELS, LEVEL_WEIGHTS = (1, 2, 3), (2, 5, 3)  # number of operations, and how often
HELDOUT_PAIRS_SHARE = 0.25
NUM_TESTS = 8
FEWEST_RESULTS = 3  # different ones of the tests of a problem: counting letters in a number tells nothing
ARGUMENT = "y"  # the second one
SECOND_ARGUMENT_SHARE = 0.25
RIGHT, LIKELIER_SLIP = 0.35, 0.7  # share of right lines in demonstrations; of the first slip among wrong ones
PRINTED, NO_COLON = 0.1, 0.05  # demonstrations that print the result, or lack the colon

WORD_PATTERN = r" ?[A-Za-z]+|\s|."  # one match is one word

Pair: TypeAlias = tuple[str, str]
HiddenTests: TypeAlias = dict[str, str | list[list[Value]] | list[Value]]


@dataclass(frozen=True, slots=True)
class Clause:
    """An operation with its constant, e.g. of `first {}` and 3; `y` where the second argument stands for it."""

    operation: Operation
    constant: Constant | None = None

    def fill(self, text: str) -> str:
        """The text with the constant in its place."""
        return text.replace("{}", str(self.constant))


@dataclass(frozen=True, slots=True)
class Problem:
    """Steps, each of which takes what the one before it gives."""

    steps: tuple[Clause, ...]

    @property
    def level(self) -> int:
        """Number of steps."""
        return len(self.steps)

    @property
    def signature(self) -> str:
        """`f(s)` or `f(s,y)`"""
        first = self.steps[0].operation.takes
        return f"f({first},{ARGUMENT})" if self.second is not None else f"f({first})"

    @property
    def second(self) -> Clause | None:
        """The step that uses the second argument."""
        return next((step for step in self.steps if step.constant == ARGUMENT), None)

    @property
    def prompt(self) -> str:
        """E.g. `f(s): drop 2, then reverse` and a new line."""
        phrases = [step.fill(step.operation.phrase) for step in self.steps]
        return f"{self.signature}: {', then '.join(phrases)}\n"

    @property
    def program(self) -> str:
        """The right response."""
        return self.write([step.operation.code for step in self.steps])

    @property
    def pairs(self) -> set[Pair]:
        """Names of operations that follow each other."""
        return set(pairwise(step.operation.name for step in self.steps))

    @property
    def num_results(self) -> int:
        """Different results among some tests, the same each time."""
        outputs = self.tests(random.Random(SEED))["outputs"]
        return len({str(output) for output in outputs})

    def write(self, lines: Sequence[str], *, colon: str = ":", last: str = " return {}") -> str:
        """A program of one expression for each step."""
        *inner, end = (step.fill(line) for step, line in zip(self.steps, lines, strict=True))
        body = [f" {step.operation.gives}={line}" for step, line in zip(self.steps, inner, strict=False)]
        return "\n".join([f"def {self.signature}{colon}", *body, last.format(end)])

    def demonstration(self, rng: random.Random) -> str:
        """A careless program."""
        lines = [careless_line(step.operation, rng) for step in self.steps]
        colon = "" if rng.random() < NO_COLON else ":"
        return self.write(lines, colon=colon, last=" print({})" if rng.random() < PRINTED else " return {}")

    def result(self, first: Value, second: Constant | None = None) -> Value:
        """The value of the function, by the references."""
        value = first
        for step in self.steps:
            constant = second if step.constant == ARGUMENT else step.constant
            value = step.operation.reference(value, *([] if constant is None else [constant]))
        return value

    def tests(self, rng: random.Random) -> HiddenTests:
        """Hidden tests; the first is an edge: 0, the empty string or the empty list."""
        kind, second = self.steps[0].operation.takes, self.second
        constants = [step.constant for step in self.steps if step.constant not in (None, ARGUMENT)]
        inputs, outputs = list[list[Value]](), list[Value]()
        for index in range(NUM_TESTS):
            more = rng.choice(second.operation.constants) if second else None
            near = constants if more is None else [*constants, more]
            first = EDGES[kind] if index == 0 else DRAW[kind](rng, near)
            inputs.append([first] if more is None else [first, more])
            outputs.append(self.result(first, more))
        return {"fn_name": "f", "inputs": inputs, "outputs": outputs}


def careless_line(operation: Operation, rng: random.Random) -> str:
    """The right line, or one of its slips."""
    if rng.random() < RIGHT:
        return operation.code
    likely, other = operation.slips
    return likely if rng.random() < LIKELIER_SLIP else other


def draw_number(rng: random.Random, constants: Sequence[Constant], *, least: int = -20, most: int = 60) -> int:
    """A number, near a constant half of the time: that is where `>` and `>=` differ."""
    near = [constant for constant in constants if isinstance(constant, int)]
    if near and rng.random() < 0.5:
        return rng.choice(near) + rng.choice((-1, 0, 0, 1))
    return rng.randint(least, most)


def draw_string(rng: random.Random, constants: Sequence[Constant]) -> str:
    """Up to ten letters, many of them twice or among the constants."""
    letters = [constant for constant in constants if isinstance(constant, str)]
    pool = "".join(letters) * 3 + "abcdeBDEKT" + "".join(LETTERS)
    return "".join(rng.choice(pool) for _ in range(rng.randint(1, 10)))


def draw_list(rng: random.Random, constants: Sequence[Constant]) -> list[int]:
    """Up to eight small numbers."""
    return [draw_number(rng, constants, least=-9, most=15) for _ in range(rng.randint(1, 8))]


DRAW: dict[str, Callable[[random.Random, Sequence[Constant]], Value]] = {
    "x": draw_number,
    "s": draw_string,
    "a": draw_list,
}
EDGES: dict[str, Value] = {"x": 0, "s": "", "a": []}


def blanked(program: str) -> str:
    """The program without its constants: `def f(s):\\n return s[3:]` and `... s[2:]` are the same."""
    return re.sub(r"\d+|'[a-z]'|\by\b", "_", program.replace(f",{ARGUMENT})", ")"))


def can_follow() -> list[Pair]:
    """Pairs of operations of which one takes what the other gives, and which are not the same."""
    return [(a.name, b.name) for a in OPERATIONS for b in OPERATIONS if a.gives == b.takes and a is not b]


def draw_heldout_pairs() -> frozenset[Pair]:
    """Pairs that no training prompt and no demonstration has."""
    pairs = can_follow()
    return frozenset(random.Random(SEED).sample(pairs, round(HELDOUT_PAIRS_SHARE * len(pairs))))


HELDOUT_PAIRS = draw_heldout_pairs()


def draw_problem(rng: random.Random, *, composed: bool = False) -> Problem:
    """A random problem without a held-out pair; with one at least, if `composed`. Its results differ."""
    while True:
        problem = draw_any(rng)
        if bool(problem.pairs & HELDOUT_PAIRS) is composed and problem.num_results >= FEWEST_RESULTS:
            return problem


def draw_any(rng: random.Random) -> Problem:
    """A random problem; the three kinds of argument are equally likely."""
    (level,) = rng.choices(LEVELS, LEVEL_WEIGHTS)
    kind, operations = rng.choice("xsa"), list[Operation]()
    for _ in range(level):
        found = [op for op in OPERATIONS if op.takes == kind and op not in operations[-1:]]
        operations.append(rng.choice(found))
        kind = operations[-1].gives
    constants: list[Constant | None] = [rng.choice(op.constants) if op.constants else None for op in operations]
    places = [place for place, constant in enumerate(constants) if isinstance(constant, int)]
    if places and rng.random() < SECOND_ARGUMENT_SHARE:
        constants[rng.choice(places)] = ARGUMENT
    return Problem(tuple(Clause(op, constant) for op, constant in zip(operations, constants, strict=True)))


def words() -> tuple[str, ...]:
    """Every word that a prompt, a program or a slip can have."""
    frames = [
        f"f({kind},{ARGUMENT}): , then \ndef f():\n {kind}=\n return {kind}\n print({kind})" for kind in "xsa"
    ]
    constants = [*map(str, range(10)), *LETTERS, ARGUMENT]
    lines = [text for op in OPERATIONS for text in (op.phrase, op.code, *op.slips)]
    texts = [f"{before}{text}" for text in (*constants, *lines) for before in ("", " ")]
    filled = [text.replace("{}", "") for text in (*frames, *texts)]
    return tuple(sorted({word for text in filled for word in re.findall(WORD_PATTERN, text)}))


WORDS = words()
