"""The kind `class`: an environment of the user's own, in a Python file."""

from collections.abc import Callable
from functools import partial

from laminar_py.config.environment import ClassEnvironment, EnvironmentKind
from laminar_py.config.own_file import load_object
from laminar_py.config.sandbox import SandboxConfig
from laminar_py.config.section import ConfigError
from laminar_py.environment.protocol import Environment


def load_class(settings: ClassEnvironment, sandbox: SandboxConfig) -> Callable[[], Environment]:
    """Maker of environments of `path/to/file.py:Class`. Raises `ConfigError` where there is none."""
    found = load_object(settings.path, field="environment", what="class")
    missing = next((name for name in ("reset", "step") if not callable(getattr(found, name, None))), None)
    if missing is not None or not callable(found):
        raise ConfigError(f"environment={settings.path}: has no {missing}; define reset and step in a class")
    return partial(found, **settings.arguments)


CLASS_KIND = EnvironmentKind(settings=ClassEnvironment, make=load_class)
