"""The term `function`: a function of the user's own, in a Python file."""

from laminar_py.config.registry import load_from_file
from laminar_py.config.reward import FunctionTerm, RewardKind
from laminar_py.reward.outcome import RewardFunction


def load_function(term: FunctionTerm) -> RewardFunction:
    """The function of `path/to/file.py:function`. Raises `ConfigError` if there is none, or its import fails."""
    return load_from_file(term.path, field="reward.use")


FUNCTION_KIND = RewardKind(settings=FunctionTerm, make=load_function)
