"""Weight versions: records of a publish and a pull, sources of weights and of tensors, versions of adapters.

A version may hold only adapters, in peft's own format. The learner writes the files and engines read them. The
config in them names the base model by path and digest, so an engine with other bytes under this path refuses the
version (`tests/engines/engine_conformance.py`).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
from blake3 import blake3

from laminar_py.records.engine import RefusedError


class Published(msgspec.Struct, frozen=True):
    """A version that is complete in the root relay's store, e.g. `Published(7, digest, 494_032_896, 0.012)`."""

    version: int
    digest: str
    num_bytes: int
    stall_s: float  # seconds that the learner waited for the publish


class PulledVersion(msgspec.Struct, frozen=True):
    """A complete version in the host's shared memory, e.g. `PulledVersion(7, "/dev/shm/laminar-x/v7", digest)`.

    With `changes`, the folder at `path` may still be in the making: a pull without a base waits for it.
    """

    version: int
    path: str
    digest: str  # digest that the files have been verified against
    changes: tuple[str, ...] = ()  # files of changes to apply in turn to the base that the pull named


# A file of changes lies beside the folders of versions, as `changes-<N>.safetensors`: loaders read all safetensors
# files of a folder. For each changed tensor it has `<name>.at`, [n] I64 ascending places
# in the flattened tensor, and `<name>.to`, [n] values there in the dtype of the version; a tensor without
# changes is left out. Bytes `<n>.unused` belong to no tensor: a hole between places and values, so that both can
# be written before their number is known. Its metadata are `base` and `version`, decimal.
AT, TO, UNUSED = ".at", ".to", ".unused"


class VersionLostError(Exception):
    """No relay has the requested version any more."""


class WeightSource(Protocol):
    """Source of weights for a replica: its host's relay, or a folder in tests.

    All methods raise `RuntimeError` with the reason if the relay cannot hold a version.
    """

    async def wait_newer(self, version: int) -> int:
        """Wait for a complete version above `version` (-1: any) on this host, and return the newest one."""
        ...

    async def pull(self, version: int | None = None, *, base: int = -1) -> PulledVersion:
        """Pull a version, by default the newest; its files stay on this host until the next pull.

        The engine serves `base` (-1: none): where the host has all changes since, the answer names them, and its
        folder may be incomplete. Raises `VersionLostError` if no relay has the version any more.
        """
        ...


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's names of adapter tensors are this prefix and the name in the base model


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of peft's config that an engine needs, and fields for which only plain LoRA's value is allowed.

    E.g. for weights `W + 32 / 16 * B A`:
    `AdapterConfig(base_model_name_or_path=base, revision=digest, r=16, lora_alpha=32, target_modules=["q_proj"])`.
    """

    base_model_name_or_path: str  # folder that every host sees
    revision: str  # `base_digest` of this folder
    r: int  # rank
    lora_alpha: float
    target_modules: list[str]
    peft_type: Literal["LORA"] = "LORA"
    use_rslora: Literal[False] = False
    use_dora: Literal[False] = False
    bias: Literal["none"] = "none"

    @property
    def scaling(self) -> float:
        """Factor of the product B A, which is added to the base weight."""
        return self.lora_alpha / self.r


def holds_adapter(folder: Path) -> bool:
    """True if the version in a folder holds only adapters, not whole weights."""
    return (folder / ADAPTER_CONFIG).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read a version's `adapter_config.json`. Raises `RefusedError` if it is unreadable or no plain LoRA."""
    try:
        return msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes(), type=AdapterConfig)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"weights={folder}: {ADAPTER_CONFIG}: {error}; publish plain LoRA adapters") from None


SAMPLE_BYTES = 16 * 2**10  # of a tensor: a bf16 version changes a hundred of 8,000 numbers
_OF_ADAPTER = re.compile(r"\.lora_[AB]\.weight$")


def tensor_samples(folder: Path) -> dict[str, str]:
    """Return, for each tensor in a version, a hash of its first bytes, by its name in the base model.

    Other bytes of a tensor may differ between versions with equal samples.
    """
    found: dict[str, str] = defaultdict(str)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            for name, entry in sorted(msgspec.json.decode(file.read(size)).items()):
                if name != "__metadata__":
                    begin, end = entry["data_offsets"]
                    file.seek(8 + size + begin)
                    sample = file.read(min(SAMPLE_BYTES, end - begin))
                    own = _OF_ADAPTER.sub(".weight", name.removeprefix(PREFIX))
                    found[own] += blake3(sample).hexdigest(length=8)
    return found


def base_digest(folder: Path) -> str:
    """BLAKE3 over names and contents of a model's safetensors. Raises `RefusedError` if the folder has none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise RefusedError(f"base={folder}: no *.safetensors in it; name a folder that every host sees")
    digest = blake3()
    for path in files:
        digest.update(path.name.encode() + blake3(max_threads=blake3.AUTO).update_mmap(path).digest())
    return digest.hexdigest()


def check_base(folder: Path, config: AdapterConfig) -> None:
    """Raise `RefusedError` unless the folder holds the base model that the learner's adapters belong to."""
    if base_digest(folder) != config.revision:
        raise RefusedError(
            f"base={folder}: the weights here differ from the learner's; let all hosts see the same folder"
        )


# ---- tensors that the learner publishes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as files have it, e.g. `StoredTensor("lm_head.weight", torch.bfloat16, (151_936, 896))`."""

    name: str
    dtype: Any  # of torch
    shape: tuple[int, ...]


Rows: TypeAlias = tuple[str, int, Any]
"""Name of a stored tensor, first element of the flattened tensor, and a torch tensor with values from there on."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor of the learner, and the tensors that it becomes in the files: for fused experts there are several.

    E.g. `TensorSource((StoredTensor("model.norm.weight", torch.bfloat16, (4096,)),), read)`.

    `read` yields this rank's rows of the stored tensors, in any float dtype and any shape. It may be collective,
    so all ranks read all sources, in the same order. Rows may alias the learner's memory: copy them before the
    next step.
    """

    stored: tuple[StoredTensor, ...]
    read: Callable[[], Iterable[Rows]]

    @classmethod
    def whole(cls, name: str, tensor: Any) -> "TensorSource":
        """Make the source of a torch tensor that is published as it is."""
        return cls((StoredTensor(name, tensor.dtype, tuple(tensor.shape)),), lambda: [(name, 0, tensor)])
