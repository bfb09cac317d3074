"""Desk at which a node serves its host's subscribers: who listens, who waits for a version, who holds one.

Used by the node alone. Invariant: a version is pinned before its subscriber learns of it, so retention cannot
take it away in between.
"""

from collections.abc import Callable
from dataclasses import dataclass

from laminar_py.relay.store.version import NoRoomError
from laminar_py.relay.store.versions import Store
from laminar_py.relay.wire.messages import Downward, Failed, Granted, Newest, Pull, Refused, Release

Send = Callable[[bytes, Downward], bool]  # (connection, record) -> False if the connection is gone


SESSIONS_KNOWN = 16  # earlier lives of a subscriber whose late words are told from those of this one


@dataclass(frozen=True, slots=True)
class _Waiting:
    sender: bytes
    pull: Pull
    since: float


@dataclass(frozen=True, slots=True)
class _Answered:
    """The version that a pull was answered with; None once it was released."""

    id: int
    version: int | None


class Desk:
    """The subscribers of one node. One pull waits per name, so a revived subscriber replaces its old self.

    `pulled` is told of each answer: the name, the version, and how many seconds it took.
    """

    def __init__(
        self, store: Store, send: Send, *, pulled: Callable[[str, int, float], None], now: Callable[[], float]
    ) -> None:
        self._store = store
        self._send = send
        self._pulled = pulled
        self._now = now
        self._subscribers: set[bytes] = set()
        self._waiting: dict[str, _Waiting] = {}  # by name of the subscriber
        self._sessions: dict[str, list[int]] = {}  # by name, in the order of their coming
        self._last: dict[str, int] = {}  # by name, id of the last pull of the newest session
        self._given: dict[str, _Answered] = {}  # by name, the last answer of that session
        self._failed: Failed | None = None  # why there is not even a first version

    def awaited(self) -> set[int]:
        """Versions asked for by number and not here yet."""
        return {one.pull.version for one in self._waiting.values() if one.pull.version is not None}

    def subscribe(self, sender: bytes) -> None:
        """Tell a subscriber what is newest, now and from now on."""
        self._subscribers.add(sender)
        if self._store.complete:
            self._tell(sender, Newest(self._store.newest))
        elif self._failed:
            self._tell(sender, self._failed)

    def ask(self, sender: bytes, pull: Pull) -> bool:
        """Answer a pull if the version is here, or if it is stale; else let it wait, and return False."""
        if self._is_stale(pull):
            return True
        given = self._given.get(pull.name)
        if given is not None and given.id == pull.id:  # asked again before it had read the answer
            if given.version is not None:
                self._tell(sender, self._granted(pull.id, given.version))
            return True
        before = self._waiting.get(pull.name)
        since = before.since if before is not None and before.pull == pull else self._now()
        waiting = self._waiting[pull.name] = _Waiting(sender, pull, since)
        if not self._store.complete and self._failed and pull.version is None:
            self._refuse(pull.name, lost=False, reason=self._failed.reason)
            return True
        return self._answer(waiting)

    def release(self, release: Release) -> None:
        """A subscriber has done with what it was given, unless it was given something else since."""
        given = self._given.get(release.name)
        session = self._sessions.get(release.name, [release.session])[-1]
        if session == release.session and (given is None or given.id == release.id):
            self._store.unpin(release.name)
            self._given[release.name] = _Answered(release.id, None)

    def completed(self, version: int) -> None:
        """A version is complete here: answer whoever waits for it, and tell all if it is the newest."""
        self._failed = None
        for waiting in list(self._waiting.values()):
            self._answer(waiting)
        if version == self._store.newest:
            for sender in list(self._subscribers):
                self._tell(sender, Newest(version))

    def lost(self, version: int) -> None:
        """No relay has the version: answer who asked for it."""
        for name, waiting in list(self._waiting.items()):
            if waiting.pull.version == version:
                self._refuse(name, lost=True, reason=f"version {version} is on no relay any more")

    def failed(self, failed: Failed) -> None:
        """Answer who asked for a version that this node cannot hold or, if there is no other, for any."""
        first = not self._store.complete
        for name, waiting in list(self._waiting.items()):
            if waiting.pull.version == failed.version or (first and waiting.pull.version is None):
                self._refuse(name, lost=False, reason=failed.reason)
        if first:
            self._failed = failed
            for sender in list(self._subscribers):
                self._tell(sender, failed)

    def _is_stale(self, pull: Pull) -> bool:
        """True if it came late, over a connection that broke: what was pulled since is held now."""
        sessions = self._sessions.setdefault(pull.name, [])
        if pull.session not in sessions:
            sessions[:] = [*sessions[-SESSIONS_KNOWN:], pull.session]
            self._last.pop(pull.name, None)
            self._given.pop(pull.name, None)
        if pull.session != sessions[-1] or pull.id < self._last.get(pull.name, pull.id):
            return True
        self._last[pull.name] = pull.id
        return False

    def _answer(self, waiting: _Waiting) -> bool:
        pull = waiting.pull
        version = self._store.newest if pull.version is None else pull.version
        if version not in self._store.complete:
            return False
        try:
            self._store.pin(pull.name, version)
        except NoRoomError as error:
            self._refuse(pull.name, lost=False, reason=str(error))
            return True
        del self._waiting[pull.name]
        self._given[pull.name] = _Answered(pull.id, version)
        self._pulled(pull.name, version, self._now() - waiting.since)
        self._tell(waiting.sender, self._granted(pull.id, version))
        return True

    def _granted(self, id: int, version: int) -> Granted:
        stored = self._store.complete[version]  # it is pinned
        return Granted(id, version, str(stored.folder), stored.manifest.digest)

    def _refuse(self, name: str, *, lost: bool, reason: str) -> None:
        waiting = self._waiting.pop(name)
        self._tell(waiting.sender, Refused(waiting.pull.id, lost, reason))

    def _tell(self, sender: bytes, message: Downward) -> None:
        if not self._send(sender, message):
            self._subscribers.discard(sender)
