"""Reports and commands between controller and replicas."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.runtime.link.replica_link import ReplicaLink as ReplicaLink
else:
    __getattr__ = public_names(__name__)
