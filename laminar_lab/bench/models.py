"""Models for benchmarks: any size, random weights, no tokenizer."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

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
    """Write a decoder with fp32 weights from a fixed seed; returns its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    write_no_tokenizer(folder)
    return folder


def write_no_tokenizer(folder: Path) -> None:
    """Write an empty tokenizer, since the learner asks that there is one."""
    (folder / "tokenizer.json").write_text("{}")


def count_parameters(config: PretrainedConfig) -> int:
    """Parameters of such a model, without making it."""
    with torch.device("meta"):
        return sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
