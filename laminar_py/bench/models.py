"""Models for benchmarks: any size, random weights, no tokenizer."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def write_model(folder: Path, config: Qwen3Config) -> Path:
    """A Qwen3 model with fp32 weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder
