"""Versions on disk: digests, deltas, folders."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.relay.store.delta import apply as apply
    from laminar_py.relay.store.delta import encode as encode
    from laminar_py.relay.store.digests import chunk_checksum as chunk_checksum
    from laminar_py.relay.store.digests import file_digest as file_digest
    from laminar_py.relay.store.shards import HEADER_BYTES as HEADER_BYTES
    from laminar_py.relay.store.version import folder_name as folder_name
    from laminar_py.relay.store.versions import SPARE as SPARE
else:
    __getattr__ = public_names(__name__)
