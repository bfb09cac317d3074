"""The parent that a node follows: the nearest that is there, else the next, after the last the first again.

Used by the node and the subscriber. Invariant: at most one link is open, and whoever is at its other end has been
greeted since it came up, so a parent that died and came back is treated as a new one.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from laminar_py.relay.wire.messages import ToChild, Upward
from laminar_py.relay.wire.transport import CONTROL_BYTES, Link, LinkState, Wire

log = logging.getLogger(__name__)

GRACE_S = 0.5  # for a broken connection to come back, and for the next parent to answer then
VISIT_S = 30.0  # with a parent that is not the nearest, before the nearest is looked for again


class _Farewell(Enum):
    """Why a parent is left."""

    LOST = "lost"  # it is away, or of no use
    HOME = "home"  # the nearest may be back


class Follower(Protocol):
    """A party that follows parents: a node, or a subscriber."""

    @property
    def is_idle(self) -> bool:
        """True while another parent may be looked for."""
        ...

    def greet(self) -> None:
        """Called whenever a parent is there."""
        ...

    def remind(self) -> None:
        """Called every `timeout_s` from then on."""
        ...

    def handle(self, message: ToChild) -> bool:
        """Called with all that the parent sends; False if it is of no use and the next one should be tried."""
        ...

    def left_parent(self, old: str, new: str) -> None:
        """Called with the endpoints of the parent that is left and of the next."""
        ...


class Uplink:
    """The way up from `follower`.

    A parent that is silent for `timeout_s` is left; a connection that breaks, after less. After `visit_s` with
    another than the nearest an idle follower looks for that. `parents` may be replaced at any time: within
    `timeout_s` one that is no longer among them is left for the nearest.
    """

    def __init__(
        self,
        name: str,
        parents: Sequence[str],
        follower: Follower,
        *,
        wire: Wire,
        timeout_s: float,
        chunk_bytes: int,
        visit_s: float = VISIT_S,
    ) -> None:
        self.name = name
        self.parents = tuple(parents)
        self._follower = follower
        self._wire = wire
        self._timeout_s = timeout_s
        self._max_frame_bytes = chunk_bytes + CONTROL_BYTES
        self._visit_s = visit_s
        self.parent = ""  # endpoint of the one that is followed, or was last
        self._link: Link | None = None
        self._hurries = 0  # parents to try in haste, since one that was there has gone

    def tell(self, message: Upward) -> None:
        """Send to the parent; dropped while there is none, for the greeting says it all again."""
        if self._link is not None:
            self._link.send(message)

    async def run(self) -> None:
        """Follow one parent after the other, until cancelled."""
        endpoint = self.parents[0]
        while True:
            self.parent = endpoint
            self._link = self._wire.connect(endpoint, max_frame_bytes=self._max_frame_bytes)
            try:
                farewell = await self._follow(self._link)
            finally:
                self._link.close()
                self._link = None
            following = self.parents[0] if farewell is _Farewell.HOME else self._after(endpoint)
            log.warning("%s leaves its parent at %s and turns to %s", self.name, endpoint, following)
            self._follower.left_parent(endpoint, following)
            endpoint = following

    def _after(self, parent: str) -> str:
        if parent not in self.parents:
            return self.parents[0]
        return self.parents[(self.parents.index(parent) + 1) % len(self.parents)]

    async def _follow(self, link: Link) -> _Farewell:
        now = asyncio.get_running_loop().time
        deadline = now() + self._patience_s()  # for the link to come up; never while it is
        again = math.inf  # when the parent is reminded
        home = now() + self._visit_s
        while self.parent in self.parents:
            until = min(home, again, deadline)
            match await link.receive(max(0.0, until - now())):
                case None if now() >= deadline:
                    return _Farewell.LOST
                case None if now() >= home and self.parent != self.parents[0] and self._follower.is_idle:
                    self._hurries = len(self.parents)
                    return _Farewell.HOME
                case None if now() >= home:
                    home = now() + self._visit_s
                case None:
                    pass  # time to remind the parent, or a moment early
                case LinkState.DOWN:
                    # A peer that is there but fails every handshake goes down again and again: the first counts.
                    if deadline == math.inf:
                        self._hurries = len(self.parents)
                        deadline, again = now() + self._patience_s(), math.inf
                case LinkState.UP:
                    deadline, again = math.inf, now() + self._timeout_s
                    self._hurries = 0
                    self._follower.greet()
                case message:
                    if not self._follower.handle(message):
                        return _Farewell.LOST
            if now() >= again:
                again = now() + self._timeout_s
                self._follower.remind()
        return _Farewell.HOME

    def _patience_s(self) -> float:
        """How long this parent may be away; a lone one, or one of many that are all away, for the whole time."""
        if self._hurries > 0 and len(self.parents) > 1:
            self._hurries -= 1
            return min(GRACE_S, self._timeout_s)
        return self._timeout_s
