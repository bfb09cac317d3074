"""A node's connections downwards: `Downlink` to child nodes, `LocalSubscribers` to subscribers.

A node owns one of each. Both forget a connection that is gone. `Downlink` forgets a promised chunk when it has
sent the chunk or its version is given up.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from laminar_py.relay.lanes import ParentLanes
from laminar_py.relay.messages import Announce, Chunk, Downward, Failed, Granted, Newest, Pull, Refused, Release
from laminar_py.relay.sockets import Listener
from laminar_py.relay.stored_version import NoRoomError, StoredVersion
from laminar_py.relay.version_store import VersionStore, folder_name

ChunkKey: TypeAlias = tuple[int, int, int]  # version, file, chunk


class Downlink:
    """Child nodes, the versions that they want, and the chunks promised to them.

    `RelayNode.start` sets `listener`, and `lanes` if the node has any.

    A chunk is promised to a child that requested it before it arrived here, or before its delta was made.
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.lanes: ParentLanes | None = None
        self._children: set[bytes] = set()
        self._wanted_by: defaultdict[int, set[bytes]] = defaultdict(set)  # version -> children that want it
        # Chunk -> children that it is promised to, with the base that each has. Their windows bound it.
        self._promised: defaultdict[ChunkKey, dict[bytes, int | None]] = defaultdict(dict)

    @property
    def wanted(self) -> set[int]:
        """Versions that children want, newest or not."""
        return set(self._wanted_by)

    @property
    def has_children(self) -> bool:
        """True if at least one child node is attached here."""
        return bool(self._children)

    def is_attached(self, child: bytes) -> bool:
        """True if this connection belongs to a child node, not to a subscriber or to a late node."""
        return child in self._children

    def attach(self, child: bytes) -> None:
        """Add a child, which gets announcements from now on."""
        self._children.add(child)

    def add_want(self, child: bytes, version: int) -> None:
        """Note that a child wants a version; do nothing if the child is not attached."""
        if child in self._children:
            self._wanted_by[version].add(child)

    def remove_want(self, child: bytes, version: int) -> None:
        """Note that a child has a version or no longer needs it."""
        children = self._wanted_by.get(version, set())
        children.discard(child)
        if not children:
            self._wanted_by.pop(version, None)

    def announce(self, stored: StoredVersion, *, newest: bool) -> None:
        """Announce a version to all children if it is the newest, else to the children that want it."""
        wanting = self._wanted_by.get(stored.manifest.version, set())
        self._send_all(Announce(stored.manifest, stored.base), self._children if newest else wanting)

    def refuse(self, version: int, message: Downward, *, newest: bool) -> None:
        """Send `message` about a lost version to all children if `newest`, else to children that want it."""
        wanting = self._wanted_by.pop(version, set())
        self._send_all(message, wanting | self._children if newest else wanting)

    def request_chunk(
        self, child: bytes, stored: StoredVersion, file: int, index: int, *, base: int | None
    ) -> None:
        """Send a chunk to a child that has `base`; promise it if the chunk or its delta is not ready."""
        if stored.can_send(file, index, base=base):
            self.send(child, stored.read_chunk(file, index, base=base))
        else:
            self._promised[stored.manifest.version, file, index][child] = base

    def forward_chunk(self, stored: StoredVersion, file: int, index: int) -> None:
        """Send a chunk that has just arrived, or whose delta was just made, to the children it is promised to."""
        for child, base in self._promised.pop((stored.manifest.version, file, index), {}).items():
            self.request_chunk(child, stored, file, index, base=base)

    def forget_version(self, version: int) -> None:
        """Drop all promises of a version's chunks."""
        for key in [key for key in self._promised if key[0] == version]:
            del self._promised[key]

    def send(self, to: bytes, message: Downward) -> bool:
        """Send a record to connection `to`. If that is gone, return False and forget the child and its wants."""
        assert self.listener is not None, "sending before the node was started"
        if self.lanes is not None and isinstance(message, Chunk) and self.lanes.send(to, message):
            return True
        if self.listener.send(to, message):
            return True
        if self.lanes is not None:
            self.lanes.drop(to)
        self._children.discard(to)
        for version in self.wanted:
            self.remove_want(to, version)
        return False

    def open_lanes(self, child: bytes, count: int) -> None:
        """Offer a child so many lanes, if this node has any; they replace the lanes that the child had."""
        if self.lanes is not None:
            self.send(child, self.lanes.offer(child, count))

    def probe(self, message: Downward) -> None:
        """Send a harmless record to children that want a version, so that `send` notices broken connections."""
        self._send_all(message, set().union(*self._wanted_by.values()))

    def _send_all(self, message: Downward, children: set[bytes]) -> None:
        for child in list(children):  # `send` removes a broken connection from the set
            self.send(child, message)


Send = Callable[[bytes, Downward], bool]  # (connection, record) -> False if the connection is gone
MAX_SESSIONS = 16  # earlier starts of a subscriber whose late requests are recognised


@dataclass(frozen=True, slots=True)
class _WaitingPull:
    """A pull that the node has not answered; `since` is the time of its first arrival in this session."""

    sender: bytes
    pull: Pull
    since: float


@dataclass(slots=True, kw_only=True)
class _Client:
    """State of all subscribers under one name; only the newest session counts."""

    sessions: list[int] = field(default_factory=list)  # the newest last
    last_pull: int = -1  # id of the last pull of the newest session
    waiting: _WaitingPull | None = None
    answered: int | None = None  # id of the pull that was granted or released last
    granted: Granted | None = None  # to that pull; None once released


class LocalSubscribers:
    """The subscribers of a node's host: they listen for versions, wait for a version, or hold a version.

    A version is pinned before its subscriber learns of it, so that the store cannot retire it in between. One pull
    waits for each name, so a restarted subscriber replaces its earlier self. `pulled` is called for each granted
    pull with the name, the version and the seconds that it waited.
    """

    def __init__(
        self,
        store: VersionStore,
        send: Send,
        *,
        pulled: Callable[[str, int, float], None],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._send = send
        self._pulled = pulled
        self._now = now
        self._listening: set[bytes] = set()
        self._clients: defaultdict[str, _Client] = defaultdict(_Client)  # by name of the subscriber
        self._failed: Failed | None = None  # why the node has no version at all

    @property
    def awaited(self) -> set[int]:
        """Versions that a waiting pull asks for by number."""
        pulls = [client.waiting.pull for client in self._clients.values() if client.waiting is not None]
        return {pull.version for pull in pulls if pull.version is not None}

    def subscribe(self, sender: bytes) -> None:
        """Send a subscriber the newest version now (or why there is none), and each newer version later."""
        self._listening.add(sender)
        if self._store.newest_ready >= 0:
            self._reply(sender, Newest(self._store.newest_ready))
        elif self._failed:
            self._reply(sender, self._failed)

    def handle_pull(self, sender: bytes, pull: Pull) -> bool:
        """Answer a pull if that is possible now, or drop a stale pull; False if it waits for a version."""
        client = self._clients[pull.name]
        if not self._register(client, pull):
            return True
        if client.answered == pull.id:  # the subscriber repeated it before it read the answer
            if client.granted is not None:
                self._reply(sender, client.granted)
            return True
        before = client.waiting
        since = before.since if before is not None and before.pull == pull else self._now()
        client.waiting = _WaitingPull(sender, pull, since)
        if not self._store.complete and self._failed and pull.version is None:
            self._refuse(client, lost=False, reason=self._failed.reason)
            return True
        return self._answer(client)

    def handle_release(self, release: Release) -> None:
        """Unpin the version that a pull gave, unless a later pull or session pinned another."""
        client = self._clients[release.name]
        session = client.sessions[-1] if client.sessions else release.session
        if session == release.session and client.answered in (None, release.id):
            self._store.unpin(release.name)
            client.answered, client.granted = release.id, None

    def handle_complete(self, version: int) -> None:
        """Answer the pulls that wait for a version that is complete now; announce it if it is the newest."""
        self._failed = None
        self.handle_newer(version)

    def answer_waiting(self) -> None:
        """Answer the pulls that can be answered now."""
        for client in list(self._clients.values()):
            self._answer(client)

    def handle_newer(self, version: int) -> None:
        """Answer pulls after a version or its changes became complete; announce it if it is the newest."""
        self.answer_waiting()
        if version == self._store.newest_ready:
            for sender in list(self._listening):
                self._reply(sender, Newest(version))

    def handle_lost(self, version: int) -> None:
        """Refuse the pulls of a version that no node has."""
        for client in list(self._clients.values()):
            if client.waiting is not None and client.waiting.pull.version == version:
                self._refuse(
                    client, lost=True, reason=f"version {version} is on no relay any more; pull a newer one"
                )

    def handle_failed(self, failed: Failed) -> None:
        """Refuse the pulls of a version that this node cannot hold, and all pulls if the node has no version."""
        has_none = not self._store.complete
        for client in list(self._clients.values()):
            if client.waiting is not None:
                wanted = client.waiting.pull.version
                if wanted == failed.version or (has_none and wanted is None):
                    self._refuse(client, lost=False, reason=failed.reason)
        if has_none:
            self._failed = failed
            for sender in list(self._listening):
                self._reply(sender, failed)

    def _register(self, client: _Client, pull: Pull) -> bool:
        """Record a pull's session and id; False if it came late, after a newer pull moved the pin."""
        if pull.session not in client.sessions:
            client.sessions[:] = [*client.sessions[-MAX_SESSIONS:], pull.session]
            client.last_pull, client.answered, client.granted = -1, None, None
        if pull.session != client.sessions[-1] or pull.id < client.last_pull:
            return False
        client.last_pull = pull.id
        return True

    def _answer(self, client: _Client) -> bool:
        """Pin and grant the version of a waiting pull; False if no pull waits or its version is not here.

        A pull with a base gets change files, if there are all, else the folder. A pull of the newest version
        waits for the folder of a version that was announced with its changes.
        """
        waiting, store = client.waiting, self._store
        if waiting is None:
            return False
        pull = waiting.pull
        version = store.newest_ready if pull.version is None else pull.version
        changes = store.changes_since(pull.base, version)
        if version not in (store.complete if changes is None else (*store.complete, *store.ready)):
            return False
        if changes is None and pull.base >= 0 and version in store.comparing:
            return True  # `answer_waiting` follows
        try:
            store.pin(pull.name, version, changes or ())
        except (NoRoomError, OSError) as error:
            self._refuse(client, lost=False, reason=str(error))
            return True
        client.waiting = None
        stored = store.find(version)
        assert stored is not None, f"version {version} was granted but is not here"
        client.answered, client.granted = (
            pull.id,
            Granted(
                id=pull.id,
                version=version,
                path=str(store.path / folder_name(version)),
                digest=stored.manifest.digest,
                changes=tuple((changes or {}).values()),
            ),
        )
        self._pulled(pull.name, version, self._now() - waiting.since)
        self._reply(waiting.sender, client.granted)
        return True

    def _refuse(self, client: _Client, *, lost: bool, reason: str) -> None:
        """Answer the waiting pull of a client with `Refused`."""
        waiting, client.waiting = client.waiting, None
        assert waiting is not None, "no pull waits to be refused"
        self._reply(waiting.sender, Refused(waiting.pull.id, lost, reason))

    def _reply(self, sender: bytes, message: Downward) -> None:
        if not self._send(sender, message):
            self._listening.discard(sender)
