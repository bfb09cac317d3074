"""Weights from one process to any number of others, without the rest of the package."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.relay.node.relay_node import RelayNode as RelayNode
    from laminar_py.relay.publisher import Publisher as Publisher
    from laminar_py.relay.subscriber import Subscriber as Subscriber
    from laminar_py.relay.wire.transport import RelayKeys as RelayKeys
else:
    __getattr__ = public_names(__name__)
