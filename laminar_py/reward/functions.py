"""The term `function`: a function of the user's own, in a Python file."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from laminar_py.config.reward import FunctionTerm, RewardKind
from laminar_py.config.section import ConfigError
from laminar_py.reward.outcome import RewardFunction


def load_function(term: FunctionTerm) -> RewardFunction:
    """The function of `path/to/file.py:function`. Raises `ConfigError` if there is none, or its import fails."""
    path, colon, name = term.path.rpartition(":")
    if not colon:
        raise _error(term.path, "names no function", remedy="write path/to/file.py:function")
    if not Path(path).is_file():
        raise _error(term.path, f"no such file as {path}", remedy="name a Python file, seen from where you are")
    function: object = getattr(_import(term.path, Path(path)), name, None)
    if not callable(function):
        raise _error(term.path, f"{path} defines no function {name!r}", remedy="define it or mend the name")
    return function


def _import(given: str, path: Path) -> ModuleType:
    name = f"laminar_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _error(given, f"{path} is no Python file", remedy="let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the module they are defined in
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise _error(given, f"importing {path} failed ({line})", remedy="mend the file") from error
    return module


def _error(given: str, problem: str, *, remedy: str) -> ConfigError:
    return ConfigError(f"reward.use={given}: {problem}; {remedy}")


FUNCTION_KIND = RewardKind(settings=FunctionTerm, make=load_function)
