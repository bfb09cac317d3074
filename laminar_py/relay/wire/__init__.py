"""Sockets, messages and keys of the relays."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.relay.wire.messages import CHECKSUM_BYTES as CHECKSUM_BYTES
    from laminar_py.relay.wire.messages import MIN_CHUNK_BYTES as MIN_CHUNK_BYTES
    from laminar_py.relay.wire.messages import ParentLost as ParentLost
    from laminar_py.relay.wire.messages import RelayEvent as RelayEvent
    from laminar_py.relay.wire.messages import VersionComplete as VersionComplete
    from laminar_py.relay.wire.messages import VersionPulled as VersionPulled
    from laminar_py.relay.wire.post import Peer as Peer
    from laminar_py.relay.wire.post import peer_wire as peer_wire
    from laminar_py.relay.wire.transport import IPC as IPC
else:
    __getattr__ = public_names(__name__)
