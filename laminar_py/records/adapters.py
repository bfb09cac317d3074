"""Versions that hold adapters alone, in peft's own format: what `adapter_config.json` says, and of which base.

Written by the learner, read by engines. Invariant: `revision` is the digest of the base's weights, so an engine
that has other bytes under that path notices before it serves them.
"""

from pathlib import Path
from typing import Literal

import msgspec
from blake3 import blake3

from laminar_py.records.protocols import RefusedError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of the base's names, in the names of adapters' tensors


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of peft's that an engine needs; values other than these change what an adapter means.

    E.g. W + 32 / 16 * B A:
    `AdapterConfig(base_model_name_or_path=base, revision=digest, r=16, lora_alpha=32, target_modules=["q_proj"])`.
    """

    base_model_name_or_path: str  # folder that every host sees
    revision: str  # `base_digest` of it
    r: int
    lora_alpha: float
    target_modules: list[str]
    peft_type: Literal["LORA"] = "LORA"
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    bias: Literal["none"] = "none"

    @property
    def scaling(self) -> float:
        """Factor of B A."""
        return self.lora_alpha / self.r


def holds_adapter(folder: Path) -> bool:
    """True if a version is one of adapters."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read the config of a version. `RefusedError` if it cannot be read or means something else."""
    try:
        return msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=AdapterConfig)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"weights={folder}: {ADAPTER_CONFIG}: {error}; publish plain LoRA adapters") from None


def base_digest(folder: Path) -> str:
    """BLAKE3 over names and contents of the safetensors of a model, on all cores. `RefusedError` without any."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RefusedError(f"base={folder}: no *.safetensors in it; name a folder that every host sees")
    whole = blake3()
    for path in files:
        whole.update(path.name.encode() + blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
    return whole.hexdigest()


def check_base(folder: Path, config: AdapterConfig) -> None:
    """`RefusedError` unless it holds the base of the adapters, as the learner has it."""
    if base_digest(folder) != config.revision:
        raise RefusedError(
            f"base={folder}: holds other weights here than the learner has; let all hosts see the same folder"
        )
