"""The terms `environment` and `function`."""

import inspect
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from laminar_py.config.registry import load_from_file
from laminar_py.config.reward import FunctionTerm, RewardKind, TermConfig
from laminar_py.config.section import ConfigError
from laminar_py.records.scoring import ScoringRequest
from laminar_py.records.trajectory import FinishReason
from laminar_py.reward.outcome import RewardFunction

THEIRS = ("completions", "prompts", "data_source")  # first arguments in TRL and verl


class EnvironmentTerm(TermConfig):
    """The reward with which the environment ended the trajectory."""

    kind: str = "environment"
    cut: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Value of a trajectory that a cap on tokens, turns or seconds ended."""


def make_environment(term: EnvironmentTerm) -> Callable[[ScoringRequest], float | dict[str, float]]:
    """Make the reward function of the term `environment`.

    It returns rewards by role, the one reward, or `cut` after a cap, and raises `ValueError` without any.
    """

    def environment_reward(request: ScoringRequest) -> float | dict[str, float]:
        if request.roles:
            return {credit.role: credit.reward for credit in request.roles}
        if request.environment_reward is not None:
            return request.environment_reward
        if request.finish_reason is FinishReason.LENGTH:
            return term.cut
        raise ValueError("the environment ended without a reward; return End(reward), or name other terms")

    return environment_reward


ENVIRONMENT = RewardKind(settings=EnvironmentTerm, make=make_environment)


def load_function(term: FunctionTerm) -> RewardFunction:
    """Load `path/to/file.py:function`.

    Raises `ConfigError` if the import fails, or the file has no such function of one `ScoringRequest`.
    """
    function = load_from_file(term.path, field="reward.use")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return function
    try:
        signature.bind(None)
    except TypeError:
        fits = False
    else:
        fits = next(iter(signature.parameters)) not in THEIRS
    if not fits:
        raise ConfigError(
            f"reward.use={term.path}: takes {signature}, not one request, as here; write def score(request:"
            " ScoringRequest) -> float, which scores one response (docs/rewards.md)"
        )
    return function


FUNCTION_KIND = RewardKind(settings=FunctionTerm, make=load_function)
