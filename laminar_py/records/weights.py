"""Weight versions as they are published."""

import msgspec


class Published(msgspec.Struct, frozen=True):
    """A weight version, complete in the root's store; `stall_s` is how long the learner stood still for it."""

    version: int
    digest: str
    num_bytes: int
    stall_s: float
