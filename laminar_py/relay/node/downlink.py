"""Debts of a node to those below: its children, the versions they want, and the chunks promised to them.

Used by the node alone. Invariant: nothing is kept for a connection that was found gone, and a promise ends with
its chunk's arrival or with its version. Chunks keep to a pace, each in its turn; all other records go at once.
"""

import asyncio
from collections import defaultdict

from laminar_py.relay.node.pace import ChunkQueue, Owed, Pace
from laminar_py.relay.store.version import StoredVersion
from laminar_py.relay.wire.messages import Announce, Downward
from laminar_py.relay.wire.transport import Listener


class Downlink:
    """The way down from one node; `listener` is set once the node is bound."""

    def __init__(self, pace: Pace) -> None:
        self.listener: Listener | None = None
        self._pace = pace
        self._queue = ChunkQueue()
        self._queued = asyncio.Event()  # set while anything waits there
        self._children: set[bytes] = set()
        self._holds: defaultdict[int, set[bytes]] = defaultdict(set)  # version -> children that want it
        # (version, file, chunk) -> children it goes to on arrival, with the base that they have; bounded by their
        # windows
        self._promised: defaultdict[tuple[int, int, int], dict[bytes, int | None]] = defaultdict(dict)

    @property
    def held(self) -> set[int]:
        """Versions that children want, newest or not."""
        return set(self._holds)

    @property
    def has_children(self) -> bool:
        """True if a node takes this one for its parent."""
        return bool(self._children)

    def attach(self, child: bytes) -> None:
        """A child is there; from now on it hears of the newest version."""
        self._children.add(child)

    def hold(self, child: bytes, version: int) -> None:
        """A child wants this version; a late word of a connection that is gone counts for nothing."""
        if child in self._children:
            self._holds[version].add(child)

    def release(self, child: bytes, version: int) -> None:
        """A child has it, or needs it no longer."""
        self._queue.drop(version, child)
        holders = self._holds.get(version, set())
        holders.discard(child)
        if not holders:
            self._holds.pop(version, None)

    def announce(self, stored: StoredVersion, *, newest: bool) -> None:
        """Offer a version to all children if it is the newest, else to those who want it."""
        holders = self._holds.get(stored.manifest.version, set())
        self._tell(Announce(stored.manifest, stored.base), self._children if newest else holders)

    def refuse(self, version: int, message: Downward, *, newest: bool) -> None:
        """A version will not come: tell the same ones, and hold it no longer."""
        holders = self._holds.pop(version, set())
        self._tell(message, holders | self._children if newest else holders)

    def serve(self, child: bytes, stored: StoredVersion, file: int, index: int, *, base: int | None) -> None:
        """Send a chunk in its turn if it is ready, else as soon as it is."""
        self._give(child, Owed(stored, file, index, base))

    def forward(self, stored: StoredVersion, file: int, index: int) -> None:
        """A chunk has arrived, or its delta is there: keep the promises."""
        for child, base in self._promised.pop((stored.manifest.version, file, index), {}).items():
            self._give(child, Owed(stored, file, index, base))

    async def keep_pace(self) -> None:
        """Send what waits for its turn, until cancelled."""
        while True:
            await self._queued.wait()
            await asyncio.sleep(self._pace.wait_s)
            while self._queue and not self._pace.wait_s:
                self._send_chunk(*self._queue.take())
            if not self._queue:
                self._queued.clear()

    def _give(self, child: bytes, owed: Owed) -> None:
        if self._queue or self._pace.wait_s:
            self._queue.put(child, owed)
            self._queued.set()
        else:
            self._send_chunk(child, owed)

    def _send_chunk(self, child: bytes, owed: Owed) -> None:
        stored, file, index, base = owed.stored, owed.file, owed.index, owed.base
        if not stored.is_ready(file, index, base=base):  # not yet, or no more: the file came damaged
            self._promised[stored.manifest.version, file, index][child] = base
            return
        chunk = stored.read(file, index, base=base)
        if self.send(child, chunk):
            self._pace.spend(len(chunk.data))

    def forget(self, version: int) -> None:
        """The version is given up here: drop its promises."""
        self._queue.drop(version)
        for key in [key for key in self._promised if key[0] == version]:
            del self._promised[key]

    def send(self, to: bytes, message: Downward) -> bool:
        """Send to one connection; False if it is gone, and then forgotten."""
        assert self.listener is not None, "sending before the node was started"
        if self.listener.send(to, message):
            return True
        self._children.discard(to)
        self._queue.leave(to)
        for version in self.held:
            self.release(to, version)
        return False

    def greet_holders(self, message: Downward) -> None:
        """Say something to all who hold a version, so that connections which are gone are found."""
        self._tell(message, set().union(*self._holds.values()))

    def _tell(self, message: Downward, children: set[bytes]) -> None:
        for child in list(children):  # a lost one leaves the set
            self.send(child, message)
