"""Sizes and dtype of a model, from its `config.json`. Called before a run, and when an engine starts."""

import json
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_py.config.section import ConfigError

_T = TypeVar("_T")
DTYPES = ("float32", "bfloat16", "float16")


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model, e.g. `ModelSizes(vocab_size=151936, model_type="qwen3")`. A missing key is None."""

    vocab_size: int
    model_type: str | None = None
    architectures: list[str] | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    max_position_embeddings: int | None = None
    tie_word_embeddings: bool | None = None


class _Types(msgspec.Struct, frozen=True):
    dtype: str | None = None
    torch_dtype: str | None = None  # the older name


def read_sizes(model_dir: Path) -> ModelSizes:
    """Read the sizes in a Hugging Face folder. `ConfigError` without a `config.json` that names a vocabulary."""
    return _read(model_dir, ModelSizes, field="model.path")


def served_dtype(model_dir: Path, *, field: str = "model.path") -> str:
    """Read the dtype in which weights are published and served: the model's own, by default float32.

    `field`, the setting of the folder, is for errors. Raises `ConfigError` without a `config.json`, and for
    a dtype that no engine serves.
    """
    types = _read(model_dir, _Types, field=field)
    name = types.dtype or types.torch_dtype or "float32"
    if name not in DTYPES:
        raise ConfigError(f"{field}={model_dir}: config.json has dtype {name!r}; name one of {', '.join(DTYPES)}")
    return name


def _read(model_dir: Path, type_: type[_T], *, field: str) -> _T:
    remedy = "name the Hugging Face folder of a language model"
    try:
        # not by msgspec alone, which refuses the Infinity of some files
        return msgspec.convert(json.loads((model_dir / "config.json").read_bytes()), type_)
    except OSError as error:
        raise ConfigError(
            f"{field}={model_dir}: config.json cannot be read ({error.strerror}); {remedy}"
        ) from None
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{field}={model_dir}: config.json cannot be used ({error}); {remedy}") from None
