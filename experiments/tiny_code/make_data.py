"""Make the data of tiny_code: `python experiments/tiny_code/make_data.py [--out FOLDER]`, a few seconds.

Writes `train.jsonl` (problems for RL), `heldout.jsonl` (300 problems that occur nowhere else; half of them are
compositions whose program, but for its constants, occurs nowhere else either), `warm_start.jsonl` (careless
demonstrations) and `model/` (a Qwen3 without weights and its word-level tokenizer). The same bytes every time; a
file that holds them already is left alone.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from task import SEED, WORD_PATTERN, WORDS, HiddenTests, Problem, blanked, draw_problem

from laminar_lab.tiny_models import jsonl, make_data, tiny_model

NUM_TRAIN = 10_000
NUM_HELDOUT = 300
NUM_WARM_START = 12_000

Line: TypeAlias = dict[str, str | int | HiddenTests]


def draw_while(wanted: Callable[[Problem], bool], count: int, *, seed: int) -> list[Problem]:
    """Problems that are wanted; short ones may come twice."""
    rng = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = draw_problem(rng)
        if wanted(problem):
            found.append(problem)
    return found


def heldout_problems() -> tuple[list[Problem], list[Problem]]:
    """Plain problems and compositions, as many, each once.

    A plain one has a constant; in training its program occurs with another constant.
    """
    plain: dict[Problem, None] = {}  # sets that keep their order
    composed: dict[Problem, None] = {}
    rng = random.Random(SEED + 1)
    while len(plain) < NUM_HELDOUT // 2:
        problem = draw_problem(rng)
        if any(step.constant is not None for step in problem.steps):
            plain.setdefault(problem)
    while len(composed) < NUM_HELDOUT // 2:
        composed.setdefault(draw_problem(rng, composed=True))
    return list(plain), list(composed)


def demonstrations(problems: Iterable[Problem], *, forms: set[str]) -> Iterator[dict[str, str]]:
    """Write careless programs; a program that a slip gives a held-out form is drawn again."""
    rng = random.Random(SEED + 4)
    for problem in problems:
        program = problem.demonstration(rng)
        while blanked(program) in forms:
            program = problem.demonstration(rng)
        yield {"prompt": problem.prompt, "response": program}


def lines(problems: Iterable[Problem], *, task: str, name: str, seed: int) -> Iterator[Line]:
    """A line for each problem, with hidden tests; the answer is a right program."""
    rng = random.Random(seed)
    for index, problem in enumerate(problems):
        yield {
            "id": f"{name}{index}",
            "prompt": problem.prompt,
            "answer": problem.program,
            "task": task,
            "level": problem.level,
            "tests": problem.tests(rng),
        }


def contents() -> dict[str, str]:
    """Every file by its name."""
    plain, composed = heldout_problems()
    taken = {problem.prompt for problem in plain}
    forms = {blanked(problem.program) for problem in composed}

    def wanted(problem: Problem) -> bool:
        return problem.prompt not in taken and blanked(problem.program) not in forms

    train = draw_while(wanted, NUM_TRAIN, seed=SEED + 2)
    demonstrated = draw_while(wanted, NUM_WARM_START, seed=SEED + 3)
    heldout = [
        *lines(plain, task="plain", name="h", seed=SEED + 6),
        *lines(composed, task="composed", name="c", seed=SEED + 7),
    ]
    return {
        "train.jsonl": jsonl(lines(train, task="plain", name="t", seed=SEED + 5)),
        "heldout.jsonl": jsonl(heldout),
        "warm_start.jsonl": jsonl(demonstrations(demonstrated, forms=forms)),
        **tiny_model(WORDS, pattern=WORD_PATTERN, layers=3),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
