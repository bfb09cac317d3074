"""Changed positions of a version, put into the packed weights. Called by `LocalModel` in the engine's thread.

A file of changes names flat places in Hugging Face tensors (format: `records/weights.py`). `Weights.in_file_order`
gives views of the served tensors in that order, so places are computed, and nothing of a tensor's size is made.
All files are checked before the first value is written.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from laminar_py.engines.checks import ChangedTensor
from laminar_py.engines.local.weights import FileView
from laminar_py.records.engine import RefusedError

Views: TypeAlias = Mapping[str, Sequence[FileView]]
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def apply_changes(
    files: Sequence[tuple[Path, Sequence[ChangedTensor]]], views: Views, *, dtype: torch.dtype
) -> None:
    """Write the changes in `files` in turn, each value in the model's type `dtype` first.

    Raises `RefusedError` for a change that does not fit, before any is written.
    """
    changes = [change for path, tensors in files for change in _read(path, tensors, views)]
    for name, at, to in changes:
        for view in views[name]:
            view.put(at, to.to(dtype))


def _read(path: Path, tensors: Sequence[ChangedTensor], views: Views) -> list[tuple[str, Tensor, Tensor]]:
    """Map the places [n] and values [n] of each changed tensor. Raises `RefusedError` if they do not fit."""
    # Shared: with strict overcommit a private mapping costs the size of this sparse file, that is the model's.
    mapped = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    found = []
    for one in tensors:
        at = _cut(mapped, one.at, one.num, torch.int64)
        to = _cut(mapped, one.to, one.num, _TYPES[one.dtype])
        if (fault := _fault(at, to, views.get(one.name))) is not None:
            raise RefusedError(f"changes={path}: {one.name} {fault}; load the whole version")
        found.append((one.name, at, to))
    return found


def _cut(mapped: Tensor, start: int, num: int, dtype: torch.dtype) -> Tensor:
    """View `num` numbers from byte `start` on; a copy where a file does not align them."""
    piece = mapped[start : start + num * dtype.itemsize]
    return (piece.clone() if start % dtype.itemsize else piece).view(dtype)


def _fault(at: Tensor, to: Tensor, views: Sequence[FileView] | None) -> str | None:
    """Say why changes do not fit: an unknown tensor, places that do not ascend within it, values not finite."""
    if views is None:
        return "is no tensor of the model"
    if len(at) and (at[0] < 0 or at[-1] >= views[0].numel or not (at[1:] > at[:-1]).all()):
        return f"has places that do not ascend within its {views[0].numel} values"
    if not (to - to == 0).all():  # faster than `isfinite`
        return "has values that are not finite"
    return None
