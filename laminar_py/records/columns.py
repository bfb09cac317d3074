"""Columns: numbers beside the tokens of a response that a loss needs and that engine and packer do not know.

An algorithm declares each once (`config.algorithm`). The scoring worker checks what a reward function gives
against that, the ledger keeps it, the packer writes it where its tokens are predicted, and the objective reads
`terms.columns[name]`. Invariant: a trajectory that is scored has every column that is declared of the scorer.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN_REWARDS = "token_rewards"  # of process rewards, which the packer turns into advantages
TEACHER_LOGPROBS = "teacher_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"

Array: TypeAlias = npt.NDArray[Any]


class Dtype(StrEnum):
    """Types of a column's numbers."""

    FLOAT32 = "float32"
    INT32 = "int32"


class Source(StrEnum):
    """Origins of a column."""

    SCORER = "scorer"  # the reward function returns it, see `records.scoring.Reward`
    REFERENCE = "reference"  # the reference model computes it, wherever that runs: `reference_logprobs` alone


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of a number for each token of a response, e.g. `Column(name="hints", dtype=Dtype.INT32)`.

    In a microbatch the number of a token stands at the position that predicts it, `padding` at all others.
    """

    name: str
    dtype: Dtype = Dtype.FLOAT32
    source: Source = Source.SCORER
    padding: float = 0


class TokenValues(msgspec.Struct, frozen=True, array_like=True):
    """A column of one response as it travels, e.g. `TokenValues(Dtype.FLOAT32, b"...")` of 4 L bytes."""

    dtype: Dtype
    data: bytes

    @property
    def array(self) -> Array:
        """[L], read-only."""
        return np.frombuffer(self.data, self.dtype.value)


class ColumnError(ValueError):
    """A reward function gave a column that is not as declared; the message names it."""


def token_values(array: Array) -> TokenValues:
    """An array [L] of one of the types of columns, as it travels."""
    return TokenValues(Dtype(array.dtype.name), array.tobytes())


def check_columns(columns: Sequence[Column], given: Mapping[str, Array], *, length: int) -> dict[str, TokenValues]:
    """The columns that are declared of the scorer, of a response of `length` tokens. Others are passed over.

    Raises `ColumnError` for one that is missing, not of that length, not of its type, or not finite.
    """
    found = {}
    for column in columns:
        if column.source is Source.SCORER:
            if column.name not in given:
                raise ColumnError(f"the reward function gave no column {column.name!r}, which the algorithm needs")
            found[column.name] = token_values(check_array(column, given[column.name], length=length))
    return found


def check_array(column: Column, array: Array, *, length: int) -> Array:
    """Numbers that were given for a column, [length], in its type. Raises `ColumnError`."""
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
