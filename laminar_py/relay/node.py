"""A relay node: takes versions from its parent, passes them on chunk by chunk, and serves its host's subscribers.

One process per host runs a `RelayNode`; the root shares its store with the publisher and has no parent. A node
serves a version to subscribers only when all its digests are right (law 3), and to children from its first chunk
on. Handlers are synchronous, so no record is handled in the middle of another; only loops and threads wait.

The protocol, as states and the records (`relay/messages.py`) that are sent in them. A child and its parent:

    attached     Attach(newest)          -> Announce(newer)   at each connect, and every `parent_timeout_s`
    downloading  Announce(v), Fetch(v)*  -> Chunk* | Lost(v)  Fetch grants credits; the parent sends chunks as it
                                                              gets them itself (cut-through), as deltas against a
                                                              base that the child says it has
    complete     Done(v)                                      verified here, or no longer needed here
    overtaken    Announce(v') with v' > v                     v is abandoned, unless a pull or a child wants it,
                                                              v' builds on it, or v itself overtook another
    wanting      Want(v)           -> Announce(v) | Lost(v)   a pull of an older version, passed on upwards
    holding      Want(v, arriving)       -> Lost(v)           v is on its way and may not be abandoned
    failed       Failed(v)                                    the parent cannot have v: try the next parent

A subscriber and its node:

    subscribed   Subscribe               -> Newest*           now and for each complete version
    pulling      Pull(id)                -> Granted(id) | Refused(id)
    released     Release                                      the version pulled last need not stay
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import laminar_py.relay.messages as m
from laminar_py.relay.downlink import Downlink, LocalSubscribers
from laminar_py.relay.downloads import MAX_WINDOW, Download, Downloads, window_of
from laminar_py.relay.sockets import Listener, PortInUseError, RelayKeys, SocketFactory
from laminar_py.relay.store import Store, StoredVersion, watch_folder
from laminar_py.relay.uplink import VISIT_S, Uplink

log = logging.getLogger(__name__)

CONTROL_RECORDS = 256  # beside chunks, that may wait for a connection
PORT_RETRY_S = 0.1
ENCODERS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # threads
VAIN_DELTAS = 8  # chunks that no delta makes smaller, before any that one does: then the encoder stops


class RelayNode:
    """A node of the tree: `await node.start()`, then `await node.run()` until `await node.close()`.

    `parents` are endpoints, nearest first, root last (`Topology.ancestors`); the root has none. A parent that is
    silent for `parent_timeout_s`, or breaks the connection, is left for the next one, and the last one for the
    first. After `visit_s` with another parent than the nearest, an idle node tries the nearest again. `emit` gets
    the node's events.
    """

    def __init__(
        self,
        name: str,
        *,
        store: Path,
        keys: RelayKeys | None,
        parents: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        keep_versions: int = 2,
        chunk_bytes: int = 4 * 2**20,
        parent_timeout_s: float = 5.0,
        visit_s: float = VISIT_S,
        emit: Callable[[m.RelayEvent], None] = lambda event: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._address = (host, port)
        self._max_queue = 4 * window_of(chunk_bytes) + CONTROL_RECORDS
        self._remind_s = parent_timeout_s
        self._emit = emit
        self._sockets = SocketFactory(keys, heartbeat_s=parent_timeout_s)
        self._downlink = Downlink()
        self._uplink = Uplink(
            name,
            parents,
            self,
            sockets=self._sockets,
            timeout_s=parent_timeout_s,
            chunk_bytes=chunk_bytes,
            visit_s=visit_s,
        )
        self._store = Store(store, keep_versions=keep_versions)
        self._versions = NodeVersions(
            self._uplink, self._downlink, self._store, chunk_bytes=chunk_bytes, emit=emit, now=now
        )
        self._running = False
        self._closing = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """Address for children and subscribers, e.g. `tcp://127.0.0.1:41234`; known after `start`."""
        return self._listener.endpoint

    @property
    def _listener(self) -> Listener:
        assert self._downlink.listener is not None, f"{self.name} has not been started"
        return self._downlink.listener

    async def start(self, *, patience_s: float = 0.0) -> None:
        """Bind the port and open the store. Raises `ConfigError` naming relay.base_port or relay.host.

        Waits up to `patience_s` for a port that another process holds.
        """
        deadline = asyncio.get_running_loop().time() + patience_s
        while self._downlink.listener is None:
            try:
                self._downlink.listener = self._sockets.listen(*self._address, max_queue=self._max_queue)
            except PortInUseError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(PORT_RETRY_S)
        self._store.open()

    def set_parents(self, parents: Sequence[str]) -> None:
        """Replace the parents, nearest first; the root has none."""
        self._uplink.parents = tuple(parents)

    async def run(self) -> None:
        """Relay until `close`."""
        listener = self._listener
        if self._closing.is_set():
            return
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                self._versions.tasks = group
                tasks = [group.create_task(self._serve(listener), name=f"{self.name}-serve")]
                tasks.append(group.create_task(self._check_regularly(), name=f"{self.name}-check"))
                if self._uplink.parents:
                    tasks.append(group.create_task(self._uplink.run(), name=f"{self.name}-follow"))
                else:
                    tasks.append(group.create_task(self._watch_store(), name=f"{self.name}-published"))
                self._versions.retire_surplus()
                await self._closing.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self._close_sockets()

    async def close(self) -> None:
        """End `run` and free the port."""
        self._closing.set()
        if self._running:
            await self._stopped.wait()
        else:
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self._downlink.listener is not None:
            self._downlink.listener.close()
        self._sockets.close()
        self._stopped.set()

    # ---- records from children and subscribers

    async def _serve(self, listener: Listener) -> None:
        while True:
            sender, message = await listener.receive()
            self._handle_below(sender, message)

    def _handle_below(self, sender: bytes, message: m.ToParent) -> None:
        """Handle a record of a child node or of a subscriber on this host."""
        match message:
            case m.Fetch():
                self._handle_fetch(sender, message)
            case m.Attach(newest):
                self._handle_attach(sender, newest)
            case m.Want():
                self._handle_want(sender, message)
            case m.Done(version):
                self._downlink.remove_want(sender, version)
                self._versions.retire_surplus()
            case m.Subscribe():
                self._versions.subscribers.subscribe(sender)
            case m.Pull(version=version):
                if not self._versions.subscribers.handle_pull(sender, message) and version is not None:
                    self._versions.locate(version)
                self._versions.retire_surplus()  # the pin may have moved
            case m.Release():
                self._versions.subscribers.handle_release(message)
                self._versions.retire_surplus()

    def _handle_attach(self, child: bytes, newest_there: int) -> None:
        self._downlink.attach(child)
        downloads = self._versions.downloads
        newest, failure = self._versions.find(downloads.newest), self._versions.failure
        if newest is not None and newest.manifest.version > newest_there:
            self._downlink.send(child, m.Announce(newest.manifest, newest.base))
        if failure and failure.version > max(downloads.newest, newest_there):
            self._downlink.send(child, failure)

    def _handle_fetch(self, child: bytes, fetch: m.Fetch) -> None:
        """Send or promise the chunks that a child asks for, as far as its credits reach.

        A child that asks for a version without a copy here gets `Lost`, unless a parent still looks for it.
        """
        stored = self._versions.find(fetch.version)
        if stored is None:
            if fetch.version not in self._downlink.wanted:  # else nodes above still look for it
                self._downlink.send(child, m.Lost(fetch.version))
            return
        for index in range(fetch.first_chunk, fetch.first_chunk + min(fetch.credits, MAX_WINDOW)):
            if not stored.is_chunk(fetch.file, index):
                break
            self._downlink.request_chunk(child, stored, fetch.file, index, base=fetch.base)

    def _handle_want(self, child: bytes, want: m.Want) -> None:
        self._downlink.add_want(child, want.version)
        stored = self._versions.find(want.version)
        if stored is not None and not want.arriving:
            self._downlink.send(child, m.Announce(stored.manifest, stored.base))
        self._versions.locate(want.version)

    async def _watch_store(self) -> None:
        """Take up each version as soon as the publisher renames its folder; only at the root."""
        try:
            watch = watch_folder(self._store.path)
        except OSError as error:  # the kernel limits a user's watches
            log.warning("%s looks for versions every %g s only: %s", self.name, self._remind_s, error)
            return
        loop, published = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(watch, published.set)
        try:
            while True:
                with suppress(BlockingIOError):
                    os.read(watch, 2**16)
                published.clear()
                self._versions.discover()
                await published.wait()
        finally:
            loop.remove_reader(watch)
            os.close(watch)

    async def _check_regularly(self) -> None:
        """Every few seconds, find versions and crashed children whose event was lost."""
        while True:
            await asyncio.sleep(self._remind_s)
            self._versions.check()

    # ---- called by the uplink

    def greet(self) -> None:
        """Tell a new or restarted parent which versions this node has and wants."""
        self._versions.failure = None
        self._uplink.send(m.Attach(self._store.newest))
        self._versions.downloads.greet()
        self._versions.want_missing()

    def remind(self) -> None:
        """Repeat requests that the parent may have lost."""
        self._versions.downloads.remind()
        self._versions.want_missing()

    def handle(self, message: m.ToChild) -> bool:
        """Handle a record from the parent; False if the node should try its next parent."""
        match message:
            case m.Chunk():
                self._versions.downloads.handle_chunk(message)
            case m.Announce():
                self._versions.downloads.handle_announce(message)
            case m.Lost(version):
                self._versions.handle_lost(version)
            case m.Failed(version) if self._versions.needs(version):
                if len(self._uplink.parents) > 1:
                    return False
                self._versions.give_up(version, message.reason)
        return True

    @property
    def is_idle(self) -> bool:
        """True while no version arrives."""
        return not self._versions.downloads

    def left_parent(self, old: str, new: str) -> None:
        """Report that the node leaves the parent at one endpoint for another."""
        self._emit(m.ParentLost(self.name, old, new))


class NodeVersions:
    """The versions of one node: which it has, which arrive or are wanted, and which it may retire.

    A version that a child wants, a subscriber pinned or a delta builds on stays in the store
    (`tests/relay/test_store.py::test_what_is_newest_pinned_or_held_stays`). `RelayNode` sets `tasks` when it runs.
    """

    tasks: asyncio.TaskGroup

    def __init__(
        self,
        uplink: Uplink,
        downlink: Downlink,
        store: Store,
        *,
        chunk_bytes: int,
        emit: Callable[[m.RelayEvent], None],
        now: Callable[[], float],
    ) -> None:
        self.failure: m.Failed | None = None  # of the newest version, for children that attach later
        self.subscribers = LocalSubscribers(
            store,
            downlink.send,
            pulled=lambda name, version, waited_s: emit(m.VersionPulled(uplink.name, name, version, waited_s)),
            now=now,
        )
        self.downloads = Downloads(
            store,
            downlink,
            chunk_bytes=chunk_bytes,
            send=uplink.send,
            is_wanted=self._is_wanted,
            complete=lambda download: self._handle_complete(download.stored.manifest, download),
            discard=self._discard,
            give_up=self.give_up,
            now=now,
        )
        self._name = uplink.name
        self._uplink = uplink
        self._downlink = downlink
        self._store = store
        self._encoder = DeltaEncoder(downlink.forward_chunk, self.retire_surplus)
        self._emit = emit

    def find(self, version: int) -> StoredVersion | None:
        """The version, complete or arriving; None if it is neither."""
        return self.downloads.find(version) or self._store.complete.get(version)

    def needs(self, version: int) -> bool:
        """True if the version is not complete here, and is the newest, arrives, or is wanted below."""
        if version in self._store.complete:
            return False
        return version in self.downloads or version > self.downloads.newest or self._is_wanted(version)

    def locate(self, version: int) -> None:
        """Ask the nodes above for a version that a child or a pull wants; at the root, refuse it if it is gone."""
        if version in self._store.complete:
            return
        if self._uplink.parents:
            self._uplink.send(m.Want(version, arriving=version in self.downloads))
            return
        self.discover()  # the publisher may just have completed it
        if version not in self._store.complete:
            self.handle_lost(version)

    def want_missing(self) -> None:
        """Ask the parent for each version that a child or a pull waits for."""
        for version in self.subscribers.awaited | self._downlink.wanted:
            if self.find(version) is None:
                self._uplink.send(m.Want(version))

    def check(self) -> None:
        """Find published versions and crashed children that no event told of."""
        if not self._uplink.parents:
            self.discover()
        if self._store.complete:
            self._downlink.probe(m.Newest(self._store.newest))
        self.retire_surplus()

    def discover(self) -> None:
        """Announce the versions that the publisher has completed in the root's store, and start their deltas."""
        for stored in self._store.discover():
            newest = stored.manifest.version == self._store.newest
            if newest and self._downlink.has_children:
                others = [other for other in self._store.complete.values() if other is not stored]
                self._encoder.start(stored, others, self.tasks)
            self._downlink.announce(stored, newest=newest)
            self._handle_complete(stored.manifest)

    def handle_lost(self, version: int) -> None:
        """Tell children and subscribers that no node has the version."""
        if version in self.downloads:
            self.downloads.drop(version)
            self._uplink.send(m.Attach(self.downloads.newest))  # so that the parent announces the newest again
        self._downlink.refuse(version, m.Lost(version), newest=False)
        self.subscribers.handle_lost(version)
        self.downloads.start_waiting()

    def give_up(self, version: int, reason: str) -> None:
        """Tell parent, children and subscribers that this node cannot have the version."""
        log.error("%s gives up version %d: %s", self._name, version, reason)
        failed = m.Failed(version, reason)
        self._uplink.send(m.Done(version))
        self._downlink.refuse(version, failed, newest=version >= self.downloads.newest)
        self.downloads.drop(version)
        self.downloads.note_failure(version)
        if version > self.downloads.newest:
            self.failure = failed
        self.subscribers.handle_failed(failed)
        self._emit(m.VersionFailed(self._name, version, reason))
        self.downloads.start_waiting()

    def retire_surplus(self) -> None:
        """Retire versions beyond those to keep that nobody needs."""
        self._stop_old_encoders()
        bases = {stored.base for stored in self._store.complete.values() if stored.unencoded}
        needed = {base for base in bases | self.downloads.bases if base is not None}
        for stored in self._store.surplus(self._downlink.wanted | needed):
            self._encoder.stop(stored)
            self._downlink.forget_version(stored.manifest.version)
            self._discard(stored)

    def _stop_old_encoders(self) -> None:
        """Stop encoders of old versions and drop their deltas, so that their bases can leave the store.

        Deltas remain for wanted versions, for the newest version, and for the second newest once it is complete.
        """
        newest = sorted(self._store.complete)[-2:]
        for version, stored in self._store.complete.items():
            kept = version in self._downlink.wanted or version == self._store.newest
            if stored.base is not None and not kept and (stored.unencoded or version not in newest):
                self._encoder.stop(stored)

    def _discard(self, stored: StoredVersion) -> None:
        doomed = self._store.retire(stored)
        if doomed is not None:
            self.tasks.create_task(asyncio.to_thread(self._store.delete, doomed), name=f"{self._name}-delete")

    def _is_wanted(self, version: int) -> bool:
        return version in self._downlink.wanted or version in self.subscribers.awaited

    def _handle_complete(self, manifest: m.Manifest, download: Download | None = None) -> None:
        """Report a complete version and answer the pulls that wait for it; `download` is None at the root."""
        self._emit(
            m.VersionComplete(
                node=self._name,
                version=manifest.version,
                digest=manifest.digest,
                num_bytes=manifest.num_bytes,
                base=download.stored.base if download else None,
                wire_bytes=download.wire_bytes if download else 0,
                first_byte_s=download.first_byte_s if download else 0.0,
                elapsed_s=download.elapsed_s if download else 0.0,
                parent=self._uplink.parent if download else "",
            )
        )
        self.subscribers.handle_complete(manifest.version)
        self.retire_surplus()


class DeltaEncoder:
    """Makes a version's deltas against the version before, chunk by chunk, in threads of the root.

    Only a node that has the version before can use them. A node skips a version if two are published while it
    downloads one, or if the root finds two at once. Then it gets the next version in full, though few bytes
    changed, which takes longer: where versions come faster than a full one travels, every version may travel in
    full. A version also goes out in full to nodes that still wait for its deltas when a newer one is published, or
    that ask for an old version by number. `forward_chunk` is called for each chunk that children may have now, and
    `done` when the base is no longer needed. A child that waits for a delta always gets it or the chunk itself,
    also when the weights turn out to change everywhere, and when the version is overtaken
    (`tests/relay/test_tree_delta.py`).
    """

    def __init__(self, forward_chunk: Callable[[StoredVersion, int, int], None], done: Callable[[], None]) -> None:
        self._forward_chunk = forward_chunk
        self._done = done

    def start(self, stored: StoredVersion, older: Iterable[StoredVersion], group: asyncio.TaskGroup) -> None:
        """Start to encode, if the newest of `older` has the same layout."""
        base = max(older, key=lambda version: version.manifest.version, default=None)
        if base is None or not stored.manifest.has_layout_of(base.manifest):
            return
        stored.base = base.manifest.version
        files = range(len(stored.manifest.files))
        stored.unencoded = {(file, i) for file in files for i in range(stored.manifest.num_chunks(file))}
        group.create_task(self._encode(stored, base), name=f"encode-{stored.manifest.version}")

    async def _encode(self, stored: StoredVersion, base: StoredVersion) -> None:
        """Encode all chunks of a version in `ENCODERS` tasks, and forward each chunk as soon as it is encoded.

        If the first `VAIN_DELTAS` deltas save nothing, encoding stops and the version goes out in full.
        """
        chunks = iter(sorted(stored.unencoded))
        num_vain = 0

        async def encode_chunks() -> None:
            """Take chunks from the common iterator until none is left or encoding stops."""
            nonlocal num_vain
            for file, index in chunks:
                try:
                    delta = await asyncio.to_thread(stored.encode_delta, base, file, index)
                except FileNotFoundError:  # an overtaken version was retired meanwhile
                    assert stored.base is None, f"{base.folder} went while {stored.folder} was built on it"
                if stored.base is None:
                    return  # stopped meanwhile
                stored.add_delta(file, index, delta)
                self._forward_chunk(stored, file, index)
                num_vain += delta is None
                if num_vain >= VAIN_DELTAS and not stored.deltas:
                    self.stop(stored)

        async with asyncio.TaskGroup() as workers:
            for _ in range(ENCODERS):
                workers.create_task(encode_chunks())
        self._done()

    def stop(self, stored: StoredVersion) -> None:
        """Make no more deltas of a version and drop those made; chunks that wait for one are sent in full."""
        waiting = sorted(stored.unencoded)
        stored.forget_deltas()
        for file, index in waiting:
            self._forward_chunk(stored, file, index)
