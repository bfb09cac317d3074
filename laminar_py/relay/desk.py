"""Where a node serves the subscribers of its host: who listens, who waits for which version, who holds one.

Used by the node alone. Invariant: a version is pinned before its subscriber learns of it, so retention cannot
take it away in between.
"""

from collections.abc import Callable

from laminar_py.relay.messages import Downward, Failed, Newest, Pull, Pulled, Refused
from laminar_py.relay.store import NoRoomError, Store

Send = Callable[[bytes, Downward], bool]  # (connection, record) -> False if the connection is gone


class Desk:
    """The subscribers of one node. One pull waits per name, so a revived subscriber replaces its old self."""

    def __init__(self, store: Store, send: Send) -> None:
        self._store = store
        self._send = send
        self._subscribers: set[bytes] = set()
        self._waiting: dict[str, tuple[bytes, Pull]] = {}  # by name of the subscriber
        self._failed: Failed | None = None  # why there is not even a first version

    def awaited(self) -> set[int]:
        """Versions asked for by number and not here yet."""
        return {pull.version for _, pull in self._waiting.values() if pull.version is not None}

    def subscribe(self, sender: bytes) -> None:
        """Tell a subscriber what is newest, now and from now on."""
        self._subscribers.add(sender)
        if self._store.complete:
            self._tell(sender, Newest(self._store.newest))
        elif self._failed:
            self._tell(sender, self._failed)

    def ask(self, sender: bytes, pull: Pull) -> bool:
        """Answer a pull if the version is here; else let it wait, and return False."""
        self._waiting[pull.name] = (sender, pull)
        if not self._store.complete and self._failed and pull.version is None:
            self._refuse(pull.name, lost=False, reason=self._failed.reason)
            return True
        return self._answer(sender, pull)

    def completed(self, version: int) -> None:
        """A version is complete here: answer whoever waits for it, and tell all if it is the newest."""
        self._failed = None
        for sender, pull in list(self._waiting.values()):
            self._answer(sender, pull)
        if version == self._store.newest:
            for sender in list(self._subscribers):
                self._tell(sender, Newest(version))

    def lost(self, version: int) -> None:
        """No relay has the version: answer who asked for it."""
        for name, (_, pull) in list(self._waiting.items()):
            if pull.version == version:
                self._refuse(name, lost=True, reason=f"version {version} is on no relay any more")

    def failed(self, failed: Failed) -> None:
        """This node cannot hold the version: answer who asked for it or, if there is no other, for any."""
        first = not self._store.complete
        for name, (_, pull) in list(self._waiting.items()):
            if pull.version == failed.version or (first and pull.version is None):
                self._refuse(name, lost=False, reason=failed.reason)
        if first:
            self._failed = failed
            for sender in list(self._subscribers):
                self._tell(sender, failed)

    def _answer(self, sender: bytes, pull: Pull) -> bool:
        version = self._store.newest if pull.version is None else pull.version
        stored = self._store.complete.get(version)
        if stored is None:
            return False
        try:
            self._store.pin(pull.name, version)
        except NoRoomError as error:
            self._refuse(pull.name, lost=False, reason=str(error))
            return True
        del self._waiting[pull.name]
        self._tell(sender, Pulled(pull.id, version, str(stored.folder), stored.manifest.digest))
        return True

    def _refuse(self, name: str, *, lost: bool, reason: str) -> None:
        sender, pull = self._waiting.pop(name)
        self._tell(sender, Refused(pull.id, lost, reason))

    def _tell(self, sender: bytes, message: Downward) -> None:
        if not self._send(sender, message):
            self._subscribers.discard(sender)
