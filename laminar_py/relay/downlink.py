"""What a node owes those below: its children, the versions they want, and the chunks promised to them.

Used by the node alone. Invariant: nothing is kept for a connection that was found gone, and a promise ends with
its chunk's arrival or with its version.
"""

from collections import defaultdict

from laminar_py.relay.messages import Announce, Chunk, Downward, Manifest
from laminar_py.relay.store import StoredVersion
from laminar_py.relay.transport import Listener


class Downlink:
    """The way down from one node; `listener` is set once the node is bound."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._children: set[bytes] = set()
        self._holds: defaultdict[int, set[bytes]] = defaultdict(set)  # version -> children that want it
        # (version, file, chunk) -> children it goes to on arrival; bounded by the windows of the children
        self._promised: defaultdict[tuple[int, int, int], set[bytes]] = defaultdict(set)

    @property
    def held(self) -> set[int]:
        """Versions that children want, newest or not."""
        return set(self._holds)

    def attach(self, child: bytes) -> None:
        """A child is there; from now on it hears of the newest version."""
        self._children.add(child)

    def hold(self, child: bytes, version: int) -> None:
        """A child wants this version."""
        self._holds[version].add(child)

    def release(self, child: bytes, version: int) -> None:
        """A child has it."""
        holders = self._holds.get(version, set())
        holders.discard(child)
        if not holders:
            self._holds.pop(version, None)

    def announce(self, manifest: Manifest, *, newest: bool) -> None:
        """Offer a version to all children if it is the newest, else to those who want it."""
        self._tell(Announce(manifest), self._children if newest else self._holds.get(manifest.version, set()))

    def refuse(self, version: int, message: Downward, *, newest: bool) -> None:
        """A version will not come: tell the same ones, and hold it no longer."""
        holders = self._holds.pop(version, set())
        self._tell(message, holders | self._children if newest else holders)

    def serve(self, child: bytes, stored: StoredVersion, file: int, index: int) -> None:
        """Send a chunk now if it is here, else as soon as it is."""
        if stored.has(file, index):
            self.send(child, stored.read(file, index))
        else:
            self._promised[stored.manifest.version, file, index].add(child)

    def forward(self, chunk: Chunk) -> None:
        """A chunk has arrived: keep the promises."""
        self._tell(chunk, self._promised.pop((chunk.version, chunk.file, chunk.index), set()))

    def forget(self, version: int) -> None:
        """The version is given up here: drop its promises."""
        for key in [key for key in self._promised if key[0] == version]:
            del self._promised[key]

    def send(self, to: bytes, message: Downward) -> bool:
        """Send to one connection; False if it is gone, and then forgotten."""
        assert self.listener is not None, "sending before the node was started"
        if self.listener.send(to, message):
            return True
        self._children.discard(to)
        for version in self.held:
            self.release(to, version)
        return False

    def _tell(self, message: Downward, children: set[bytes]) -> None:
        for child in list(children):  # a lost one leaves the set
            self.send(child, message)
