"""Make the data of countdown: `python experiments/countdown/make_data.py [--out FOLDER]`, a few seconds.

Writes `train.jsonl` (problems for RL), `short.jsonl`, `one_change.jsonl` and `two_changes.jsonl` (held-out
problems of the three levels; the last two need more trials than any right demonstration has), `warm_start.jsonl`
(demonstrations) and `model/` (a Qwen3 without weights and its word-level tokenizer). The same bytes every time; a
file that holds them already is left alone.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from task import COUNTS, WORD_PATTERN, WORDS, Problem, all_problems

from laminar_lab.tiny_models import jsonl, make_data, tiny_model

SEED = 20_260_301
NUM_TRAIN = 8_000
NUM_WARM_START = 12_000
NUM_HELDOUT = 100  # of each level
LEVELS = (1, 2, 3)
HELDOUT = ("short", "one_change", "two_changes")  # files of the levels
TRAIN_SHARES = (0.25, 0.3, 0.45)  # of the levels among the problems for RL
DEMONSTRATED_SHARES = (0.7, 0.15, 0.15)  # and among the demonstrations, where those above 1 are careless
THREE_NUMBERS_SHARE = 0.3  # of the problems of level 1

Line: TypeAlias = dict[str, str | int | list[int]]


class Problems:
    """All problems by level, each either held out or not."""

    def __init__(self, rng: random.Random) -> None:
        found = all_problems()
        rng.shuffle(found)
        self._three = [problem for problem in found if len(problem.numbers) == min(COUNTS)]
        four = [problem for problem in found if len(problem.numbers) == max(COUNTS)]
        by_level = {level: [problem for problem in four if problem.level == level] for level in LEVELS}
        self.heldout = {level: by_level[level][:NUM_HELDOUT] for level in LEVELS}
        self._others = {level: by_level[level][NUM_HELDOUT:] for level in LEVELS}

    def draw(self, rng: random.Random, *, shares: Sequence[float], count: int) -> Iterator[Problem]:
        """Problems that are not held out, levels by their shares; each may come many times."""
        for level in rng.choices(LEVELS, shares, k=count):
            three = level == 1 and rng.random() < THREE_NUMBERS_SHARE
            yield rng.choice(self._three if three else self._others[level])


def demonstration(problem: Problem, rng: random.Random) -> dict[str, str]:
    """A right search where it is short, a careless one where it would be long."""
    response = problem.search if problem.level == 1 else problem.careless_search(rng)
    return {"prompt": problem.prompt, "response": response}


def line(problem: Problem, name: str) -> Line:
    """A problem as runs read it; the answer is a trial that makes 24."""
    return {
        "id": name,
        "prompt": problem.prompt,
        "answer": problem.write_trial(problem.num_trials - 1),
        "level": problem.level,
        "trials": problem.num_trials,
        "numbers": list(problem.numbers),
    }


def contents() -> dict[str, str]:
    """Every file by its name."""
    problems = Problems(random.Random(SEED))
    train = problems.draw(random.Random(SEED + 1), shares=TRAIN_SHARES, count=NUM_TRAIN)
    demonstrated = problems.draw(random.Random(SEED + 2), shares=DEMONSTRATED_SHARES, count=NUM_WARM_START)
    careless = random.Random(SEED + 3)
    return {
        "train.jsonl": jsonl(line(problem, f"t{index}") for index, problem in enumerate(train)),
        **{
            f"{name}.jsonl": jsonl(line(problem, f"{name}-{index}") for index, problem in enumerate(heldout))
            for name, heldout in zip(HELDOUT, problems.heldout.values(), strict=True)
        },
        "warm_start.jsonl": jsonl(demonstration(problem, careless) for problem in demonstrated),
        **tiny_model(WORDS, pattern=WORD_PATTERN),
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
