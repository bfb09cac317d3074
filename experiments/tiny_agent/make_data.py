"""Make the data of tiny_agent: `python experiments/tiny_agent/make_data.py [--out FOLDER]`, one second.

Writes `train.jsonl`, `heldout.jsonl` (a game for each number), `warm_start.jsonl` (guesses at random, without
regard to hints) and `model/` (a Qwen3 of 230,000 parameters without weights, its tokenizer and its chat template).
The same bytes every time; a file that holds them already is left alone.
"""

import random
from collections.abc import Iterator
from pathlib import Path

from game import GUESSES, HIGHEST, QUESTION, hint

from laminar_lab.tiny_models import CHAT_PATTERN, CHAT_TEMPLATE, jsonl, make_data, tiny_model

WORDS = (" ", "<user>", "<assistant>", "game", "guess", "to", "more", "less", *map(str, range(100)))
NUM_TRAIN = 3_000
NUM_WARM_START = 10_000
HIGHEST_SHOWN = 99  # of guesses by one who does not listen
LISTENS = 0.3  # share of the guesses that the hints allow
SEED = 20_261_127


def games(numbers: list[int]) -> Iterator[dict[str, object]]:
    """Make a line for each game. Its prompt does not matter, since the agent begins by itself."""
    for place, number in enumerate(numbers):
        yield {"messages": _user(f"game {place // 100} {place % 100}"), "answer": str(number)}


def demonstration(rng: random.Random) -> dict[str, object]:
    """Make a game up to a guess that mostly ignores the hints."""
    secret, said = rng.randint(1, HIGHEST), _user(QUESTION)
    open_numbers = list(range(1, HIGHEST + 1))
    for left in reversed(range(rng.randint(1, GUESSES))):
        guess = rng.choice(open_numbers) if rng.random() < LISTENS else rng.randint(1, HIGHEST_SHOWN)
        said.append({"role": "assistant", "content": str(guess)})
        if guess == secret or not left:
            break
        said.extend(_user(hint(str(guess), secret)))
        open_numbers = [number for number in open_numbers if (number > guess) == (secret > guess)]
    return {"messages": said}


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def contents() -> dict[str, str]:
    """Every file by its name."""
    rng = random.Random(SEED)
    numbers = [*range(1, HIGHEST + 1), *(rng.randint(1, HIGHEST) for _ in range(NUM_TRAIN))]
    lines = list(games(numbers))
    return {
        "train.jsonl": jsonl(lines[HIGHEST:]),
        "heldout.jsonl": jsonl(lines[:HIGHEST]),
        "warm_start.jsonl": jsonl(demonstration(rng) for _ in range(NUM_WARM_START)),
        **tiny_model(WORDS, pattern=CHAT_PATTERN, context=128, template=CHAT_TEMPLATE),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
