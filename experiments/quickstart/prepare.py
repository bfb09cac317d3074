"""Make the data of the quickstart: `python experiments/quickstart/prepare.py [--out FOLDER]`, one second.

Writes `train.jsonl` (prompts for RL), `heldout.jsonl` (300 problems that occur nowhere else),
`warm_start.jsonl` (careless demonstrations) and `model/` (a Qwen3 of 245,000 parameters without weights, and
its word-level tokenizer). The same bytes every time; a file that holds them already is left alone.
"""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from task import WORD_PATTERN, WORDS, Problem, draw_problem

from laminar_lab.tiny_models import draw_distinct, jsonl, make_data, tiny_model

NUM_TRAIN = 8_000  # 250 steps of 32 prompts before one comes again
NUM_HELDOUT = 300
NUM_WARM_START = 10_000  # 500 steps of 1,024 tokens, each demonstration seen about once
SEED = 20_260_101


def other_problems(seed: int, *, count: int, heldout: set[Problem]) -> Iterator[Problem]:
    """Problems of which none is held out; short ones may come twice."""
    rng = random.Random(seed)
    while count:
        problem = draw_problem(rng)
        if problem not in heldout:
            count -= 1
            yield problem


def contents() -> dict[str, str]:
    """Every file by its name."""
    heldout = draw_distinct(partial(draw_problem, random.Random(SEED)), NUM_HELDOUT)
    taken = set(heldout)
    train = other_problems(SEED + 1, count=NUM_TRAIN, heldout=taken)
    careless = random.Random(SEED + 3)
    demonstrated = other_problems(SEED + 2, count=NUM_WARM_START, heldout=taken)
    return {
        "train.jsonl": jsonl({"prompt": p.prompt, "answer": p.answer} for p in train),
        "heldout.jsonl": jsonl({"prompt": p.prompt, "answer": p.answer} for p in heldout),
        "warm_start.jsonl": jsonl(
            {"prompt": p.prompt, "response": p.solution(careless=careless)} for p in demonstrated
        ),
        **tiny_model(WORDS, pattern=WORD_PATTERN),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
