"""Modules that are imported but never used on a CPU: every submodule of a package imports, and has every name.

Used by the stubs of torchvision and triton beside it.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

# what `from package.module import name` gives, from the module's full name and the name
Attribute = Callable[[str, str], object]


class StubModule(types.ModuleType):
    """A module without content that gives out an attribute for every name but Python's own `__names__`."""

    __file__ = __file__  # some importers look for the file of what they import

    def __init__(self, name: str, attribute: Attribute) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__attribute = attribute

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__attribute(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str, attribute: Attribute) -> None:
        self._package = package
        self._attribute = attribute

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return StubModule(spec.name, self._attribute)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(package: str, attribute: Attribute) -> None:
    """From now on every `package.x.y` imports."""
    sys.meta_path.append(_Finder(package, attribute))
