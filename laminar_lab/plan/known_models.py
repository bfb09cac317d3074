"""Shapes of public models by name, from their `config.json`, for plans of a model that is not downloaded."""

import re
from pathlib import Path

from laminar_lab.model_shape import ModelShape, read_shape
from laminar_py.config import ConfigError

NEAR = 0.15  # share by which a size such as "7B" may differ from the parameters of the model it stands for


def _dense(
    hidden: int,
    layers: int,
    heads: int,
    keys: int,
    inner: int,
    *,
    vocab: int,
    tied: bool = False,
    kind: str = "qwen2",
) -> ModelShape:
    """Make the shape of a dense model; `keys` are the key-value heads and `inner` is the MLP's width."""
    return ModelShape(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=inner,
        tie_word_embeddings=tied,
        model_type=kind,
    )


KNOWN_MODELS = {
    "SmolLM2-135M-Instruct": _dense(576, 30, 9, 3, 1536, vocab=49_152, tied=True, kind="llama"),
    "Qwen3-0.6B": ModelShape(
        vocab_size=151_936,
        hidden_size=1024,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        tie_word_embeddings=True,
        model_type="qwen3",
    ),
    "Qwen2.5-0.5B": _dense(896, 24, 14, 2, 4864, vocab=151_936, tied=True),
    "Qwen2.5-1.5B": _dense(1536, 28, 12, 2, 8960, vocab=151_936, tied=True),
    "Qwen2.5-3B": _dense(2048, 36, 16, 2, 11_008, vocab=151_936, tied=True),
    "Qwen2.5-7B": _dense(3584, 28, 28, 4, 18_944, vocab=152_064),
    "Llama-3.1-8B": _dense(4096, 32, 32, 8, 14_336, vocab=128_256, kind="llama"),
    "Qwen2.5-14B": _dense(5120, 48, 40, 8, 13_824, vocab=152_064),
    "Qwen3-30B-A3B": ModelShape(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        model_type="qwen3_moe",
    ),
    "Qwen3-235B-A22B": ModelShape(
        vocab_size=151_936,
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        model_type="qwen3_moe",
    ),
    "DeepSeek-V3": ModelShape(
        vocab_size=129_280,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        intermediate_size=18_432,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        model_type="deepseek_v3",
    ),
    "Snowball-67B-A2B": ModelShape(  # Marin's; its gates and norms of heads are left out
        vocab_size=128_256,
        hidden_size=2560,
        num_hidden_layers=26,
        num_attention_heads=20,
        num_key_value_heads=5,
        head_dim=128,
        num_experts=256,
        num_experts_per_tok=4,
        moe_intermediate_size=1280,
        shared_expert_intermediate_size=2560,
        model_type="grug_moe",
    ),
    "Qwen2.5-32B": _dense(5120, 64, 40, 8, 27_648, vocab=152_064),
    "Llama-3.1-70B": _dense(8192, 80, 64, 8, 28_672, vocab=128_256, kind="llama"),
    "Qwen2.5-72B": _dense(8192, 80, 64, 8, 29_568, vocab=152_064),
    "Llama-3.1-405B": _dense(16_384, 126, 128, 8, 53_248, vocab=128_256, kind="llama"),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)[bB]")


def shape_at(folder: Path) -> ModelShape | None:
    """Read the shape of the model in a folder; of a missing folder, the shape that its name stands for.

    None if no formula is known.
    """
    named = {name.lower(): shape for name, shape in KNOWN_MODELS.items()}
    return read_shape(folder) if folder.exists() else named.get(folder.name.lower())


def named_folder(model: str) -> Path:
    """Return the folder of a model: itself, or `models/<name>` for a known name or size. Raises `ConfigError`."""
    path = Path(model)
    return path if path.exists() else Path("models") / model_named(model)[0]


def model_named(model: str) -> tuple[str, ModelShape]:
    """Return name and shape of a model: a folder, a `config.json`, a name of `KNOWN_MODELS`, or a size such as
    `7B`.

    The last part of a missing folder can be a known name. A size stands for the nearest known dense model. Raises
    `ConfigError`.
    """
    path = Path(model)
    if path.exists():
        folder = path if path.is_dir() else path.parent
        shape = read_shape(folder)
        if shape is None:
            raise ConfigError(
                f"model={model}: {folder / 'config.json'} is missing or lacks a size; name the folder of another"
                " model"
            )
        return folder.resolve().name, shape
    for name, shape in KNOWN_MODELS.items():
        if name.lower() == path.name.lower():
            return name, shape
    size = _SIZE.fullmatch(model)
    dense = {name: shape for name, shape in KNOWN_MODELS.items() if not shape.experts}
    if size is not None and (wanted := 1e9 * float(size[1])):
        name = min(dense, key=lambda one: abs(dense[one].total - wanted))
        if abs(dense[name].total / wanted - 1) <= NEAR:
            return name, dense[name]
    raise ConfigError(
        f"model={model}: no folder, and no model that is known; name a folder with config.json, or one of"
        f" {', '.join(KNOWN_MODELS)}"
    )
