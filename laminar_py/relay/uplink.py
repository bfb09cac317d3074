"""The connection of a node or subscriber to its parent: the choice of the parent, and when to leave it.

`RelayNode` and `Subscriber` use it, and `Sources` as a connection to one other node. At most one connection is
open. The uplink greets the parent at each connect, so a restarted parent is treated as a new parent.

    connecting -> (handshake) following -> (connection breaks) connecting
    connecting for too long, or the owner's `handle` returns False: to the next parent, after the last the first
    following another than the nearest for `visit_s` while idle, or a parent that `parents` lacks: to the nearest
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.lanes import ChildLanes
from laminar_py.relay.messages import Chunk, Lanes, OpenLanes, ToChild, Upward
from laminar_py.relay.sockets import CONTROL_BYTES, IPC, Connection, LinkState, SocketFactory, tcp_host

GRACE_S = 0.5  # for a broken connection to come back, and then for each other parent to answer
VISIT_S = 30.0  # with a parent that is not the nearest, before an idle owner tries the nearest again


class UplinkOwner(Protocol):
    """The owner of an uplink: a node or a subscriber."""

    @property
    def is_idle(self) -> bool:
        """True while the uplink may try another parent without harm."""
        ...

    def reattach(self) -> None:
        """Send the parent this owner's state; called at each connect."""
        ...

    def resend_requests(self) -> None:
        """Repeat requests without an answer; called every `timeout_s` while the connection is up."""
        ...

    def handle(self, message: ToChild) -> bool:
        """Handle a record from the parent; False if the uplink must try the next parent."""
        ...

    def take_chunk(self, chunk: Chunk, body: ChunkBody) -> Callable[[], object] | None:
        """Take a chunk in a lane's thread; return the rest of the work, for the event loop."""
        ...

    def left_parent(self, old: str, new: str) -> None:
        """Note that the uplink leaves the parent at endpoint `old` for the parent at `new`."""
        ...


class Uplink:
    """Keeps `owner` connected to one of its parents.

    It leaves a parent that is silent for `timeout_s`, or whose connection stays broken for `GRACE_S`. `parents`,
    the nearest first, may be replaced at any time; the uplink notices within `timeout_s`.
    """

    def __init__(
        self,
        name: str,
        parents: Sequence[str],
        owner: UplinkOwner,
        *,
        sockets: SocketFactory,
        timeout_s: float,
        chunk_bytes: int,
        num_lanes: int = 0,
        visit_s: float = VISIT_S,
    ) -> None:
        self.name = name
        self.parents = tuple(parents)
        self._owner = owner
        self._sockets = sockets
        self._timeout_s = timeout_s
        self._max_frame_bytes = chunk_bytes + CONTROL_BYTES
        self._visit_s = visit_s
        self._lanes = ChildLanes(num_lanes, owner.take_chunk, owner.reattach, chunk_bytes=chunk_bytes)
        self.parent = ""  # endpoint of the current parent, or of the last
        self._connection: Connection | None = None
        self._num_quick = 0  # parents that still get `GRACE_S` instead of `timeout_s`, since one was lost

    def send(self, message: Upward) -> None:
        """Send a record to the parent. Without a connection drop it: `reattach` will send the state again."""
        if self._connection is not None:
            self._connection.send(message)

    async def run(self) -> None:
        """Follow one parent after the other, until cancelled."""
        endpoint = self.parents[0]
        while True:
            self.parent = endpoint
            self._connection = self._sockets.connect(endpoint, max_frame_bytes=self._max_frame_bytes)
            try:
                goes_home = await self._follow(self._connection)
            finally:
                self._lanes.close()
                self._connection.close()
                self._connection = None
            if goes_home or endpoint not in self.parents:
                following = self.parents[0]
            else:
                following = self.parents[(self.parents.index(endpoint) + 1) % len(self.parents)]
            self._owner.left_parent(endpoint, following)
            endpoint = following

    async def _follow(self, connection: Connection) -> bool:
        """Pass one parent's records to the owner until it must leave; True to try the nearest next."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._next_patience_s()  # for the connection to come up; infinite while it is up
        next_reminder = math.inf
        home = now() + self._visit_s
        while self.parent in self.parents:
            until = min(home, next_reminder, deadline)
            match await connection.receive(max(0.0, until - now())):
                case None if now() >= deadline:
                    return False
                case None if now() >= home and self.parent != self.parents[0] and self._owner.is_idle:
                    self._num_quick = len(self.parents)
                    return True
                case None if now() >= home:
                    home = now() + self._visit_s
                case None:
                    pass  # time for a reminder, or a moment early
                case LinkState.DOWN:
                    # A peer that fails every handshake goes down again and again; the first time counts.
                    self._lanes.close()
                    if deadline == math.inf:
                        self._num_quick = len(self.parents)
                        deadline, next_reminder = now() + self._next_patience_s(), math.inf
                case LinkState.UP:
                    deadline, next_reminder = math.inf, now() + self._timeout_s
                    self._num_quick = 0
                    self._ask_for_lanes()
                    self._owner.reattach()
                case Lanes() as offer:
                    self._lanes.open(tcp_host(self.parent), offer)
                case message:
                    if not self._owner.handle(message):
                        return False
            if now() >= next_reminder:
                next_reminder = now() + self._timeout_s
                self._ask_for_lanes()
                self._owner.resend_requests()
        return True

    def _ask_for_lanes(self) -> None:
        """Ask the parent for lanes if there are none; until they are open, chunks come as control records."""
        if self._lanes.num_missing and not self.parent.startswith(IPC):
            self.send(OpenLanes(self._lanes.num_missing))

    def _next_patience_s(self) -> float:
        """Return the seconds to wait for the current parent; use up a quick try if others are left."""
        if self._num_quick > 0 and len(self.parents) > 1:
            self._num_quick -= 1
            return min(GRACE_S, self._timeout_s)
        return self._timeout_s
