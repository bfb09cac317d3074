"""Statistics of a run while it goes on, and its summary."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.observe.telemetry.memory import pss_bytes as pss_bytes
    from laminar_py.observe.telemetry.summary import Summary as Summary
    from laminar_py.observe.telemetry.view import make_view as make_view
else:
    __getattr__ = public_names(__name__)
