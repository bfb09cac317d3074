"""Shapes of relay trees and their cost."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.relay.planning.cost import PAGE_BYTES as PAGE_BYTES
    from laminar_py.relay.planning.cost import Broadcast as Broadcast
    from laminar_py.relay.planning.cost import Choice as Choice
    from laminar_py.relay.planning.cost import Links as Links
    from laminar_py.relay.planning.cost import broadcast_s as broadcast_s
    from laminar_py.relay.planning.cost import settle as settle
    from laminar_py.relay.planning.topology import Shape as Shape
    from laminar_py.relay.planning.topology import Topology as Topology
    from laminar_py.relay.planning.topology import grow as grow
else:
    __getattr__ = public_names(__name__)
