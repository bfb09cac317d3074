"""Make the data of tba: `python experiments/tba/make_data.py [--out FOLDER]`, one second.

Writes `train.jsonl` (the puzzles, which come again and again), `warm_start.jsonl` (other puzzles with answers at
random) and `model/` (a Qwen3 without weights and its tokenizer of characters). The same bytes every time; a file
that holds them already is left alone.
"""

import random
from itertools import islice
from pathlib import Path

from puzzle import ANSWERS, WORD_PATTERN, WORDS, Puzzle, puzzles

from laminar_lab.tiny_models import jsonl, make_data, tiny_model

SEED = 20_261_130
NUM_PUZZLES = 32
NUM_WARM_START = 2_000


def line(puzzle: Puzzle, name: str) -> dict[str, object]:
    """A puzzle as runs read it, with one right answer."""
    return {
        "id": name,
        "prompt": puzzle.prompt,
        "answer": puzzle.right[0],
        "numbers": list(puzzle.numbers),
        "target": puzzle.target,
    }


def contents() -> dict[str, str]:
    """Every file by its name."""
    rng = random.Random(SEED)
    drawn = list(islice(puzzles(rng), NUM_PUZZLES + NUM_WARM_START))
    guesses = ({"prompt": one.prompt, "response": rng.choice(ANSWERS)} for one in drawn[NUM_PUZZLES:])
    return {
        "train.jsonl": jsonl(line(one, f"t{place}") for place, one in enumerate(drawn[:NUM_PUZZLES])),
        "warm_start.jsonl": jsonl(guesses),
        **tiny_model(WORDS, pattern=WORD_PATTERN, hidden=64, context=64),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
