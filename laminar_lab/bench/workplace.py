"""Workplace of a benchmark: a folder of its own, one torch thread, models with random weights, random lengths."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config


@contextmanager
def workplace(within: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, e.g. in shared memory, and delete it at the end.

    Sets this process to one torch thread.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=within) as name:
        yield Path(name)


SHARED_MEMORY = Path("/dev/shm")
SMALL = Qwen3Config(  # 25 million parameters
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1408,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def write_model(folder: Path, config: PretrainedConfig) -> Path:
    """Write a decoder with fp32 weights from a fixed seed; return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    write_no_tokenizer(folder)
    return folder


def write_no_tokenizer(folder: Path) -> None:
    """Write an empty tokenizer, since the learner needs the file."""
    (folder / "tokenizer.json").write_text("{}")


def count_parameters(config: PretrainedConfig) -> int:
    """Count the parameters of a model without making it."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())


def log_normal_lengths(
    rng: np.random.Generator, count: int, *, median: float, sigma: float = 0.99, cap: int, least: int = 1
) -> list[int]:
    """Draw `count` lengths from `least` to `cap`. With a sigma of 0.99 the p99 is ten times the median."""
    drawn = np.rint(median * np.exp(sigma * rng.standard_normal(count)))
    lengths: list[int] = np.clip(drawn, least, cap).astype(int).tolist()
    return lengths
