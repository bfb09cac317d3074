"""Columns: numbers per response token that a loss needs and that engine and packer know nothing about.

An algorithm declares each column once (`config.algorithm`). The scoring worker checks the numbers of a reward
function against the declaration, the ledger keeps them, the packer puts each number where its token is predicted,
and the objective reads `terms.columns[name]`. Every scored trajectory has every column that comes from the scorer:
a response without one counts as a failed reward.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN_REWARDS = "token_rewards"  # process rewards, which the packer turns into advantages
TEACHER_LOGPROBS = "teacher_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"

Array: TypeAlias = npt.NDArray[Any]


class Dtype(StrEnum):
    """Types of a column's numbers."""

    FLOAT32 = "float32"
    INT32 = "int32"


class Source(StrEnum):
    """Part of a run that computes a column."""

    SCORER = "scorer"  # the reward function returns it, see `records.scoring.Reward`
    REFERENCE = "reference"  # the reference model computes it; only `reference_logprobs`


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one number per response token, e.g. `Column(name="hints", dtype=Dtype.INT32)`."""

    name: str
    dtype: Dtype = Dtype.FLOAT32
    source: Source = Source.SCORER
    padding: float = 0  # at positions of a microbatch that predict no response token


class TokenValues(msgspec.Struct, frozen=True, array_like=True):
    """A column of one response as it travels, e.g. `TokenValues(Dtype.FLOAT32, b"...")` of 4 L bytes."""

    dtype: Dtype
    data: bytes  # [L] little-endian

    @property
    def array(self) -> Array:
        """[L] numbers, read-only."""
        return np.frombuffer(self.data, self.dtype.value)


class ColumnError(ValueError):
    """A reward function returned a column that does not fit its declaration; the message names it."""


def token_values(array: Array) -> TokenValues:
    """Record of an array [L], whose dtype is one of `Dtype`."""
    return TokenValues(Dtype(array.dtype.name), array.tobytes())


def check_columns(columns: Sequence[Column], given: Mapping[str, Array], *, length: int) -> dict[str, TokenValues]:
    """Check the arrays that a reward function gave, and return the declared ones as records; others are ignored.

    Raises `ColumnError` for a column that is missing, not finite, or of another type or length than `length`.
    """
    found = {}
    for column in columns:
        if column.source is Source.SCORER:
            if column.name not in given:
                raise ColumnError(f"the reward function gave no column {column.name!r}, which the algorithm needs")
            found[column.name] = token_values(check_array(column, given[column.name], length=length))
    return found


def check_array(column: Column, array: Array, *, length: int) -> Array:
    """Cast an array [length] to a column's type. Raises `ColumnError` if its numbers do not fit."""
    if array.shape != (length,):
        raise ColumnError(
            f"column {column.name!r} has shape {array.shape}; return one number for each of {length} tokens"
        )
    integral = array.dtype.kind in "bui"
    if not integral and (array.dtype.kind != "f" or column.dtype is Dtype.INT32):
        raise ColumnError(f"column {column.name!r} holds {array.dtype}; return {column.dtype}")
    if not np.isfinite(array).all():
        raise ColumnError(f"column {column.name!r} holds a number that is not finite")
    with np.errstate(over="ignore"):
        cast = array.astype(column.dtype.value)
    if not np.isfinite(cast).all() or (integral and column.dtype is Dtype.INT32 and (cast != array).any()):
        raise ColumnError(f"column {column.name!r} holds a number beyond {column.dtype}")
    return cast
