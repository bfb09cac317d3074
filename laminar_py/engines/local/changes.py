"""Changed positions of a version, put into the packed weights. Called by `LocalModel` in the engine's thread.

A file of changes names flat places in Hugging Face tensors (format: `records/weights.py`). `Weights.in_file_order`
gives views of the served tensors in that order, so places are computed, and nothing of a tensor's size is made.
`engines.changes` has mapped and checked the files.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from laminar_py.engines.local.weights import FileView
from laminar_py.records.engine import CheckedFile

Views: TypeAlias = Mapping[str, Sequence[FileView]]
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def apply_changes(files: Iterable[CheckedFile], views: Views, *, dtype: torch.dtype) -> None:
    """Write the changes in `files` in turn, each value in the model's type `dtype` first."""
    for file in files:
        data = torch.from_numpy(file.data)
        for one in file.tensors:
            at = _cut(data, one.at, one.num, torch.int64)
            to = _cut(data, one.to, one.num, _TYPES[one.dtype]).to(dtype)
            for view in views[one.name]:
                view.put(at, to)


def _cut(data: Tensor, start: int, num: int, dtype: torch.dtype) -> Tensor:
    """View `num` numbers from byte `start` on; a copy where a file does not align them."""
    piece = data[start : start + num * dtype.itemsize]
    return (piece.clone() if start % dtype.itemsize else piece).view(dtype)
