"""The controller of a run."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.orchestrator.controller import Controller as Controller
    from laminar_py.runtime.orchestrator.controller import Result as Result
    from laminar_py.runtime.orchestrator.launch import lead as lead
else:
    __getattr__ = public_names(__name__)
