"""The inputs of the emulated repack experiment, and its reward.

`python experiments/repack/task.py [--out FOLDER]` writes, in a second, `train.jsonl` (prompts of exactly 400
tokens) and `model/` (a tokenizer of 1,024 words and a config without weights). The same bytes every time; a file
that holds them already is left alone. What a response says means nothing here: `reward` is a coin for each
trajectory, so that groups have signal and scoring costs nothing.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from laminar_lab.tiny_models import EOS, PAD, SPECIAL, UNKNOWN, jsonl, make_data
from laminar_py import ScoringRequest

PROMPT_TOKENS = 400
NUM_PROMPTS = 800
SEED = 20_260_102
WORDS = tuple(f"{first}{second}" for first in "bcdfghjklmnpqrst" for second in "aeiouy")
TOKENS = (*SPECIAL, *WORDS, *(f"{a}{b}" for a in WORDS for b in WORDS))[:1024]

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "dtype": "bfloat16",
    "eos_token_id": TOKENS.index(EOS),
    "pad_token_id": TOKENS.index(PAD),
}
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": EOS,
    "pad_token": PAD,
    "unk_token": UNKNOWN,
}


def reward(request: ScoringRequest) -> float:
    """0 or 1, by the trajectory's name."""
    return float(hashlib.blake2b(request.trajectory_id.encode(), digest_size=1).digest()[0] & 1)


def prompts() -> Iterator[dict[str, str]]:
    """Words after words; a prompt begins with its number, so that no two are alike."""
    rng = random.Random(SEED)
    for number in range(NUM_PROMPTS):
        digits = [WORDS[number // len(WORDS)], WORDS[number % len(WORDS)]]
        words = digits + rng.choices(TOKENS[3:], k=PROMPT_TOKENS - len(digits))
        yield {"prompt": " ".join(words), "answer": ""}


def build_tokenizer() -> Tokenizer:
    """One token for each word."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def contents() -> dict[str, str]:
    """Every file by its name."""
    return {
        "train.jsonl": jsonl(prompts()),
        "model/config.json": json.dumps(MODEL, indent=2) + "\n",
        "model/tokenizer.json": build_tokenizer().to_str(pretty=True) + "\n",
        "model/tokenizer_config.json": json.dumps(TOKENIZER, indent=2) + "\n",
    }


if __name__ == "__main__":
    make_data(contents, out=Path(__file__).parent / "data", about=__doc__)
