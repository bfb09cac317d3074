"""Checks of changed positions before an engine stands still for them; called by engines that take changes.

The format is in `records/weights.py`.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.engine import ChangedTensor, CheckedChanges, CheckedFile, RefusedError
from laminar_py.records.weights import AT, TO, UNUSED

_EXPONENTS: dict[str, np.unsignedinteger[Any]] = {  # of a number that is not finite all these bits are set
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F32": np.uint32(0x7F80_0000),
    "F64": np.uint64(0x7FF0_0000_0000_0000),
}
# of a file that is gone, empty or has another header
_UNREADABLE = (OSError, ValueError, msgspec.DecodeError, RecursionError)


class _Entry(msgspec.Struct, kw_only=True):
    """A tensor in a file's header, or its metadata."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)
    base: str = ""
    version: str = ""


_decode_header = msgspec.json.Decoder(dict[str, _Entry]).decode


def check_changes(files: Sequence[Path], version: int, *, served: int, sizes: Mapping[str, int]) -> CheckedChanges:
    """Map and check `files` for a model whose tensors have `sizes` values; they lead from `served` to `version`.

    Raises `RefusedError` if they do not, a file is no file of changes, or a change does not fit: an unknown
    tensor, places that do not ascend within it, or values that are not finite.
    """
    reached, found = str(served), []
    for path in files:
        base, leads_to, file = _read(path)
        if base != reached:
            raise RefusedError(f"changes={path}: lead from version {base}, not {reached}; load the whole version")
        reached = leads_to
        found.append(file)
    if reached != str(version):
        raise RefusedError(f"changes lead to version {reached}, not {version}; load the whole version")
    for file in found:
        for one in file.tensors:
            if (fault := _fault(file.data, one, sizes.get(one.name))) is not None:
                raise RefusedError(f"changes={file.path}: {one.name} {fault}; load the whole version")
    return CheckedChanges(base=served, version=version, files=tuple(found))


def check_served(changes: CheckedChanges, *, served: int) -> None:
    """Raise `RefusedError` if an engine no longer serves the base of `changes`."""
    if changes.base != served:
        raise RefusedError(
            f"version {changes.version}: its changes lead from version {changes.base}, but {served} is served;"
            " load the whole version"
        )


def _read(path: Path) -> tuple[str, str, CheckedFile]:
    """Map a file, and return its base, its version and its tensors. Raises `RefusedError` if it has none.

    `safe_open` takes longer for the tensors of one file than an engine for the changes.
    """
    try:
        data = np.asarray(np.memmap(path, np.uint8, mode="r+"))  # shared: its pages are not charged again
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        entries = _decode_header(data[8:start].tobytes())
    except _UNREADABLE as error:
        raise RefusedError(f"changes={path}: cannot be read: {error}; load the whole version") from None
    metadata, tensors = entries.pop("__metadata__", _Entry()), []
    names = {key.removesuffix(AT).removesuffix(TO) for key in entries if not key.endswith(UNUSED)}
    for name in sorted(names):
        at, to = entries.get(name + AT, _Entry()), entries.get(name + TO, _Entry())
        num, (at_begin, *_), (to_begin, *_) = math.prod(at.shape), at.data_offsets, to.data_offsets
        is_known = at.dtype == "I64" and to.dtype in _EXPONENTS
        ends = at_begin + 8 * num, to_begin + (_EXPONENTS[to.dtype].itemsize * num if is_known else 0)
        fits = ends == (at.data_offsets[1], to.data_offsets[1]) and start + max(ends) <= len(data)
        fits = fits and min(at_begin, to_begin, num) >= 0
        if not (fits and is_known and at.shape == to.shape):
            raise RefusedError(f"changes={path}: {name} has no place for each value; load the whole version")
        begins = {"at": start + at_begin, "to": start + to_begin}
        tensors.append(ChangedTensor(name=name, dtype=to.dtype, num=num, **begins))
    return metadata.base, metadata.version, CheckedFile(path, tuple(tensors), data)


def _fault(data: npt.NDArray[np.uint8], one: ChangedTensor, size: int | None) -> str | None:
    """Say why the changes of a tensor with `size` values do not fit; None if they do."""
    if size is None:
        return "is no tensor of the model"
    at = data[one.at : one.at + 8 * one.num].view(np.int64)
    if one.num and (at[0] < 0 or at[-1] >= size or not (at[1:] > at[:-1]).all()):
        return f"has places that do not ascend within its {size} values"
    exponent = _EXPONENTS[one.dtype]
    bits = data[one.to : one.to + exponent.itemsize * one.num].view(exponent.dtype)
    return "has values that are not finite" if ((bits & exponent) == exponent).any() else None
