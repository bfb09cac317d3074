"""Checks that engines make before they accept a request or load weights. Pure; called by all engines."""

from pathlib import Path
from typing import TypeAlias

import numpy as np
from safetensors import SafetensorError, safe_open

from laminar_py.records.codec import IntArray
from laminar_py.records.engine import GenerateRequest, RefusedError


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
