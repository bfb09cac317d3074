"""Changed positions of a version, put into the packed weights. Called by `LocalModel` in the engine's thread.

A file of changes names flat places in Hugging Face tensors (`records.weights.CHANGES`). `Weights.in_file_order` gives
a view of the served tensors in that order, so a place is found by its coordinates, and nothing of a tensor's size
is made. All files are checked before the first value is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from laminar_py.engines.local.spec import ModelSpec
from laminar_py.engines.local.weights import FileView, Weights
from laminar_py.records.engine import RefusedError
from laminar_py.records.weights import AT, TO


def apply_changes(files: Sequence[Path], weights: Weights, *, spec: ModelSpec) -> None:
    """Write the changes in `files` in turn. `RefusedError` for a change that does not fit, before any is written."""
    views = weights.in_file_order(spec)
    for path in files:
        for name, at, to in _changes(path):
            _check(name, at, to, views, path)
    for path in files:
        for name, at, to in _changes(path):
            for view in views[name]:
                view.put(at, to.to(spec.dtype))  # norms are in fp32, of values in the model's type


def _changes(path: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, places [n] and values [n] of each changed tensor; `check_changes` has checked the file."""
    with safe_open(path, framework="pt") as file:
        for key in file.keys():  # noqa: SIM118 (not a dict)
            if key.endswith(AT):
                name = key.removesuffix(AT)
                yield name, file.get_tensor(key), file.get_tensor(name + TO)


def _check(name: str, at: Tensor, to: Tensor, views: Mapping[str, Sequence[FileView]], path: Path) -> None:
    """Raise `RefusedError` for an unknown tensor, places that do not ascend within it, or values not finite."""
    fault = None
    if name not in views:
        fault = "is no tensor of the model"
    elif len(at) and (at[0] < 0 or at[-1] >= views[name][0].numel or not (at[1:] > at[:-1]).all()):
        fault = f"has places that do not ascend within its {views[name][0].numel} values"
    elif not to.isfinite().all():
        fault = "has values that are not finite"
    if fault is not None:
        raise RefusedError(f"changes={path}: {name} {fault}; load the whole version")
