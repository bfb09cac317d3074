"""Make the data of tool_calculator: `python experiments/tool_calculator/make_data.py [--out FOLDER]`, one second.

Writes `train.jsonl`, `heldout.jsonl` (the hard ones of 300 problems that occur nowhere else), `warm_start.jsonl`
(demonstrations that rather guess than ask) and `model/` (a Qwen3 of 220,000 parameters without weights, and its
tokenizer). The same bytes every time; a file that holds them already is left alone.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from task import WORD_PATTERN, WORDS, Problem, draw_problem

from laminar_lab.tiny_models import draw_distinct, jsonl, make_data, tiny_model

NUM_TRAIN = 8_000
NUM_HELDOUT = 300
NUM_WARM_START = 40_000
SEED = 20_261_126
GUESSES = 0.4  # of the demonstrations; others show the use of a result
CALLS = 0.3  # ask the calculator: fewer than guess, so that the greedy first turn is a guess


def other_problems(seed: int, *, count: int, heldout: set[Problem]) -> Iterator[Problem]:
    """Problems of which none is held out, but for those of two digits, of which there are only a hundred."""
    rng = random.Random(seed)
    while count:
        problem = draw_problem(rng)
        if problem not in heldout or len(problem.expression) == 3:
            count -= 1
            yield problem


def demonstration(problem: Problem, rng: random.Random) -> dict[str, str]:
    """A guess, a call of the calculator, or an answer after its result."""
    kind = rng.random()
    if kind < GUESSES:
        return {"prompt": problem.prompt, "response": problem.guess(rng)}
    if kind < GUESSES + CALLS:
        return {"prompt": problem.prompt, "response": problem.call}
    return {"prompt": problem.answered, "response": problem.answer}


def contents() -> dict[str, str]:
    """Every file by its name."""
    heldout = draw_distinct(partial(draw_problem, random.Random(SEED)), NUM_HELDOUT)
    taken = set(heldout)
    train = other_problems(SEED + 1, count=NUM_TRAIN, heldout=taken)
    shown = other_problems(SEED + 2, count=NUM_WARM_START, heldout=taken)
    rng = random.Random(SEED + 3)
    return {
        "train.jsonl": jsonl({"prompt": p.prompt, "answer": str(p.value)} for p in train),
        "heldout.jsonl": jsonl(
            {"prompt": p.prompt, "answer": str(p.value)} for p in heldout if len(p.expression) > 3
        ),
        "warm_start.jsonl": jsonl(demonstration(problem, rng) for problem in shown),
        **tiny_model(WORDS, pattern=WORD_PATTERN, context=256),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
