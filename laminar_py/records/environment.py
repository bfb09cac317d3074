"""Records between a replica and the environment of a trajectory: a turn of the model, and what came of it."""

from typing import Any

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.roles import RoleCredit
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the data set as an environment gets it, e.g. `Problem(prompt="17 * 23 =", answer="391")`."""

    prompt: str
    answer: str = ""
    task: str = ""
    fields: dict[str, Any] = {}  # what else the line has
    seed: int = 0  # the same for all samples of a group
    trajectory_id: str = ""


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A response up to the end of a turn of the model, or before the first one, where there is nothing of it.

    All of it goes along, so that an environment that has died can be rebuilt from what it was told.
    """

    trajectory_id: str
    problem: Problem
    response_ids: IntArray  # [L] so far
    spans: tuple[Span, ...]  # cover [0, L)
    logprobs: FloatArray = np.empty(0, np.float32)  # [n] of the last turn of the model


class TurnPart(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a turn that the model is in the midst of, from its token `place` on."""

    trajectory_id: str
    turn_start: int  # response tokens before that turn
    place: int
    ids: IntArray  # [n]
    logprobs: FloatArray  # [n]


class EnvironmentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of an environment to a turn: it wrote `ids`, or it ended the trajectory, or it failed.

    E.g. `EnvironmentTurn(ids=ids, elapsed_s=0.2)` or `EnvironmentTurn(ends=True, reward=1.0, elapsed_s=0.2)`.
    """

    ids: IntArray | None = None  # [n] tokens to append as they are
    follows: int | None = None  # leading tokens of the response that they are behind, see `Span`; None: all
    max_tokens: int | None = None  # the most of the turn that answers it, see `Span`
    listens: bool = False  # it is to be told the next turn as that is sampled
    ends: bool = False
    is_cut: bool = False  # by the cap on turns
    reward: float | None = None  # where it ends; None: the terms of the task judge it
    roles: tuple[RoleCredit, ...] = ()  # of whose rewards that is the sum
    failure: DropReason | None = None  # the trajectory cannot go on
    detail: str = ""
    elapsed_s: float = 0.0  # until it was there: the environment worked, was waited for or rebuilt
