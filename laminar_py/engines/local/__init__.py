"""The embedded engine."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.engines.local.engine import LocalEngine as LocalEngine
    from laminar_py.engines.local.prefill import Job as Job
    from laminar_py.engines.local.scheduler import Scheduler as Scheduler
    from laminar_py.engines.local.spec import ModelSpec as ModelSpec
else:
    __getattr__ = public_names(__name__)
