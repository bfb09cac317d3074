"""Tensors of a version's folder, by the headers of its files. Called by the SGLang client and the emulated engine.

A server that is told to load tensors of other names or shapes dies, so that is found out before.
"""

from pathlib import Path
from typing import TypeAlias

from safetensors import SafetensorError, safe_open

from laminar_py.records.engine import RefusedError

WeightsLayout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype


def weights_layout(folder: Path) -> WeightsLayout:
    """Names, shapes and dtypes in the safetensors of `folder`; `RefusedError` if it has none that can be read."""
    layout: WeightsLayout = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                    piece = tensors.get_slice(name)
                    layout[name] = tuple(piece.get_shape()), piece.get_dtype()
    except (OSError, SafetensorError) as error:
        raise RefusedError(f"weights in {folder} cannot be read: {error}; publish them again") from None
    if not layout:
        raise RefusedError(f"no *.safetensors in {folder}; publish it again")
    return layout
