"""Make the data of the quickstart: `python experiments/quickstart/prepare.py [--out FOLDER]`, one second.

Writes `train.jsonl` (prompts for RL), `heldout.jsonl` (300 problems that occur nowhere else),
`warm_start.jsonl` (careless demonstrations) and `model/` (a Qwen3 of 245,000 parameters without weights, and
its word-level tokenizer). The same bytes every time; a file that holds them already is left alone.
"""

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from task import EOS, PAD, TOKEN_PATTERN, TOKENS, UNKNOWN, Problem, draw_problem
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

NUM_TRAIN = 8_000  # 250 steps of 32 prompts before one comes again
NUM_HELDOUT = 300
NUM_WARM_START = 10_000  # 500 steps of 1,024 tokens, each demonstration seen about once
SEED = 20_260_101

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": len(TOKENS),
    "hidden_size": 96,
    "num_hidden_layers": 2,
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


def heldout_problems() -> list[Problem]:
    """Problems without a repetition."""
    rng = random.Random(SEED)
    problems: dict[Problem, None] = {}  # a set that keeps its order
    while len(problems) < NUM_HELDOUT:
        problems.setdefault(draw_problem(rng))
    return list(problems)


def other_problems(seed: int, *, count: int, heldout: set[Problem]) -> Iterator[Problem]:
    """Problems of which none is held out; short ones may come twice."""
    rng = random.Random(seed)
    while count:
        problem = draw_problem(rng)
        if problem not in heldout:
            count -= 1
            yield problem


def build_tokenizer() -> Tokenizer:
    """One token per rule, per step counter and per other character."""
    vocabulary = {token: index for index, token in enumerate(TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    return tokenizer


def contents() -> dict[str, str]:
    """Every file by its name."""
    heldout = heldout_problems()
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
        "model/config.json": json.dumps(MODEL, indent=2) + "\n",
        "model/generation_config.json": json.dumps(GENERATION, indent=2) + "\n",
        "model/tokenizer.json": build_tokenizer().to_str(pretty=True) + "\n",
        "model/tokenizer_config.json": json.dumps(TOKENIZER, indent=2) + "\n",
    }


def jsonl(rows: Iterator[dict[str, str]]) -> str:
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
