"""Implementations by name: built in, or from installed packages that announce them as entry points.

Used by the registries of backends, algorithms and planners. A name is imported when it is asked for and not
before, so a registry costs nothing to import. A package announces `my_name = "my_package.module:OBJECT"` under the
group of a registry; it must be installed on every node of a run, and import without torch.
"""

import importlib
from collections.abc import Mapping
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from laminar_py.config.section import ConfigError

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """Names that a setting may have, e.g. of the backends:

    `Registry(Backend, field="rollout.engine.kind", group="laminar_py.backends", built_in={"local": "a.b:LOCAL"})`.
    `kind` is the class, or the runtime-checkable protocol, that all of them are instances of.
    """

    def __init__(self, kind: type[Kind], *, field: str, group: str, built_in: Mapping[str, str]) -> None:
        self._kind = kind
        self._field = field
        self._group = group
        self._built_in = built_in

    @cached_property
    def _announced(self) -> list[EntryPoint]:
        return sorted(entry_points(group=self._group), key=lambda point: (point.name, point.value))

    def names(self) -> tuple[str, ...]:
        """Built-in names, then those of installed packages."""
        return tuple(dict.fromkeys((*self._built_in, *(point.name for point in self._announced))))

    def get(self, name: str) -> Kind:
        """The implementation of a name. `ConfigError` if there is none, or its package is at fault."""
        offers = [point for point in self._announced if point.name == name]
        if name in self._built_in and offers:
            raise self._error(name, f"{_source(offers[0])} announces a name that is built in", "uninstall it")
        if name in self._built_in:
            module, _, attribute = self._built_in[name].partition(":")
            found = getattr(importlib.import_module(module), attribute)
            assert isinstance(found, self._kind), f"{self._built_in[name]} is no {self._kind.__name__}"
            return found
        if not offers:
            known = ", ".join(self.names())
            remedy = f"choose one of {known}, or install a package that announces it under {self._group}"
            raise self._error(name, "unknown", remedy)
        if len(offers) > 1:
            both = " and ".join(map(_source, offers))
            raise self._error(name, f"{both} announce it", "uninstall all but one")
        return self._load(offers[0])

    def _load(self, point: EntryPoint) -> Kind:
        try:
            found = point.load()
        except Exception as error:  # a package of somebody else's may raise anything
            line = " ".join(f"{type(error).__name__}: {error}".split())
            raise self._error(
                point.name, f"{point.value} of {_source(point)} cannot be imported ({line})", "mend that package"
            ) from error
        if isinstance(found, self._kind):
            return found
        fault = f"{point.value} of {_source(point)} is a {type(found).__name__} and no {self._kind.__name__}"
        raise self._error(point.name, fault, f"name an instance of {self._kind.__name__} in its entry point")

    def _error(self, name: str, fault: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._field}={name}: {fault}; {remedy}")


def find_registry(path: str) -> Registry[Any]:
    """The registry of a room above this one, e.g. `find_registry("laminar_py.engines.registry:BACKENDS")`.

    A config is checked by what it names, which this room must not import.
    """
    module, _, attribute = path.partition(":")
    registry = getattr(importlib.import_module(module), attribute)
    assert isinstance(registry, Registry), path
    return registry


def _source(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else f"entry point {point.value}"
