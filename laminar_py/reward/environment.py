"""The term `environment`: the reward with which the environment ended the trajectory."""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from laminar_py.config.reward import RewardKind, TermConfig
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import FinishReason


class EnvironmentTerm(TermConfig):
    """The reward of the environment, which ended the trajectory with it."""

    kind: str = "environment"
    cut: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Value of a trajectory that a cap ended, of tokens, turns or seconds."""


def make_reward(term: EnvironmentTerm) -> Callable[[ScoringRequest], float | dict[str, float]]:
    """The function of a term."""

    def environment_reward(request: ScoringRequest) -> float | dict[str, float]:
        if request.roles:
            return {credit.role: credit.reward for credit in request.roles}
        if request.environment_reward is not None:
            return request.environment_reward
        if request.finish_reason is FinishReason.LENGTH:
            return term.cut
        raise ValueError("the environment ended without a reward; return End(reward), or name other terms")

    return environment_reward


ENVIRONMENT = RewardKind(settings=EnvironmentTerm, make=make_reward)
