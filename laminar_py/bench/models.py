"""Models for benchmarks: any size, random weights, no tokenizer."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig


def write_model(folder: Path, config: PretrainedConfig) -> Path:
    """A decoder with fp32 weights from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")  # the learner asks that there is one
    return folder
