"""Sizes and structure of a model for the embedded engine, read from its `config.json`.

The controller calls it before a run, in a process without torch; `LocalEngine` calls it before any allocation. A
`ModelSpec` describes a model that the hand-written forward computes exactly. Any other model is a `ConfigError`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec

from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16")
_QWEN3, _QWEN2, _LLAMA = "Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"
_QWEN3_MOE = "Qwen3MoeForCausalLM"
_BY_MODEL_TYPE = {"qwen3": _QWEN3, "qwen3_moe": _QWEN3_MOE, "qwen2": _QWEN2, "llama": _LLAMA}


class _Rope(msgspec.Struct, frozen=True):
    """`rope_parameters`, or the older `rope_scaling`."""

    rope_theta: float | None = None
    rope_type: str = "default"
    type: str = "default"  # the oldest name of rope_type
    partial_rotary_factor: float = 1.0


class _Config(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `config.json` that the engine needs, with the defaults of Hugging Face."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    architectures: list[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    tie_word_embeddings: bool = False
    num_experts: int | None = None
    num_local_experts: int | None = None  # the newer name of num_experts
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None

    @property
    def architecture(self) -> str:
        """Name of the model's class; derived from `model_type` if `architectures` is missing."""
        default = _BY_MODEL_TYPE.get(self.model_type, self.model_type)
        return self.architectures[0] if self.architectures else default

    @property
    def mixture(self) -> "Mixture | None":
        """The experts of a mixture model; None for another model."""
        if self.architecture != _QWEN3_MOE:
            return None
        count = self.num_experts or self.num_local_experts or 128
        return Mixture(count, self.num_experts_per_tok, renormalises=self.norm_topk_prob)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of every layer, e.g. `Mixture(128, 8, renormalises=True)`."""

    num_experts: int
    top_k: int  # experts per token
    renormalises: bool  # the weights of the chosen experts sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder of the Llama family; the project's tiny Qwen3 has `num_heads=4, num_kv_heads=2, head_dim=32`."""

    num_layers: int
    hidden: int
    intermediate: int  # of each expert, in a mixture
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float  # of every RMS norm
    rope_theta: float
    qk_norm: bool  # RMS norm on each query and key head
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool  # the output head is the embedding
    dtype: "torch.dtype"
    mixture: Mixture | None = None
    quantized: bool = False  # serve weights as fp8 rounds them (`engines.local.fp8`)

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def read(cls, model_dir: Path) -> Self:
        """Read the spec of the model in `model_dir`. Raises `ConfigError` if the engine cannot compute it."""
        import torch

        config = read_config(model_dir)
        architecture = config.architecture
        rope = config.rope_parameters
        heads, mixture = config.num_attention_heads, config.mixture
        default_head_dim = 128 if architecture == _QWEN3 else config.hidden_size // heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.moe_intermediate_size if mixture else config.intermediate_size,
            vocab=config.vocab_size,
            num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads,
            head_dim=config.head_dim or default_head_dim,
            eps=config.rms_norm_eps,
            rope_theta=rope.rope_theta if rope and rope.rope_theta else config.rope_theta,
            qk_norm=architecture in (_QWEN3, _QWEN3_MOE),
            qkv_bias=architecture == _QWEN2 or config.attention_bias,
            out_bias=architecture != _QWEN2 and config.attention_bias,
            mlp_bias=architecture == _LLAMA and config.mlp_bias,
            tied=config.tie_word_embeddings,
            dtype=getattr(torch, config.dtype or config.torch_dtype or "float32"),
            mixture=mixture,
        )


def read_config(model_dir: Path) -> _Config:
    """Read and check `config.json`. `ConfigError` names a feature that the engine cannot compute."""
    try:
        config = msgspec.json.decode((model_dir / "config.json").read_bytes(), type=_Config)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"model.path={model_dir}: config.json: {error}; choose a causal language model"
        ) from error
    _refuse(config, model_dir=model_dir)
    return config


def _refuse(config: _Config, *, model_dir: Path) -> None:
    """Raise `ConfigError` for a model that the forward would compute wrongly."""
    architecture = config.architecture
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    dtype = config.dtype or config.torch_dtype or "float32"
    rope_type = rope.type if rope.rope_type == "default" else rope.rope_type
    problem = None
    if architecture not in _BY_MODEL_TYPE.values():
        problem = f"architecture {architecture} is none of {', '.join(_BY_MODEL_TYPE.values())}"
    elif rope_type != "default" or rope.partial_rotary_factor != 1:
        problem = f"{architecture} with rope type {rope_type} is not implemented, only the default"
    elif config.hidden_act != "silu":
        problem = f"{architecture} with hidden_act {config.hidden_act} is not implemented, only silu"
    elif config.use_sliding_window:
        problem = f"{architecture} with a sliding window is not implemented"
    elif config.decoder_sparse_step != 1 or config.mlp_only_layers:
        problem = f"{architecture} with layers that have no experts is not implemented"
    elif config.mixture and (config.hidden_size % 8 or config.moe_intermediate_size % 8):
        sizes = f"hidden_size {config.hidden_size} and moe_intermediate_size {config.moe_intermediate_size}"
        problem = f"{architecture} with {sizes} is not implemented, only multiples of 8"
    elif dtype not in _DTYPES:
        problem = f"{architecture} in dtype {dtype} is not implemented, only {' and '.join(_DTYPES)}"
    if problem:
        raise ConfigError(f"model.path={model_dir}: {problem} in the embedded engine; choose the sglang engine")
