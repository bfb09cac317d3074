"""Make a tiny model that learns on two CPU cores, and write data files with the same bytes each time.

Scripts that `data.prepare` names call this module, for tasks without a pretrained model: scripts of experiments,
and a user's own (docs/own_task.md). The module imports little, so that these scripts start quickly.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS, UNKNOWN = SPECIAL = ("<pad>", "<eos>", "<unk>")  # the first ids of every vocabulary
HEAD_DIM = 32
# messages as words: `<user>pile 7<eos><assistant>`
CHAT_PATTERN = r"<\w+>|\w+| "
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
P = TypeVar("P", bound=Hashable)


def tiny_model(
    words: Sequence[str],
    *,
    pattern: str,
    hidden: int = 96,
    layers: int = 2,
    context: int = 1024,
    template: str | None = None,
) -> dict[str, str]:
    """Contents of the files in a folder `model/`: a Qwen3 without weights, and a tokenizer with a token per word.

    `pattern` is the regular expression that matches the words of a text; words outside `words` become `<unk>`.
    `template` is the chat template, which must end each message with `<eos>`. With 100 words and the defaults the
    model has 240,000 parameters.
    """
    tokens = (*SPECIAL, *words)
    ends = {"eos_token_id": tokens.index(EOS), "pad_token_id": tokens.index(PAD)}
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "intermediate_size": hidden * 8 // 3,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.06,  # a narrow model: the usual 0.02 learns much more slowly
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": None,
        **ends,
    }
    return {
        "model/config.json": json.dumps(config, indent=2) + "\n",
        "model/generation_config.json": json.dumps(ends, indent=2) + "\n",
        "model/tokenizer.json": _tokenizer(tokens, pattern).to_str(pretty=True) + "\n",
        "model/tokenizer_config.json": json.dumps(_tokenizer_config(template), indent=2) + "\n",
    }


def _tokenizer_config(template: str | None) -> dict[str, str]:
    """Contents of tokenizer_config.json. Without its classes AutoTokenizer would split text as a real Qwen3
    does."""
    classes = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
    }
    return classes if template is None else {**classes, "chat_template": template}


def _tokenizer(tokens: Sequence[str], pattern: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def draw_distinct(draw: Callable[[], P], count: int) -> list[P]:
    """Draw problems until there are `count` of them without a repetition, in their order."""
    found: dict[P, None] = {}
    while len(found) < count:
        found.setdefault(draw())
    return list(found)


def jsonl(rows: Iterable[object]) -> str:
    """JSON of rows, one line each."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_data(folder: Path, contents: Mapping[str, str]) -> None:
    """Write files that are missing or different, each atomically, so that two runs may do it at once."""
    for name, text in contents.items():
        path = folder / name
        if path.is_file() and path.read_text() == text:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(text)
        unfinished.replace(path)
        sys.stdout.write(f"wrote {path}\n")


def make_data(contents: Callable[[], Mapping[str, str]], *, out: Path, about: str | None) -> None:
    """Main function of a script that makes data; its option `--out FOLDER` replaces the folder `out`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="folder of the data")
    write_data(parser.parse_args().out, contents())
