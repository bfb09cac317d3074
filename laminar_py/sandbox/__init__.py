"""Fences around programs that a model wrote."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.sandbox.hosted import HostedCall as HostedCall
    from laminar_py.sandbox.hosted import HostedProcess as HostedProcess
    from laminar_py.sandbox.hosted import ProcessLostError as ProcessLostError
    from laminar_py.sandbox.hosted import last_line as last_line
    from laminar_py.sandbox.inside.kernel import end_with_parent as end_with_parent
    from laminar_py.sandbox.inside.kernel import limit as limit
    from laminar_py.sandbox.inside.wire import call_frame as call_frame
    from laminar_py.sandbox.inside.wire import own_control as own_control
    from laminar_py.sandbox.inside.wire import receive_call as receive_call
    from laminar_py.sandbox.pool import SandboxPool as SandboxPool
    from laminar_py.sandbox.records import SandboxError as SandboxError
    from laminar_py.sandbox.records import SandboxLabel as SandboxLabel
    from laminar_py.sandbox.records import SandboxTier as SandboxTier
else:
    __getattr__ = public_names(__name__)
