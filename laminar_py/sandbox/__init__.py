"""Fences around programs that a model wrote."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.sandbox.inside.kernel import end_with_parent as end_with_parent
    from laminar_py.sandbox.pool import REMEDY as REMEDY
    from laminar_py.sandbox.pool import SandboxPool as SandboxPool
    from laminar_py.sandbox.pool import survey_tiers as survey_tiers
    from laminar_py.sandbox.records import SandboxError as SandboxError
    from laminar_py.sandbox.records import SandboxLabel as SandboxLabel
    from laminar_py.sandbox.records import SandboxTier as SandboxTier
else:
    __getattr__ = public_names(__name__)
