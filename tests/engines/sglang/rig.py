"""Tiny models and real SGLang servers for tests that carry the marker `sglang`."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from laminar_py.config.cluster import Device
from laminar_py.engines.sglang.launch import ServerSpec, replica_server
from laminar_py.engines.sglang.server import SGLangServer

ROOT = Path(__file__).parents[3]


def sglang_python() -> Path:
    """The interpreter with SGLang: `LAMINAR_SGLANG_PYTHON`, or that of `make test-sglang`; skips without one."""
    named = os.environ.get("LAMINAR_SGLANG_PYTHON")
    python = Path(named) if named else ROOT / ".venv-sglang/bin/python"
    if not python.is_file():
        assert not named, f"LAMINAR_SGLANG_PYTHON={named}: no such file"
        pytest.skip("no environment with SGLang; `make test-sglang` makes one")
    return python


def make_model(
    folder: Path,
    *,
    seed: int,
    hidden: int = 64,
    layers: int = 2,
    vocab: int = 320,
    max_len: int = 2048,
    experts: int = 0,
) -> Path:
    """A Qwen3 model in `folder` (Qwen3-MoE with `experts`, two to a token): random fp32 weights, ids only."""
    torch.manual_seed(seed)
    heads = max(hidden // 32, 2)
    sizes = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    if experts:
        routing = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **routing))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.float().save_pretrained(folder)
    return folder


@asynccontextmanager
async def running_server(model_dir: Path, log_dir: Path, **spec: object) -> AsyncIterator[SGLangServer]:
    """A real server with random weights in the model's shape; `spec` are arguments of `replica_server`."""
    async with SGLangServer(make_spec(model_dir, log_dir, **spec)) as server:
        yield server


def make_spec(model_dir: Path, log_dir: Path, **changes: object) -> ServerSpec:
    """A small fp32 server on the CPU."""
    fields: dict[str, object] = {
        "python": sglang_python(),
        "model_dir": model_dir,
        "log": log_dir / "sglang.log",
        "device": Device.CPU,
        "dtype": "float32",
        "max_batch": 32,
        "max_len": 2040,
        "kv_capacity": 32768,
        "start_timeout_s": 400.0,
    }
    return replica_server(**(fields | changes))
