"""Tensors of a model folder, by the headers of its safetensors, without torch: for checks before a run."""

import math
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.config.section import ConfigError

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"  # transformers' names; the second one is a suffix
StoredTensor: TypeAlias = tuple[int, npt.NDArray[np.uint8]]
"""(number of elements, bytes as they are in the file)."""


class _Header(msgspec.Struct):
    shape: list[int]
    data_offsets: tuple[int, int]  # in the bytes behind all headers


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors in all safetensors of a folder; a damaged file adds none, and its reader refuses it."""
    found: dict[str, StoredTensor] = {}
    for path in folder.glob("*.safetensors"):
        try:
            data = np.memmap(path, np.uint8, "r")
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            headers = msgspec.json.decode(data[8:start].tobytes(), type=dict[str, msgspec.Raw])
            headers.pop("__metadata__", None)
            for name, raw in headers.items():
                header = msgspec.json.decode(raw, type=_Header)
                first, end = header.data_offsets
                found[name] = math.prod(header.shape), data[start + first : start + end]
        except (OSError, ValueError):
            continue
    return found


def check_tied_head(folder: Path, *, field: str = "model.path") -> None:
    """Refuse a folder whose config ties the output head to the embedding, and whose files have two of them.

    transformers would train the two apart, and engines would sample from the embedding. Raises `ConfigError`.
    """
    tensors = stored_tensors(folder)
    name = next((name for name in tensors if name.endswith(EMBEDDING)), None)
    if name is not None and HEAD in tensors and not np.array_equal(tensors[HEAD][1], tensors[name][1]):
        raise ConfigError(
            f"{field}={folder}: config.json ties the output head to the embedding, but {HEAD} and {name} differ;"
            f" set tie_word_embeddings to false in config.json, or take {HEAD} out of the safetensors"
        )


def missing_weight(folder: Path, name: str) -> ConfigError:
    """Make the error for a weight that no file has."""
    return ConfigError(f"model.path={folder}: its safetensors have no {name}; name a folder with all weights")
