"""Records between a replica and a trajectory's environment: a turn of the model, and the environment's answer."""

from typing import Any, Protocol

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import RoleCredit
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import DropReason


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the data set as an environment gets it, e.g. `Problem(prompt="17 * 23 =", answer="391")`."""

    prompt: str
    answer: str = ""
    task: str = ""
    fields: dict[str, Any] = {}  # other fields of the line
    seed: int = 0  # the same for all samples of a group
    trajectory_id: str = ""


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Request to an environment: the response up to the end of the model's turn, empty before the first turn.

    E.g. `ModelTurn(trajectory_id="g3.1", problem=problem, response_ids=ids, spans=(Span(7, 0, 41),))`. The request
    has the whole response, so that another process can rebuild a crashed environment.
    """

    trajectory_id: str
    problem: Problem
    response_ids: IntArray  # [L so far]
    spans: tuple[Span, ...]  # cover [0, L so far)
    logprobs: FloatArray = np.empty(0, np.float32)  # [n] of the model's last turn


class EnvironmentTurn(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of an environment to a turn: it wrote `ids`, it ended the trajectory, or it failed.

    E.g. `EnvironmentTurn(ids=ids, elapsed_s=0.2)` or `EnvironmentTurn(ends=True, reward=1.0, elapsed_s=0.2)`.
    """

    ids: IntArray | None = None  # [n] tokens to append without a change
    follows: int | None = None  # number of leading response tokens that `ids` follow, see `Span`; None: all
    max_tokens: int | None = None  # cap on the tokens of the model's next turn, see `Span.turn_limit`
    stop: tuple[str, ...] = ()  # stop strings of the model's next turn, see `Span.stop`
    ends: bool = False  # the trajectory ends
    is_cut: bool = False  # the cap on turns ended the trajectory
    reward: float | None = None  # with `ends`; None: the reward's terms score the response
    roles: tuple[RoleCredit, ...] = ()  # rewards by role, which sum to `reward`
    failure: DropReason | None = None  # the trajectory is dropped for this reason
    detail: str = ""
    elapsed_s: float = 0.0  # seconds until the answer, including waits and rebuilding


class Environments(Protocol):
    """Access of a replica to the environments of its trajectories, which run in any process."""

    async def answer(self, turn: ModelTurn) -> EnvironmentTurn:
        """Send a turn to its trajectory's environment, which starts at the first turn; return the answer.

        A repeated turn gets the same answer again, and the environment does not see the turn twice.
        """
        ...

    async def forget(self, trajectory_id: str) -> None:
        """Release the environment of a trajectory that has ended and is stored."""
        ...
