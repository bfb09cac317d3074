"""Which parent a node follows: the nearest that is there, else the next, after the last the first again.

Used by the node alone. Invariant: at most one link is open, and whoever is at its other end has been greeted
since it came up, so a parent that died and came back is treated as a new one.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import cycle, pairwise

from laminar_py.relay.messages import ParentLost, RelayEvent, ToChild, Upward
from laminar_py.relay.transport import CONTROL_BYTES, Link, LinkState, Wire

log = logging.getLogger(__name__)


class Uplink:
    """The way up from one node.

    `greet` is called whenever a parent is there, `handle` with all that it sends; `handle` returns False if
    this parent is of no use and the next one should be tried.
    """

    def __init__(
        self,
        name: str,
        parents: Sequence[str],
        *,
        wire: Wire,
        timeout_s: float,
        chunk_bytes: int,
        emit: Callable[[RelayEvent], None],
        greet: Callable[[], None],
        handle: Callable[[ToChild], bool],
    ) -> None:
        self.parents = tuple(parents)
        self._name = name
        self._wire = wire
        self._timeout_s = timeout_s
        self._max_frame_bytes = chunk_bytes + CONTROL_BYTES
        self._emit = emit
        self._greet = greet
        self._handle = handle
        self._link: Link | None = None

    def tell(self, message: Upward) -> None:
        """Send to the parent; dropped while there is none, for the greeting says it all again."""
        if self._link is not None:
            self._link.send(message)

    async def run(self) -> None:
        """Follow one parent after the other, until cancelled."""
        for endpoint, successor in pairwise(cycle(self.parents)):
            self._link = self._wire.connect(endpoint, max_frame_bytes=self._max_frame_bytes)
            try:
                await self._follow(self._link)
            finally:
                self._link.close()
                self._link = None
            log.warning("%s leaves its parent at %s and turns to %s", self._name, endpoint, successor)
            self._emit(ParentLost(self._name, endpoint, successor))

    async def _follow(self, link: Link) -> None:
        now = asyncio.get_running_loop().time
        deadline: float | None = now() + self._timeout_s  # None while the link is up
        while True:
            match await link.receive(None if deadline is None else max(0.0, deadline - now())):
                case None:
                    return
                case LinkState.DOWN:
                    # A peer that is there but fails every handshake goes down again and again: the first counts.
                    deadline = deadline or now() + self._timeout_s
                case LinkState.UP:
                    deadline = None
                    self._greet()
                case message:
                    if not self._handle(message):
                        return
