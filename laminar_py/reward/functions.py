"""The term `function`: a function of the user's own, in a Python file."""

from typing import cast

from laminar_py.config.own_file import load_object
from laminar_py.config.reward import FunctionTerm, RewardKind
from laminar_py.reward.outcome import RewardFunction


def load_function(term: FunctionTerm) -> RewardFunction:
    """The function of `path/to/file.py:function`. Raises `ConfigError` if there is none, or its import fails."""
    return cast(RewardFunction, load_object(term.path, field="reward.use", what="function"))


FUNCTION_KIND = RewardKind(settings=FunctionTerm, make=load_function)
