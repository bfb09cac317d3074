"""Checks that engines make before they accept a request or load weights. Pure; called by all engines."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest, RefusedError
from laminar_py.records.weights import AT, TO, UNUSED


def check_request(request: GenerateRequest, *, max_len: int, vocab: int) -> None:
    """Raise `RefusedError` for a request that an engine of `max_len` tokens and `vocab` ids can never serve."""
    rid, sampling = request.rid, request.sampling
    num_tokens = len(request.prompt_ids) + len(request.prefix_ids)
    if num_tokens > max_len:
        raise RefusedError(
            f"rid={rid}: prompt and prefix have {num_tokens} tokens, above rollout.max_len={max_len};"
            " raise rollout.max_len"
        )
    if not len(request.prompt_ids):
        raise RefusedError(f"rid={rid}: the prompt is empty; give it at least one token")
    if _is_outside(request.prompt_ids, vocab) or _is_outside(request.prefix_ids, vocab):
        raise RefusedError(
            f"rid={rid}: a token id is outside the vocabulary of {vocab}; use the tokenizer of model.path"
        )
    are_cuts_valid = 0 < sampling.top_p <= 1 and sampling.top_k >= 0 and 0 <= sampling.min_p < 1
    if sampling.temperature < 0 or not are_cuts_valid:
        raise RefusedError(f"rid={rid}: {sampling} is outside the bounds of rollout.sampling; correct it")


def response_limit(request: GenerateRequest, *, max_len: int) -> int:
    """Response tokens, prefix included, at which a request ends with LENGTH."""
    return min(request.sampling.max_new_tokens, max_len - len(request.prompt_ids))


def check_load(version: int, *, served: int, num_running: int) -> None:
    """Raise `RuntimeError` if requests run unpaused, `ValueError` for a version older than the `served` one."""
    if num_running:
        raise RuntimeError(f"version {version} cannot load while {num_running} requests run; pause first")
    if version < served:
        raise ValueError(f"version {version} is older than the served version {served}; load a newer version")


def _is_outside(ids: IntArray, vocab: int) -> bool:
    """True if an id is negative or at least `vocab`. Read as unsigned, a negative id is large."""
    return len(ids) > 0 and bool(np.maximum.reduce(ids.view(np.uint32)) >= vocab)


WeightsLayout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]  # name -> shape, dtype


def weights_layout(folder: Path, *, before: WeightsLayout | None = None) -> WeightsLayout:
    """Read names, shapes and dtypes of all tensors in the safetensors headers of `folder`.

    A server crashes on tensors of other names or shapes, so engines compare them first. Raises `RefusedError` if
    there is no file, a file cannot be read, or the layout differs from `before`, that of the version before.
    """
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
        raise RefusedError(f"no *.safetensors in {folder}; publish the version again")
    if before not in (None, layout):
        raise RefusedError(
            f"weights in {folder}: has other tensors than the version before; publish the same tensors"
        )
    return layout


class _Entry(msgspec.Struct, kw_only=True):
    """A tensor in a file's header, or its metadata."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)
    base: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedTensor:
    """Changes of a tensor in a file, e.g. `ChangedTensor(name=name, dtype="BF16", num=3, at=88, to=112)`."""

    name: str
    dtype: str  # of the values, as safetensors names it
    num: int  # values
    at: int  # first byte of the places
    to: int  # first byte of the values


def read_changes(files: Sequence[Path], version: int, *, served: int) -> list[list[ChangedTensor]]:
    """Read the headers of `files` of changes, which lead in turn from the `served` version to `version`.

    Raises `RefusedError` if they do not, or a file is no file of changes. Engines check places and values.
    """
    reached, found = str(served), []
    for path in files:
        base, leads_to, tensors = _read_header(path)
        if base != reached:
            raise RefusedError(f"changes={path}: lead from version {base}, not {reached}; load the whole version")
        reached = leads_to
        found.append(tensors)
    if reached != str(version):
        raise RefusedError(f"changes lead to version {reached}, not {version}; load the whole version")
    return found


def _read_header(path: Path) -> tuple[str, str, list[ChangedTensor]]:
    """Read base, version and tensors from a file with changes. Raises `RefusedError` if it is none.

    `safe_open` takes longer for the tensors of one file than an engine for the changes.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            entries = _decode_header(file.read(min(length, size)))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RefusedError(f"changes={path}: cannot be read: {error}; load the whole version") from None
    metadata, start, tensors = entries.pop("__metadata__", _Entry()), 8 + length, []
    names = {key.removesuffix(AT).removesuffix(TO) for key in entries if not key.endswith(UNUSED)}
    for name in sorted(names):
        at, to = entries.get(name + AT, _Entry()), entries.get(name + TO, _Entry())
        num, (at_begin, *_), (to_begin, *_) = math.prod(at.shape), at.data_offsets, to.data_offsets
        ends = at_begin + 8 * num, to_begin + VALUE_BYTES.get(to.dtype, 0) * num
        fits = ends == (at.data_offsets[1], to.data_offsets[1]) and start + max(ends) <= size
        fits = fits and min(at_begin, to_begin, num) >= 0
        if not fits or at.dtype != "I64" or to.dtype not in VALUE_BYTES or at.shape != to.shape:
            raise RefusedError(f"changes={path}: {name} has no place for each value; load the whole version")
        begins = {"at": start + at_begin, "to": start + to_begin}
        tensors.append(ChangedTensor(name=name, dtype=to.dtype, num=num, **begins))
    return metadata.base, metadata.version, tensors


VALUE_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}  # types of values in a version
_decode_header = msgspec.json.Decoder(dict[str, _Entry]).decode
