"""What the client of a server must know of a model. Read from its `config.json`; called by `runtime` and the check
of servers that run already.
"""

from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """E.g. `ModelSizes(151936, "qwen3", ["Qwen3ForCausalLM"], hidden_size=1024)`; None is what the file lacks."""

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


def read_sizes(model_dir: Path) -> ModelSizes:
    """Of the model in a Hugging Face folder. `ConfigError` if there is no such folder, or no vocabulary in it."""
    remedy = "name the Hugging Face folder of a language model"
    try:
        return msgspec.json.decode((model_dir / "config.json").read_bytes(), type=ModelSizes)
    except OSError as error:
        raise ConfigError(
            f"model.path={model_dir}: config.json cannot be read ({error.strerror}); {remedy}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path={model_dir}: config.json is of no use ({error}); {remedy}") from None
