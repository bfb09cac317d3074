"""Columns: numbers per response token that a loss needs and that engine and packer know nothing about.

An algorithm declares each column once (`config.algorithm`). The scorer checks the numbers of a reward function
against the declaration, the ledger keeps the numbers, the packer puts each number where its token is predicted,
and the objective reads `LossInputs.columns[name]`. Every scored trajectory has all columns whose source is the
scorer: a response that lacks a column counts as a failed reward.
"""

from enum import StrEnum
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

TOKEN_REWARDS = "token_rewards"  # process rewards, which the packer turns into advantages
TEACHER_LOGPROBS = "teacher_logprobs"
REFERENCE_LOGPROBS = "reference_logprobs"
PLACES = "places"  # of tokens in their response
ACTORS = "actors"  # numbers of the roles that drew them
VALUES = "values"  # of the critic at the start of the step
VALUE_TARGETS = "value_targets"  # numbers to which the critic regresses

Array: TypeAlias = npt.NDArray[Any]


class Dtype(StrEnum):
    """Types of a column's numbers."""

    FLOAT32 = "float32"
    INT32 = "int32"


class Source(StrEnum):
    """Part of a run that computes a column."""

    SCORER = "scorer"  # the reward function returns it, see `records.scoring.Reward`
    REFERENCE = "reference"  # the reference model computes it
    TEACHER = "teacher"  # the teacher computes it
    PACKER = "packer"  # it follows from the response's spans and roles
    CRITIC = "critic"  # the value model computes it at the start of a step


MODEL_COLUMNS = {Source.REFERENCE: REFERENCE_LOGPROBS, Source.TEACHER: TEACHER_LOGPROBS}
"""The column of each frozen model: log-probabilities of response tokens."""
COMPUTED = {  # by source: the names of the columns that it gives
    **{source: (name,) for source, name in MODEL_COLUMNS.items()},
    Source.PACKER: (PLACES, ACTORS),
    Source.CRITIC: (VALUES, VALUE_TARGETS),
}


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of one number per response token, e.g. `Column(name="hints", dtype=Dtype.INT32)`."""

    name: str
    dtype: Dtype = Dtype.FLOAT32
    source: Source = Source.SCORER
    padding: float = 0  # at positions of a microbatch that predict no response token


class TokenValues(msgspec.Struct, frozen=True, array_like=True):
    """A column of one response in bytes, e.g. `TokenValues(Dtype.FLOAT32, b"...")` with 4 L bytes."""

    dtype: Dtype
    data: bytes  # [L] little-endian

    @property
    def array(self) -> Array:
        """[L] numbers, read-only."""
        return np.frombuffer(self.data, self.dtype.value)


class ColumnError(ValueError):
    """A reward function returned a column that does not fit its declaration; the message names the column."""


def token_values(array: Array) -> TokenValues:
    """Copy an array [L] into a record. Raises ValueError unless its dtype is one of `Dtype`."""
    return TokenValues(Dtype(array.dtype.name), array.tobytes())
