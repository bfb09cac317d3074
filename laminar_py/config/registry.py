"""Registries of implementations by name: built in, or from installed packages that announce them as entry points.

Backends, algorithms, planners, rewards, environments and trackers have a registry each. An implementation is
imported when its name is used, so a registry costs nothing to import and depends on no room above. A package
announces `my_name = "my_package.module:OBJECT"` in the entry point group of a registry. It must be installed on
every node of a run, and import without torch.
"""

import ast
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from laminar_py.config.section import ConfigError, Section

Kind = TypeVar("Kind")
Named = TypeVar("Named", bound=Section)
SECTION = "section"  # in the context of an unknown key's error, with its `NamedSection`


class Registry(Generic[Kind]):
    """Implementations that the setting `field` can name, e.g. backends:

    `Registry(Backend, field="rollout.engine.kind", group="laminar_py.backends", built_in={"local": "a.b:LOCAL"})`.
    All of them are instances of `kind`, which is `type` where implementations are classes.
    """

    def __init__(self, kind: type[Kind], *, field: str, group: str, built_in: Mapping[str, str]) -> None:
        self._kind = kind
        self._field = field
        self._group = group
        self.built_in = built_in  # name -> module:attribute

    @cached_property
    def _announced(self) -> list[EntryPoint]:
        return sorted(entry_points(group=self._group), key=lambda point: (point.name, point.value))

    def names(self) -> tuple[str, ...]:
        """Built-in names, then names of installed packages."""
        return tuple(dict.fromkeys((*self.built_in, *(point.name for point in self._announced))))

    def get(self, name: str) -> Kind:
        """Import the implementation of a name. Raises `ConfigError` for an unknown name or a faulty package."""
        offers = self._offers(name)
        if name in self.built_in and offers:
            raise self._error(name, f"{_source(offers[0])} announces a name that is built in", "uninstall it")
        if name in self.built_in:
            implementation = EntryPoint(name, self.built_in[name], self._group).load()
            assert isinstance(implementation, self._kind), f"{self.built_in[name]} is no {self._kind.__name__}"
            return implementation
        if not offers:
            known = ", ".join(self.names())
            remedy = f"choose one of {known}, or install a package that announces it under {self._group}"
            raise self._error(name, "unknown", remedy)
        if len(offers) > 1:
            both = " and ".join(map(_source, offers))
            raise self._error(name, f"{both} announce it", "uninstall all but one")
        return self._load(offers[0])

    def package_error(self, name: str, error: BaseException) -> BaseException:
        """Return a `ConfigError` that names the package of `name`, if `error` passed through that package's code.

        Returns `error` itself if it is a `ConfigError`, or comes from our own code.
        """
        points = {point.module.partition(".")[0]: point for point in self._offers(name)}
        modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
        point = next((points[top] for module in modules if (top := module.partition(".")[0]) in points), None)
        if point is None or isinstance(error, ConfigError):
            return error
        fault = f"{point.value} of {_source(point)} raised {in_one_line(error)}"
        return self._error(name, fault, "fix that package")

    @contextmanager
    def naming_package(self, name: str) -> Iterator[None]:
        """Context that raises `ConfigError` with the package's name for errors in the code of package `name`."""
        try:
            yield
        except Exception as error:  # a third-party package may raise anything
            shown = self.package_error(name, error)
            if shown is error:
                raise
            raise shown from error

    def _offers(self, name: str) -> list[EntryPoint]:
        return [point for point in self._announced if point.name == name]

    def _load(self, point: EntryPoint) -> Kind:
        """Import an entry point's object. Raises `ConfigError` if the import fails or its type is wrong."""
        try:
            loaded = point.load()
        except Exception as error:  # a third-party package may raise anything
            fault = f"{point.value} of {_source(point)} cannot be imported ({in_one_line(error)})"
            raise self._error(point.name, fault, "fix that package") from error
        if isinstance(loaded, self._kind):
            return loaded
        wanted = "class" if self._kind is type else f"instance of {self._kind.__name__}"
        fault = f"{point.value} of {_source(point)} is no {wanted} but a {type(loaded).__name__}"
        raise self._error(point.name, fault, "name another object in its entry point")

    def _error(self, name: str, fault: str, remedy: str) -> ConfigError:
        return ConfigError(f"{self._field}={name}: {fault}; {remedy}")


def named_section(base: type[Named], *, key: str, registry: Registry[Any]) -> Callable[[object], Named]:
    """Return a validator: it reads a section by the `settings` of the implementation that its `key` names."""

    def read(section: object) -> Named:
        """Convert a section to the settings of the implementation that its `key` names. Raises `ConfigError`."""
        if isinstance(section, base):
            return section
        if not isinstance(section, dict):
            raise ConfigError(f"not a section with a `{key}`")
        name = str(section.get(key, base.model_fields[key].default))
        model: type[Named] = registry.get(name).settings
        try:
            return model.model_validate_json(json.dumps(section, default=str))
        except ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            if isinstance(cause, Exception) and (shown := registry.package_error(name, cause)) is not cause:
                raise shown from error
            if isinstance(cause, ConfigError):
                raise _located(error, cause, name) from error
            raise _with_section(error, model) from error

    return read


@dataclass(frozen=True, slots=True)
class NamedSection:
    """The model of a section in which a key is unknown, and how deep below the section the key is."""

    model: type[BaseModel]
    depth: int


def _with_section(error: ValidationError, model: type[BaseModel]) -> ValidationError:
    """Return the error of an unknown key with its `NamedSection`, else `error`; pydantic forgets the model."""
    unknown = next((one for one in error.errors() if one["type"] == "extra_forbidden"), None)
    if unknown is None or unknown.get("ctx"):
        return error
    context = {SECTION: NamedSection(model, len(unknown["loc"]))}
    kind = PydanticCustomError("extra_forbidden", "unknown key", context)
    line = InitErrorDetails(type=kind, loc=unknown["loc"], input=unknown["input"])
    return ValidationError.from_exception_data(error.title, [line])


def _located(error: ValidationError, fault: ConfigError, name: str) -> ValidationError:
    """Return `error` if it names a field; else the `fault` of a whole section, to which pydantic adds its place.

    E.g. `free=9: not below most=9` is such a fault; the message shows `name` in place of the whole section.
    """
    if error.errors()[0]["loc"]:
        return error
    line = InitErrorDetails(type="value_error", input=name, ctx={"error": fault})
    return ValidationError.from_exception_data(error.title, [line])


def _source(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else f"entry point {point.value}"


def in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def installed_points(group: str) -> list[EntryPoint]:
    """Return a group's entry points, sorted by name, except points whose module cannot be found."""

    def is_installed(point: EntryPoint) -> bool:
        try:
            return find_spec(point.module.partition(".")[0]) is not None
        except ImportError:
            return False

    return sorted(filter(is_installed, entry_points(group=group)), key=lambda point: point.name)


def load_from_file(given: str, *, field: str) -> Callable[..., object]:
    """Import the function of `path/to/file.py:function`, the value of `field`.

    Raises `ConfigError` if it does not exist or its import fails.
    """
    path, name = find_file(given, field=field)
    function: object = getattr(_import(given, path, field=field), name, None)
    if not callable(function):
        raise ConfigError(f"{field}={given}: {_no_function(path, name)}")
    return function


def find_file(given: str, *, field: str) -> tuple[Path, str]:
    """Return file and function of `path/to/file.py:function`, without an import.

    Raises `ConfigError` if there is no such file, or if its text cannot define such a function.
    """
    path, colon, name = given.rpartition(":")
    if not colon:
        raise ConfigError(f"{field}={given}: names no function; write path/to/file.py:function")
    if not Path(path).is_file():
        beside = [str(file) for file in Path(path).parent.glob("*.py")]
        near = get_close_matches(str(Path(path)), beside, n=1)
        meant = f"did you mean {near[0]}? Else " if near else ""
        remedy = f"{meant}name a Python file, relative to the working directory"
        raise ConfigError(f"{field}={given}: no such file as {path}; {remedy}")
    names = _names_of(Path(path)) if path.endswith(".py") else None  # another file is refused by its import
    if names is not None and name not in names:
        raise ConfigError(f"{field}={given}: {_no_function(Path(path), name)}")
    return Path(path), name


def _no_function(path: Path, name: str) -> str:
    """Return the fault of a file without the function `name`, and the remedy."""
    near = get_close_matches(name, _names_of(path) or (), n=1)
    meant = f"did you mean {near[0]!r}? Else " if near else ""
    return f"{path} defines no function {name!r}; {meant}define it or correct the name"


def _names_of(path: Path) -> set[str] | None:
    """Return the names that a Python file may define; None if its text does not tell, as with `import *`."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # the import says so
        return None
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).partition(".")[0])
    is_open = {"*", "__getattr__"} & names or b"globals(" in path.read_bytes()
    return None if is_open else names


def _import(given: str, path: Path, *, field: str) -> ModuleType:
    """Run a user's Python file as a module. Raises `ConfigError` if it is no Python file or raises an error."""
    name = f"laminar_user_{path.stem}"
    spec = spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{field}={given}: {path} is no Python file; give it a name that ends in .py")
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        fault = f"importing {path} failed ({in_one_line(error)})"
        raise ConfigError(f"{field}={given}: {fault}; fix the file") from error
    return module
