"""The kind `class`: an environment of the user's own, in a Python file."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

from laminar_py.config.environment import ClassEnvironment, EnvironmentHome, EnvironmentKind
from laminar_py.config.registry import load_from_file
from laminar_py.config.section import ConfigError
from laminar_py.environment.protocol import Environment


@asynccontextmanager
async def open_class(
    settings: ClassEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Maker of environments of `path/to/file.py:Class`. Raises `ConfigError` where there is none."""
    found = load_from_file(settings.path, field="environment.path")
    missing = next((name for name in ("reset", "step") if not callable(getattr(found, name, None))), None)
    if missing is not None:
        raise ConfigError(f"environment.path={settings.path}: has no {missing}; name a class with reset and step")
    yield cast(Callable[[], Environment], partial(found, **settings.arguments))


CLASS_KIND = EnvironmentKind(settings=ClassEnvironment, open=open_class)
