"""Make the data of tba: `python experiments/tba/make_data.py [--out FOLDER]`, one second.

Writes `train.jsonl` (the puzzles, which come again and again), `warm_start.jsonl` (answers at random to their
names) and `model/` (a Qwen3 without weights and its tokenizer). The same bytes every time; a file that holds them
already is left alone.
"""

import random
from pathlib import Path

from puzzle import ANSWERS, NAMES, WORD_PATTERN, WORDS, Puzzle, puzzles

from laminar_lab.tiny_models import jsonl, make_data, tiny_model

SEED = 20_261_130
NUM_WARM_START = 2_000


def line(name: str, puzzle: Puzzle) -> dict[str, object]:
    """A puzzle as runs read it, with one right answer."""
    return {
        "id": name,
        "prompt": name,
        "answer": puzzle.right[0],
        "numbers": list(puzzle.numbers),
        "target": puzzle.target,
    }


def contents() -> dict[str, str]:
    """Every file by its name."""
    rng = random.Random(SEED)
    lines = [line(name, puzzle) for name, puzzle in zip(NAMES, puzzles(rng), strict=False)]
    guesses = ({"prompt": rng.choice(NAMES), "response": rng.choice(ANSWERS)} for _ in range(NUM_WARM_START))
    return {
        "train.jsonl": jsonl(lines),
        "warm_start.jsonl": jsonl(guesses),
        **tiny_model(WORDS, pattern=WORD_PATTERN, hidden=64, context=64),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
