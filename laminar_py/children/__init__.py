"""Child processes that run code of others: their start, calls to them, and their end.

The modules `kernel` and `landlock` are public, too.
"""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

__all__ = ["kernel", "landlock"]

if TYPE_CHECKING:
    from laminar_py.children.hosted import HostedCall as HostedCall
    from laminar_py.children.hosted import HostedProcess as HostedProcess
    from laminar_py.children.hosted import ProcessLostError as ProcessLostError
    from laminar_py.children.hosted import last_line as last_line
    from laminar_py.children.wire import call_frame as call_frame
    from laminar_py.children.wire import exactly as exactly
    from laminar_py.children.wire import own_control as own_control
    from laminar_py.children.wire import receive_call as receive_call
else:
    __getattr__ = public_names(__name__)
