"""Worker processes that call reward functions. The pool kills a worker that hangs."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.reward.calls.child import CallSpec as CallSpec
    from laminar_py.reward.calls.pool import CallPool as CallPool
else:
    __getattr__ = public_names(__name__)
