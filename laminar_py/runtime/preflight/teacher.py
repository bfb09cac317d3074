"""Checks of a teacher before a run: it has the policy's tokenizer, and room for the longest trajectory.

A check raises `ConfigError` with one line that names field, value and remedy.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import Tokenizer, vocabulary_fault
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.engines.sglang.scoring import ServedModel
from laminar_py.engines.sglang.settings import KEY_ENV
from laminar_py.records.engine import EngineLostError

CHECK_S = 15.0  # for a server's answer before a run
SAMPLED = 2048  # ids of the vocabulary whose texts a server on another host cuts
SAME = "name a teacher with the tokenizer of model.path"


def check_teacher(config: RunConfig, tokenizer: Tokenizer, *, texts: Sequence[str]) -> None:
    """Check the teacher that the config names, if any. `texts` show how a server's tokenizer cuts prompts."""
    algorithm = config.algorithm
    if algorithm.teacher_folder is not None:
        _check_folder(config, algorithm.teacher_folder, tokenizer)
    if algorithm.teacher_url is not None:
        try:
            _check_server(config, algorithm.teacher_url, tokenizer, texts)
        except EngineLostError as error:
            raise ConfigError(
                f"algorithm.teacher={algorithm.teacher_url}: {error}; start an SGLang server there, correct the"
                f" address, or set {KEY_ENV} to the server's --api-key"
            ) from None


def _check_folder(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> None:
    """Compare the teacher's folder with the policy's: tokenizer, size of the vocabulary, positions."""
    field = f"algorithm.teacher={folder}"
    if (fault := vocabulary_fault(folder, tokenizer)) is not None:
        raise ConfigError(f"{field}: {fault}; {SAME}")
    sizes, rows = read_sizes(folder), read_sizes(config.model.path).vocab_size
    if sizes.vocab_size < rows:
        raise ConfigError(
            f"{field}: has a vocabulary of {sizes.vocab_size} tokens, the policy one of {rows}; {SAME}"
        )
    positions, max_len = sizes.max_position_embeddings, config.rollout.max_len
    if positions is not None and max_len > positions:
        raise ConfigError(f"{field}: has {positions} positions, below rollout.max_len={max_len}; lower max_len")


def _samples(tokenizer: Tokenizer) -> list[str]:
    """Return texts with every special token, and with words from all over the vocabulary."""
    ids = np.arange(0, tokenizer.num_ids, max(1, tokenizer.num_ids // SAMPLED), dtype=np.int32)
    return [text for text in ("".join(tokenizer.special_texts), tokenizer.decode(ids)) if text]


def _check_server(config: RunConfig, url: str, tokenizer: Tokenizer, texts: Sequence[str]) -> None:
    """Compare the server's model with the policy's. Raises `EngineLostError` if the server does not answer."""
    field = f"algorithm.teacher={url}"
    model = ServedModel(url, api_key=os.environ.get(KEY_ENV), answer_s=CHECK_S, pause_s=0.0)
    served = Path(model.info.tokenizer_path or model.info.model_path)
    if (served / "tokenizer.json").is_file():
        fault = vocabulary_fault(served, tokenizer)
    else:  # the folder is on another host
        cut = [(text, model.tokenize(text)) for text in (*texts, *_samples(tokenizer))]
        other = [text for text, ids in cut if ids != tokenizer.encode(text).tolist()]
        fault = f"its tokenizer gives {other[0][:40]!r} other ids" if other else None
    if fault is not None:
        raise ConfigError(f"{field}: {fault}; {SAME}")
    model.knows(read_sizes(config.model.path).vocab_size - 1, after=[tokenizer.eos_ids[0]])
    longest, max_len = model.longest_input, config.rollout.max_len
    if longest is not None and longest < max_len:
        raise ConfigError(
            f"{field}: scores at most {longest} tokens, below rollout.max_len={max_len}; start it with a larger"
            " --context-length and --max-total-tokens, or lower rollout.max_len"
        )
