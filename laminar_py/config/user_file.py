"""Functions of the user's own, by the path of a Python file: rewards, tools."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from laminar_py.config.section import ConfigError


def load_from_file(given: str, *, field: str) -> Callable[..., object]:
    """The function of `path/to/file.py:function`, which `field` names.

    Raises `ConfigError` if there is none, or its import fails.
    """
    path, colon, name = given.rpartition(":")
    if not colon:
        raise ConfigError(f"{field}={given}: names no function; write path/to/file.py:function")
    if not Path(path).is_file():
        remedy = "name a Python file, seen from where you are"
        raise ConfigError(f"{field}={given}: no such file as {path}; {remedy}")
    function: object = getattr(_import(given, Path(path), field=field), name, None)
    if not callable(function):
        raise ConfigError(f"{field}={given}: {path} defines no function {name!r}; define it or mend the name")
    return function


def _import(given: str, path: Path, *, field: str) -> ModuleType:
    name = f"laminar_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{field}={given}: {path} is no Python file; let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the module they are defined in
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{field}={given}: importing {path} failed ({line}); mend the file") from error
    return module
