"""Weight versions: how the learner publishes them, and how a replica pulls them."""

from typing import Protocol

import msgspec


class Published(msgspec.Struct, frozen=True):
    """A version that is complete in the root relay's store, e.g. `Published(7, digest, 494_032_896, 0.012)`."""

    version: int
    digest: str
    num_bytes: int
    stall_s: float  # seconds that the learner stood still for it


class PulledVersion(msgspec.Struct, frozen=True):
    """A complete version in this host's shared memory, e.g. `PulledVersion(7, "/dev/shm/laminar-x/v7",
    digest)`."""

    version: int
    path: str
    digest: str  # the files were verified against it


class VersionLostError(Exception):
    """No relay has the requested version any more."""


class WeightSource(Protocol):
    """Source of weights for a replica: its local relay, or a folder in tests.

    All methods raise a `RuntimeError` with the reason if the relay cannot hold a version.
    """

    async def latest(self) -> int:
        """Return the newest complete version here; wait for the first one."""
        ...

    async def wait_newer(self, version: int) -> int:
        """Wait for a complete version above `version` and return the newest."""
        ...

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Pull a version, by default the newest, and hold it until the next pull. Raises `VersionLostError`."""
        ...
