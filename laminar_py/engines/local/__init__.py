"""The embedded engine."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.local.engine import LocalEngine as LocalEngine
else:
    __getattr__ = public_names(__name__)
