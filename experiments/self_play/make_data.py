"""Make the data of self_play: `python experiments/self_play/make_data.py [--out FOLDER]`, one second.

Writes `train.jsonl` (a pile for each game), `warm_start.jsonl` (moves at random, few of which are none) and
`model/` (a Qwen3 of 220,000 parameters without weights, its tokenizer and its chat template). The same bytes every
time; a file that holds them already is left alone.
"""

import random
from pathlib import Path

from game import MOST, STARTS, question

from laminar_lab.tiny_models import CHAT_PATTERN, CHAT_TEMPLATE, jsonl, make_data, tiny_model

WORDS = (" ", "<user>", "<assistant>", "left", *map(str, range(STARTS.stop)))
NUM_TRAIN = 4_000
NUM_WARM_START = 10_000
KNOWS_RULES = 0.9  # share of the moves that are 1 to 3
SEED = 20_261_127


def demonstration(rng: random.Random) -> dict[str, object]:
    """A move of one who knows the rules, mostly, and no more."""
    taken = rng.randint(1, MOST if rng.random() < KNOWS_RULES else STARTS.stop - 1)
    return {
        "messages": [
            {"role": "user", "content": question(rng.choice(STARTS))},
            {"role": "assistant", "content": str(taken)},
        ]
    }


def contents() -> dict[str, str]:
    """Every file by its name."""
    rng = random.Random(SEED)
    piles = [rng.choice(STARTS) for _ in range(NUM_TRAIN)]
    games = ({"messages": [{"role": "user", "content": question(pile)}], "answer": str(pile)} for pile in piles)
    return {
        "train.jsonl": jsonl(games),
        "warm_start.jsonl": jsonl(demonstration(rng) for _ in range(NUM_WARM_START)),
        **tiny_model(WORDS, pattern=CHAT_PATTERN, context=128, template=CHAT_TEMPLATE),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
