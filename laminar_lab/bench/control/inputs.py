"""Inputs of a run that measures the control plane: a tokenizer, prompts of 400 tokens, a profile, a config."""

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from laminar_py.config import RunConfig, load_config

PROMPT_TOKENS = 400
NUM_PROMPTS = 4096
MOST_TOKENS = 16_384
GROUP = 16  # samples of a prompt, which a replica takes under a version
COMPRESSION = 4.3  # so that 1,024 replicas with 16 responses each finish some 970 a second
MEDIAN, SIGMA = 1838, 0.99  # of response lengths, whose mean is 3,000 and whose p99 is above 16,000
WORDS = ("<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(1021)))
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
# Times of a fast GPU with a model of 7 billion parameters, in seconds; a learner takes next to nothing.
PROFILE = {
    "engine": {
        "step_s": 0.006,
        "kv_token_s": 1.86e-8,
        "prefill_tokens_per_s": 25_000,
        "load_s": 0.5,
        "reserve_tokens": 600,
    },
    "learner": {
        "train_tokens_per_s": 1_000_000_000,
        "num_parameters": 7_600_000_000,
        "hidden_size": 3584,
        "num_layers": 28,
        "optimizer_s": 0.1,
    },
}


def write_inputs(folder: Path, *, replicas: int, rate: float, steps: int) -> RunConfig:
    """Write them into a folder, for a fleet that is to finish `rate` trajectories a second."""
    model = folder / "model"
    model.mkdir()
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(WORDS[:3]))
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    with (folder / "train.jsonl").open("w") as file:
        for number in range(NUM_PROMPTS):
            words = [f"w{(number * 31 + place * place) % 1021}" for place in range(PROMPT_TOKENS - 2)]
            text = " ".join([f"w{number % 1021}", f"w{number // 1021}", *words])
            file.write(json.dumps({"prompt": text, "answer": "x"}) + "\n")
    (folder / "profile.yaml").write_text(yaml.safe_dump(PROFILE))
    (folder / "config.yaml").write_text(
        yaml.safe_dump(_settings(folder, replicas=replicas, rate=rate, steps=steps))
    )
    return load_config(folder / "config.yaml", [])


def _settings(folder: Path, *, replicas: int, rate: float, steps: int) -> dict[str, Any]:
    return {
        "name": "control",
        "runs": str(folder / "runs"),
        "steps": steps,
        "schedule": "async",
        "emulation": {
            "profile": str(folder / "profile.yaml"),
            "compression": COMPRESSION,
            "median_tokens": MEDIAN,
            "sigma": SIGMA,
            "start_spread_s": 200.0,
        },
        "model": {"path": str(model_path(folder)), "from_scratch": True},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {
            "replicas": replicas,
            "max_batch": 64,
            "max_len": PROMPT_TOKENS + MOST_TOKENS,
            "batch_per_replica": GROUP,
            "prompts_per_step": max(1, round(2 * rate / GROUP)),  # a step every two seconds
            "group_size": GROUP,
            "partial_interval_s": 1.0,
            "sampling": {"max_new_tokens": MOST_TOKENS},
        },
        "staleness": {"max_staleness": 8, "policies": ["wait", "reweight"]},
        "reward": {"use": [{"kind": "exact", "pattern": "(x)"}], "workers": 1},
        "repack": {"interval_s": 5.0 / COMPRESSION, "max_stall_s": 5.0 / COMPRESSION},
        "packer": {"max_tokens": 32_768},
        "learner": {"checkpoint_every": 20},
        "relay": {"nodes": 1},
        "supervisor": {"heartbeat_timeout_s": 60},
    }


def model_path(folder: Path) -> Path:
    """Folder of the model that is never computed."""
    return folder / "model"
