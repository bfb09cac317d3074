"""One relay: takes versions from its parent, gives them on chunk by chunk, and serves the host's subscribers.

The runtime starts one per host; the root shares its store with the publisher and has no parent. Invariant: a
version is served to subscribers only when complete and verified, to children from its first chunk on.
Handlers are synchronous, so each record is dealt with whole; only the loops and the threads wait. What arrives is
dealt with in `arrivals`, what is owed to children in `downlink`, to subscribers in `desk`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar_py.relay.node.arrivals import Arrivals
from laminar_py.relay.node.desk import Desk
from laminar_py.relay.node.downlink import Downlink
from laminar_py.relay.node.encoder import Encoder
from laminar_py.relay.node.intake import MAX_WINDOW, Intake, window_of
from laminar_py.relay.node.pace import Pace
from laminar_py.relay.node.uplink import VISIT_S, Uplink
from laminar_py.relay.store.version import StoredVersion
from laminar_py.relay.store.versions import Store
from laminar_py.relay.wire import messages as m
from laminar_py.relay.wire.transport import Listener, RelayKeys, Wire

log = logging.getLogger(__name__)

CONTROL_RECORDS = 256  # beside chunks, that may wait for a connection


class RelayNode:
    """A node of the tree: `await node.start()`, then `await node.run()` until `await node.close()`.

    `parents` are endpoints, nearest first, root last (`Topology.ancestors`); none for the root. A parent that
    is silent for `parent_timeout_s`, or breaks the connection, is left for the next one, after the last comes the
    first again. After `visit_s` with another than the nearest, an idle node looks for the nearest. Children get
    `max_bytes_per_s` of weights together, None for as fast as they take them.
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
        max_bytes_per_s: float | None = None,
        emit: Callable[[m.RelayEvent], None] = lambda event: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._address = (host, port)
        self._max_queue = 4 * window_of(chunk_bytes) + CONTROL_RECORDS
        self._remind_s = parent_timeout_s
        self._emit = emit
        self._wire = Wire(keys, heartbeat_s=parent_timeout_s)
        self._store = Store(store, keep_versions=keep_versions)
        self._downlink = Downlink(Pace(max_bytes_per_s, now=now))
        self._encoder = Encoder(self._downlink.forward, self._retire_surplus)
        self._desk = Desk(self._store, self._downlink.send, pulled=self._pulled, now=now)
        self._uplink = Uplink(
            name,
            parents,
            wire=self._wire,
            timeout_s=parent_timeout_s,
            chunk_bytes=chunk_bytes,
            emit=emit,
            greet=self._greet,
            remind=self._remind,
            handle=self._on_parent,
            is_idle=lambda: not self._arrivals,
            visit_s=visit_s,
        )
        self._arrivals = Arrivals(
            self._store,
            self._downlink,
            chunk_bytes=chunk_bytes,
            tell=self._uplink.tell,
            is_wanted=self._wanted,
            finished=self._finished,
            discard=self._discard,
            give_up=self._fail,
            now=now,
        )
        self._failure: m.Failed | None = None  # of the newest version, for children that come later
        self._running = False
        self._closing = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def endpoint(self) -> str:
        """Where children and subscribers connect, e.g. `tcp://127.0.0.1:41234`; known after `start`."""
        return self._listener.endpoint

    @property
    def _listener(self) -> Listener:
        assert self._downlink.listener is not None, f"{self.name} has not been started"
        return self._downlink.listener

    async def start(self) -> None:
        """Scan the store and bind. Raises `ValueError` naming relay.base_port or relay.host."""
        self._store.open()
        self._downlink.listener = self._wire.listen(*self._address, max_queue=self._max_queue)

    async def run(self) -> None:
        """Relay until `close`."""
        listener = self._listener
        if self._closing.is_set():
            return
        self._running = True
        try:
            async with asyncio.TaskGroup() as self._group:
                tasks = [self._group.create_task(self._serve(listener), name=f"{self.name}-serve")]
                tasks.append(self._group.create_task(self._look(), name=f"{self.name}-look"))
                tasks.append(self._group.create_task(self._downlink.keep_pace(), name=f"{self.name}-pace"))
                if self._uplink.parents:
                    tasks.append(self._group.create_task(self._uplink.run(), name=f"{self.name}-follow"))
                self._retire_surplus()
                await self._closing.wait()
                for task in tasks:
                    task.cancel()
        finally:
            self._shut()

    async def close(self) -> None:
        """End `run` and give the port back."""
        self._closing.set()
        if self._running:
            await self._stopped.wait()
        else:
            self._shut()

    def _shut(self) -> None:
        if self._downlink.listener is not None:
            self._downlink.listener.close()
        self._wire.close()
        self._stopped.set()

    # Below: children, subscribers, the publisher.

    async def _serve(self, listener: Listener) -> None:
        while True:
            sender, message = await listener.receive()
            self._on_child(sender, message)

    def _on_child(self, sender: bytes, message: m.ToParent) -> None:
        match message:
            case m.Fetch():
                self._on_fetch(sender, message)
            case m.Attach(newest):
                self._on_attach(sender, newest)
            case m.Want():
                self._on_want(sender, message)
            case m.Done(version):
                self._downlink.release(sender, version)
                self._retire_surplus()
            case m.Subscribe():
                self._desk.subscribe(sender)
            case m.Pull(version=version):
                if not self._desk.ask(sender, message) and version is not None:
                    self._locate(version)
                self._retire_surplus()  # the pin may have moved
            case m.Release():
                self._desk.release(message)
                self._retire_surplus()
            case m.Written():
                self._discover()

    def _on_attach(self, child: bytes, heard_of: int) -> None:
        self._downlink.attach(child)
        newest = self._find(self._arrivals.newest)
        if newest is not None and newest.manifest.version > heard_of:
            self._downlink.send(child, m.Announce(newest.manifest, newest.base))
        if self._failure and self._failure.version > max(self._arrivals.newest, heard_of):
            self._downlink.send(child, self._failure)

    def _on_fetch(self, child: bytes, fetch: m.Fetch) -> None:
        stored = self._find(fetch.version)
        if stored is None:
            if fetch.version not in self._downlink.held:  # else it is looked for
                self._downlink.send(child, m.Lost(fetch.version))
            return
        for index in range(fetch.first_chunk, fetch.first_chunk + min(fetch.credits, MAX_WINDOW)):
            if not stored.knows(fetch.file, index):
                break
            self._downlink.serve(child, stored, fetch.file, index, base=fetch.base)

    def _on_want(self, child: bytes, want: m.Want) -> None:
        self._downlink.hold(child, want.version)
        stored = self._find(want.version)
        if stored is not None and not want.arriving:
            self._downlink.send(child, m.Announce(stored.manifest, stored.base))
        self._locate(want.version)

    def _locate(self, version: int) -> None:
        """Somebody below needs this version: the nodes above must find and keep it."""
        if version in self._store.complete:
            return
        if self._uplink.parents:
            self._uplink.tell(m.Want(version, arriving=version in self._arrivals))
            return
        self._discover()  # the publisher's word may be on its way
        if version not in self._store.complete:
            self._on_lost(version)

    async def _look(self) -> None:
        """Now and then: the publisher's word may be lost, and a child that holds a version may be gone."""
        while True:
            await asyncio.sleep(self._remind_s)
            if not self._uplink.parents:
                self._discover()
            if self._store.complete:
                self._downlink.probe(m.Newest(self._store.newest))
            self._retire_surplus()

    def _discover(self) -> None:
        for stored in self._store.discover():
            newest = stored.manifest.version == self._store.newest
            if newest and self._downlink.has_children:
                others = [one for one in self._store.complete.values() if one is not stored]
                self._encoder.start(stored, others, self._group)
            self._downlink.announce(stored, newest=newest)
            self._now_complete(stored.manifest)

    # Above: the parent.

    def _greet(self) -> None:
        """The parent is new, or as good as new: it knows nothing of this node."""
        self._failure = None
        self._uplink.tell(m.Attach(self._store.newest))
        self._arrivals.greet()
        self._want_what_is_missing()

    def _remind(self) -> None:
        """Whatever was said may have been lost."""
        self._arrivals.remind()
        self._want_what_is_missing()

    def _want_what_is_missing(self) -> None:
        for version in self._desk.awaited() | self._downlink.held:
            if self._find(version) is None:
                self._uplink.tell(m.Want(version))

    def _on_parent(self, message: m.ToChild) -> bool:
        match message:
            case m.Chunk():
                self._arrivals.received(message)
            case m.Announce():
                self._arrivals.announced(message)
            case m.Lost(version):
                self._on_lost(version)
            case m.Failed(version) if self._needs(version):
                if len(self._uplink.parents) > 1:
                    return False
                self._fail(version, message.reason)
        return True

    # What becomes of versions.

    def _find(self, version: int) -> StoredVersion | None:
        return self._arrivals.find(version) or self._store.complete.get(version)

    def _wanted(self, version: int) -> bool:
        return version in self._downlink.held or version in self._desk.awaited()

    def _needs(self, version: int) -> bool:
        if version in self._store.complete:
            return False
        return version in self._arrivals or version > self._arrivals.newest or self._wanted(version)

    def _finished(self, intake: Intake) -> None:
        self._now_complete(intake.stored.manifest, intake)

    def _now_complete(self, manifest: m.Manifest, intake: Intake | None = None) -> None:
        self._emit(
            m.VersionComplete(
                node=self.name,
                version=manifest.version,
                digest=manifest.digest,
                num_bytes=manifest.num_bytes,
                base=intake.stored.base if intake else None,
                wire_bytes=intake.wire_bytes if intake else 0,
                first_byte_s=intake.first_byte_s if intake else 0.0,
                elapsed_s=intake.elapsed_s if intake else 0.0,
                parent=self._uplink.parent if intake else "",
            )
        )
        self._desk.completed(manifest.version)
        self._retire_surplus()

    def _pulled(self, subscriber: str, version: int, waited_s: float) -> None:
        self._emit(m.VersionPulled(self.name, subscriber, version, waited_s))

    def _on_lost(self, version: int) -> None:
        if version in self._arrivals:
            self._arrivals.drop(version)
            self._uplink.tell(m.Attach(self._arrivals.newest))  # to hear of the newest, which was declined
        self._downlink.refuse(version, m.Lost(version), newest=False)
        self._desk.lost(version)
        self._arrivals.begin_next()

    def _fail(self, version: int, reason: str) -> None:
        """This version cannot be had here. Those below are told; the node itself goes on."""
        log.error("%s gives up version %d: %s", self.name, version, reason)
        failed = m.Failed(version, reason)
        self._uplink.tell(m.Done(version))
        self._downlink.refuse(version, failed, newest=version >= self._arrivals.newest)
        self._arrivals.drop(version)
        self._arrivals.gave_up(version)
        if version > self._arrivals.newest:
            self._failure = failed
        self._desk.failed(failed)
        self._emit(m.VersionFailed(self.name, version, reason))
        self._arrivals.begin_next()

    def _retire_surplus(self) -> None:
        self._forget_deltas()
        bases = {stored.base for stored in self._store.complete.values() if stored.unencoded}
        needed = {base for base in bases | self._arrivals.bases if base is not None}
        for stored in self._store.surplus(self._downlink.held | needed):
            self._encoder.forget(stored)
            self._downlink.forget(stored.manifest.version)
            self._discard(stored)

    def _forget_deltas(self) -> None:
        """Of all but the newest two; of the second also if it is not all encoded yet, which would keep its base.

        Versions that children hold keep theirs.
        """
        newest = sorted(self._store.complete)[-2:]
        for version, stored in self._store.complete.items():
            kept = version in self._downlink.held or version == self._store.newest
            if stored.base is not None and not kept and (stored.unencoded or version not in newest):
                self._encoder.forget(stored)

    def _discard(self, stored: StoredVersion) -> None:
        doomed = self._store.retire(stored)
        if doomed is not None:
            self._group.create_task(asyncio.to_thread(self._store.delete, doomed), name=f"{self.name}-delete")
