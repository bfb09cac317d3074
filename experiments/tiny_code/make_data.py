"""Make the data of tiny_code: `python experiments/tiny_code/make_data.py [--out FOLDER]`, a few seconds.

Writes `train.jsonl` (problems for RL), `heldout.jsonl` (300 problems that occur nowhere else; half of them are
compositions whose program, but for its constants, occurs nowhere else either), `warm_start.jsonl` (careless
demonstrations) and `model/` (a Qwen3 without weights and its word-level tokenizer). The same bytes every time; a
file that holds them already is left alone.
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

from task import EOS, PAD, SEED, TOKEN_PATTERN, TOKENS, UNKNOWN, HiddenTests, Problem, blanked, draw_problem
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

NUM_TRAIN = 10_000
NUM_HELDOUT = 300
NUM_WARM_START = 12_000

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(TOKENS),
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.06,  # a narrow model: the usual 0.02 learns much more slowly
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": TOKENS.index(EOS),
    "pad_token_id": TOKENS.index(PAD),
}
TOKENIZER = {  # without it AutoTokenizer takes the class of a real Qwen3, which splits text in another way
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "pad_token": PAD,
    "unk_token": UNKNOWN,
}
GENERATION = {"eos_token_id": TOKENS.index(EOS), "pad_token_id": TOKENS.index(PAD)}

Line: TypeAlias = dict[str, str | int | HiddenTests]


def draw_while(
    wanted: Callable[[Problem], bool], count: int, *, seed: int, composed: bool = False
) -> list[Problem]:
    """Problems that are wanted; short ones may come twice."""
    rng = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = draw_problem(rng, composed=composed)
        if wanted(problem):
            found.append(problem)
    return found


def heldout_problems() -> tuple[list[Problem], list[Problem]]:
    """Plain problems and compositions, as many, each once.

    A plain one has a constant: another constant is what its program occurs with in training.
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
    """Careless programs; one that a slip makes a program of a held-out form is drawn anew."""
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


def build_tokenizer() -> Tokenizer:
    """One token per word, with the space before it, and per other character."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    return tokenizer


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
        "model/config.json": json.dumps(MODEL, indent=2) + "\n",
        "model/generation_config.json": json.dumps(GENERATION, indent=2) + "\n",
        "model/tokenizer.json": build_tokenizer().to_str(pretty=True) + "\n",
        "model/tokenizer_config.json": json.dumps(TOKENIZER, indent=2) + "\n",
    }


def jsonl(rows: Iterable[object]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_atomically(path: Path, text: str) -> None:
    """The file appears whole or not at all, also when two runs prepare at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def main() -> None:
    """Write what is missing or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data", help="folder of the data")
    out: Path = parser.parse_args().out
    for name, text in contents().items():
        path = out / name
        if path.is_file() and path.read_text() == text:
            continue
        write_atomically(path, text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
