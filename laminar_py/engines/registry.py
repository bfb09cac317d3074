"""Backends by name: what makes an inference engine one that a run can use. Imports no torch and no HTTP client.

A backend is one folder with a `Backend` in its `backend.py` and a line in `BACKENDS`, or an installed package that
announces one as `laminar_py.backends`. The controller, `laminar doctor` and every node's survey import a backend's
module; only `open` imports its implementation, in the replica's process.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from laminar_py.config.engine import EngineConfig
from laminar_py.config.registry import Registry
from laminar_py.config.run import RunConfig
from laminar_py.records.protocols import InferenceEngine

Check: TypeAlias = Callable[[RunConfig], None]


@dataclass(frozen=True, slots=True)
class EngineLaunch:
    """Facts for opening an engine, e.g. `EngineLaunch(Path("model"), Path("logs"), index=3, secret=None)`."""

    model_dir: Path
    logs: Path  # folder for what the engine writes of itself
    index: int  # of the replica
    secret: str | None  # value of the section's `secret_env` in the controller's environment


def accept(config: RunConfig) -> None:
    """The check of a backend that has nothing to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A kind of engine, e.g. `Backend(settings=LocalEngineConfig, open=open_engine)`.

    Checks raise `ConfigError` with one line that names field, value and remedy.
    """

    settings: type[EngineConfig]  # the model of `rollout.engine`, whose properties tell what an engine takes
    open: Callable[[RunConfig, EngineLaunch], Awaitable[InferenceEngine]]
    """A started engine without weights, in the replica's process; `EngineLostError` if it cannot start."""
    check: Check = accept
    """Refuses what the rest of the config asks and it cannot do: called whenever a config is read."""
    check_node: Check = accept
    """Refuses a host that cannot start its engines: called on every node that gets a replica."""
    check_start: Check = accept
    """Refuses a run whose engines lack something that the controller's host can see: called before it starts."""


BACKENDS = Registry(
    Backend,
    field="rollout.engine.kind",
    group="laminar_py.backends",
    built_in={
        "local": "laminar_py.engines.local.backend:LOCAL",
        "sglang": "laminar_py.engines.sglang.backend:SGLANG",
        "emulated": "laminar_py.engines.emulated.backend:EMULATED",
    },
)


def backend_of(config: RunConfig) -> Backend:
    """The backend of a run."""
    return BACKENDS.get(config.rollout.engine.kind)


def secret_of(config: RunConfig) -> str | None:
    """Secret that replicas open their engines with, from the environment of the controller alone."""
    name = config.rollout.engine.secret_env
    return (os.environ.get(name) or None) if name is not None else None
