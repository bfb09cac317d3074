"""Public names of a room, each imported when it is first used (PEP 562), so that a room costs nothing to import.

The `__init__.py` of a room lists them as imports under `TYPE_CHECKING`, which type checkers read, and asks this
module for its `__getattr__` in the other branch. Invariant: names are checked and imported from one list.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module


def public_names(room: str) -> Callable[[str], object]:
    """`__getattr__` of a room, which is called for each name that the module does not have yet."""

    @cache
    def sources() -> dict[str, str]:
        return names_of(str(sys.modules[room].__file__))

    def load(name: str) -> object:
        if name not in sources():
            raise AttributeError(f"{room} has no public name {name!r}", name=name, obj=sys.modules[room])
        found = getattr(import_module(sources()[name]), name)
        vars(sys.modules[room])[name] = found
        return found

    return load


def names_of(init: str) -> dict[str, str]:
    """Public names that an `__init__.py` lists, and the module of each."""
    import ast  # here, since a name that a room has costs no parser

    with open(init) as file:
        branches = [line.body for line in ast.parse(file.read()).body if isinstance(line, ast.If)]
    imports = [line for body in branches for line in body if isinstance(line, ast.ImportFrom)]
    return {str(alias.asname): str(line.module) for line in imports for alias in line.names}
