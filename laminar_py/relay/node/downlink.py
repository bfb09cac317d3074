"""Debts of a node to those below: its children, the versions they want, and the chunks promised to them.

Used by the node alone. Invariants: nothing is kept for a connection that was found gone, and a promise ends with
its chunk's arrival or with its version. Chunks keep to a pace, each in its turn; all other records go at once. In
any time T chunks of at most `bytes_per_s * (T + SLACK_S)` bytes go out, and one chunk more.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from laminar_py.relay.store.version import StoredVersion
from laminar_py.relay.wire.messages import Announce, Downward
from laminar_py.relay.wire.transport import Listener

SLACK_S = 0.01  # that may be made up for; else timers, which ring late, would keep small chunks far below the cap


class Pace:
    """A cap in bytes per second on what is sent, e.g. `Pace(1e6, now=time.monotonic)`; None: no cap.

    What is sent is spent afterwards, so a chunk of any size may go, and then nothing until it is paid for.
    """

    def __init__(self, bytes_per_s: float | None, *, now: Callable[[], float]) -> None:
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._now = now
        self._paid_at = -math.inf

    @property
    def wait_s(self) -> float:
        """Seconds until something may be sent; 0 if at once."""
        return max(0.0, self._paid_at - self._now())

    def spend(self, num_bytes: int) -> None:
        """So much has been sent just now."""
        self._paid_at = max(self._paid_at, self._now() - SLACK_S) + num_bytes * self._s_per_byte


@dataclass(frozen=True, slots=True)
class Owed:
    """A chunk that a child asked for, e.g. chunk 3 of file 0 as a delta against version 6: `Owed(v7, 0, 3, 6)`."""

    stored: StoredVersion
    file: int
    index: int
    base: int | None  # version that the child has


Place: TypeAlias = tuple[int, int, int]  # version, file, chunk


class ChunkQueue:
    """Chunks that wait to be sent: one of each child in turn, of one child as it asked.

    Bounded by the children's windows: a chunk that is asked for again keeps its place.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[Place, Owed]] = {}  # by child; never empty ones

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, child: bytes, owed: Owed) -> None:
        """Let it wait."""
        place = (owed.stored.manifest.version, owed.file, owed.index)
        self._waiting.setdefault(child, {})[place] = owed

    def take(self) -> tuple[bytes, Owed]:
        """The next child and its chunk; the child is last now."""
        child = next(iter(self._waiting))
        chunks = self._waiting.pop(child)
        owed = chunks.pop(next(iter(chunks)))
        if chunks:
            self._waiting[child] = chunks
        return child, owed

    def drop(self, version: int, child: bytes | None = None) -> None:
        """Forget chunks of a version that is wanted no more, by one child or by all."""
        for one in list(self._waiting) if child is None else self._waiting.keys() & {child}:
            left = {place: owed for place, owed in self._waiting[one].items() if place[0] != version}
            if left:
                self._waiting[one] = left
            else:
                del self._waiting[one]

    def leave(self, child: bytes) -> None:
        """The child is gone."""
        self._waiting.pop(child, None)


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
