"""Rewards by name. Owns how `reward.function` becomes a callable; each scoring process calls it once at its start.

A new reward is a module beside this one and a line in `REWARDS`, or a function in a file of the user's own.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from laminar_py.config.section import ConfigError
from laminar_py.records.scoring import Reward, ScoringRequest
from laminar_py.reward.exact import ExactReward

RewardFunction: TypeAlias = Callable[[ScoringRequest], float | Sequence[float] | Reward]
"""A number for the response, or one for each of its tokens, or a `Reward` with columns beside either."""

REWARDS: dict[str, Callable[[str], RewardFunction]] = {  # name -> from reward.pattern
    "exact": ExactReward,
}


def load_reward(function: str, *, pattern: str) -> RewardFunction:
    """The registered reward of that name, or the function of `path/to/file.py:function`.

    Raises `ConfigError` if there is none, the file cannot be imported, or a reward refuses the pattern.
    """
    if function in REWARDS:
        return REWARDS[function](pattern)
    path, colon, name = function.rpartition(":")
    if not colon:
        known = ", ".join(sorted(REWARDS))
        raise _error(function, "unknown", remedy=f"choose {known} or write path/to/file.py:function")
    if not Path(path).is_file():
        raise _error(function, f"no such file as {path}", remedy="name a Python file, seen from where you are")
    reward: object = getattr(_import(function, Path(path)), name, None)
    if not callable(reward):
        raise _error(function, f"{path} defines no function {name!r}", remedy="define it or mend the name")
    return reward


def _import(function: str, path: Path) -> ModuleType:
    name = f"laminar_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _error(function, f"{path} is no Python file", remedy="let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the module they are defined in
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise _error(function, f"importing {path} failed ({line})", remedy="mend the file") from error
    return module


def _error(function: str, problem: str, *, remedy: str) -> ConfigError:
    return ConfigError(f"reward.function={function}: {problem}; {remedy}")
