"""The relay carries weights from one process to any number of others; it works without the other rooms.

The interface is `Publisher`, `RelayNode`, `Subscriber` and `RelayKeys`; `laminar relay` and benchmarks use
the other names.
"""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.relay.delta import apply as apply
    from laminar_py.relay.delta import encode as encode
    from laminar_py.relay.digests import chunk_checksum as chunk_checksum
    from laminar_py.relay.frames import Sealer as Sealer
    from laminar_py.relay.mapped_file import allow_many_files as allow_many_files
    from laminar_py.relay.messages import CHECKSUM_BYTES as CHECKSUM_BYTES
    from laminar_py.relay.messages import ParentLost as ParentLost
    from laminar_py.relay.messages import RelayEvent as RelayEvent
    from laminar_py.relay.messages import RelayKeys as RelayKeys
    from laminar_py.relay.messages import VersionComplete as VersionComplete
    from laminar_py.relay.messages import VersionFailed as VersionFailed
    from laminar_py.relay.messages import VersionPulled as VersionPulled
    from laminar_py.relay.node import RelayNode as RelayNode
    from laminar_py.relay.publisher import Publisher as Publisher
    from laminar_py.relay.sockets import PeerClient as PeerClient
    from laminar_py.relay.sockets import generate_keys as generate_keys
    from laminar_py.relay.sockets import peer_sockets as peer_sockets
    from laminar_py.relay.subscriber import Subscriber as Subscriber
    from laminar_py.relay.tree import CHUNK_OVERHEAD_S as CHUNK_OVERHEAD_S
    from laminar_py.relay.tree import PAGE_BYTES as PAGE_BYTES
    from laminar_py.relay.tree import Topology as Topology
    from laminar_py.relay.tree import choose_chunk_bytes as choose_chunk_bytes
    from laminar_py.relay.tree import grow_tree as grow_tree
    from laminar_py.relay.version_store import SPARE as SPARE
    from laminar_py.relay.version_store import folder_name as folder_name
else:
    __getattr__ = public_names(__name__)
