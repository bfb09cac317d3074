"""Public names of a room, each imported at its first use (PEP 562), so that importing a room costs nothing.

The `__init__.py` of a room lists the names as imports under `TYPE_CHECKING`, for type checkers. In its other
branch it takes `__getattr__` from this module, which reads the same list.
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

IMPORT = re.compile(r"^    from (\S+) import \w+ as (\w+)$", re.MULTILINE)


def public_names(room: str) -> Callable[[str], object]:
    """Return `__getattr__` for a room's `__init__.py`: it imports a public name at its first use, and keeps it."""

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
    """Return the module of each public name that the `__init__.py` at path `init` lists."""
    return {name: module for module, name in IMPORT.findall(Path(init).read_text())}
