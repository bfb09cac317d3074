"""Fences around programs that a model wrote."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_contrib.sandbox.pool import SandboxPool as SandboxPool
    from laminar_contrib.sandbox.python_session import PythonSession as PythonSession
    from laminar_contrib.sandbox.python_session import SessionClosedError as SessionClosedError
    from laminar_contrib.sandbox.records import SandboxError as SandboxError
    from laminar_contrib.sandbox.records import SandboxLabel as SandboxLabel
    from laminar_contrib.sandbox.records import SandboxResult as SandboxResult
    from laminar_contrib.sandbox.records import SandboxTier as SandboxTier
else:
    __getattr__ = public_names(__name__)
