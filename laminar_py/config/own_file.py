"""Objects in Python files of the user's own, named as `path/to/file.py:name`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from laminar_py.config.section import ConfigError


def load_object(given: str, *, field: str, what: str) -> object:
    """The object of `path/to/file.py:name`, a `what` such as "function". Raises `ConfigError` that names `field`.

    The file is imported under a name of its own, anew each time.
    """
    path, colon, name = given.rpartition(":")
    if not colon:
        raise _error(field, given, f"names no {what}", remedy=f"write path/to/file.py:{what}")
    if not Path(path).is_file():
        raise _error(field, given, f"no such file as {path}", remedy="name a Python file, seen from where you are")
    found: object = getattr(_import(field, given, Path(path)), name, None)
    if not callable(found):
        raise _error(field, given, f"{path} defines no {what} {name!r}", remedy="define it or mend the name")
    return found


def _import(field: str, given: str, path: Path) -> ModuleType:
    name = f"laminar_{field.partition('.')[0]}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise _error(field, given, f"{path} is no Python file", remedy="let its name end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the module they are defined in
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise _error(field, given, f"importing {path} failed ({line})", remedy="mend the file") from error
    return module


def _error(field: str, given: str, problem: str, *, remedy: str) -> ConfigError:
    return ConfigError(f"{field}={given}: {problem}; {remedy}")
