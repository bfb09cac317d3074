"""One relay: takes versions from its parent, gives them on chunk by chunk, and serves the host's subscribers.

The runtime starts one per host; the root shares its store with the publisher and has no parent. Invariant: a
version is served to subscribers only when complete and verified, to children from its first chunk on.
Handlers are synchronous, so each record is dealt with whole; only the two loops and the threads wait.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from laminar_py.relay import messages as m
from laminar_py.relay.desk import Desk
from laminar_py.relay.downlink import Downlink
from laminar_py.relay.encoder import Encoder
from laminar_py.relay.intake import MAX_WINDOW, BrokenVersionError, Intake, Verdict, window_of
from laminar_py.relay.store import NoRoomError, Store, StoredVersion, file_digest, version_digest
from laminar_py.relay.transport import Listener, RelayKeys, Wire
from laminar_py.relay.uplink import VISIT_S, Uplink

log = logging.getLogger(__name__)


class RelayNode:
    """A node of the tree: `await node.start()`, then `await node.run()` until `await node.close()`.

    `parents` are endpoints, nearest first, root last (`Topology.ancestors`); none for the root. A parent that
    is silent for `parent_timeout_s`, or breaks the connection, is left for the next one, after the last comes the
    first again. After `visit_s` with another than the nearest, an idle node looks for the nearest.
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
        self._chunk_bytes = chunk_bytes
        self._emit = emit
        self._now = now
        self._wire = Wire(keys, heartbeat_s=parent_timeout_s)
        self._uplink = Uplink(
            name,
            parents,
            wire=self._wire,
            timeout_s=parent_timeout_s,
            chunk_bytes=chunk_bytes,
            emit=emit,
            greet=self._greet,
            handle=self._on_parent,
            is_idle=lambda: not self._intakes,
            visit_s=visit_s,
        )
        self._store = Store(store, keep_versions=keep_versions)
        self._downlink = Downlink()
        self._encoder = Encoder(self._downlink.forward)
        self._desk = Desk(self._store, self._downlink.send)
        self._intakes: dict[int, Intake] = {}  # by version
        self._overtook: int | None = None  # version that arrives in place of one that was abandoned for it
        self._next: m.Announce | None = None  # the newest that came while such a one arrives
        self._unsure: set[int] = set()  # arriving versions that a new parent may not have
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
        self._downlink.listener = self._wire.listen(*self._address)

    async def run(self) -> None:
        """Relay until `close`."""
        listener = self._listener
        if self._closing.is_set():
            return
        self._running = True
        try:
            async with asyncio.TaskGroup() as self._group:
                tasks = [self._group.create_task(self._serve(listener), name=f"{self.name}-serve")]
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
            case m.Attach():
                self._on_attach(sender)
            case m.Want(version):
                self._on_want(sender, version)
            case m.Done(version):
                self._downlink.release(sender, version)
                self._retire_surplus()
            case m.Subscribe():
                self._desk.subscribe(sender)
            case m.Pull(version=version):
                if not self._desk.ask(sender, message) and version is not None:
                    self._locate(version)
                self._retire_surplus()  # the pin may have moved
            case m.Written():
                self._discover()

    def _on_attach(self, child: bytes) -> None:
        self._downlink.attach(child)
        newest = self._find(self._newest)
        if newest is not None:
            self._downlink.send(child, m.Announce(newest.manifest, newest.base))
        if self._failure and self._failure.version > self._newest:
            self._downlink.send(child, self._failure)

    def _on_fetch(self, child: bytes, fetch: m.Fetch) -> None:
        stored = self._find(fetch.version)
        if stored is None:
            return  # given up here since; the child has been told what came instead
        for index in range(fetch.first_chunk, fetch.first_chunk + min(fetch.credits, MAX_WINDOW)):
            if not stored.knows(fetch.file, index):
                break
            self._downlink.serve(child, stored, fetch.file, index, base=fetch.base)

    def _on_want(self, child: bytes, version: int) -> None:
        self._downlink.hold(child, version)
        stored = self._find(version)
        if stored is not None:
            self._downlink.send(child, m.Announce(stored.manifest, stored.base))
        self._locate(version)

    def _locate(self, version: int) -> None:
        """Somebody below needs this version: the nodes above must find and keep it."""
        if version in self._store.complete:
            return
        if self._uplink.parents:
            self._uplink.tell(m.Want(version))
            return
        self._discover()  # the publisher's word may be on its way
        if version not in self._store.complete:
            self._on_lost(version)

    def _discover(self) -> None:
        for stored in self._store.discover():
            newest = stored.manifest.version == self._newest
            if newest and self._downlink.has_children:
                others = [one for one in self._store.complete.values() if one is not stored]
                self._encoder.start(stored, others, self._group)
            self._downlink.announce(stored, newest=newest)
            self._now_complete(stored.manifest)

    # Above: the parent.

    def _greet(self) -> None:
        """The parent is new, or as good as new: it knows nothing of this node."""
        self._unsure = set(self._intakes)
        if self._overtook in self._intakes:
            self._uplink.tell(m.Want(self._overtook))
        self._uplink.tell(m.Attach(self.name))
        for version in self._desk.awaited() | (self._downlink.held - self._store.complete.keys()):
            self._uplink.tell(m.Want(version))

    def _on_parent(self, message: m.ToChild) -> bool:
        match message:
            case m.Chunk():
                self._on_chunk(message)
            case m.Announce():
                self._on_announce(message)
            case m.Lost(version):
                self._on_lost(version)
            case m.Failed(version) if self._needs(version):
                if len(self._uplink.parents) > 1:
                    return False
                self._fail(version, message.reason)
        return True

    def _on_announce(self, announce: m.Announce) -> None:
        version = announce.manifest.version
        for arriving in (self._unsure & self._intakes.keys()) - {version}:
            self._uplink.tell(m.Want(arriving))  # or hear that it is lost
        self._unsure.clear()
        if version in self._intakes:
            self._intakes[version].restart()
            self._ask(self._intakes[version])
        elif self._overtook in self._intakes and version > self._newest and not self._wanted(version):
            self._next = announce  # one of two versions comes to its end, however fast they are published
        elif self._needs(version):
            try:
                self._begin(announce)
            except (NoRoomError, BrokenVersionError) as error:
                self._fail(version, str(error))
        else:
            self._uplink.tell(m.Done(version))  # whoever wanted it here has gone

    def _begin(self, announce: m.Announce) -> None:
        manifest = announce.manifest
        self._check(manifest)
        if manifest.version > self._newest:  # latest wins
            for overtaken in [old for old in self._intakes if not self._wanted(old)]:
                self._drop(overtaken)
                self._uplink.tell(m.Done(overtaken))
                self._overtook = manifest.version
        if self._overtook == manifest.version:
            self._uplink.tell(m.Want(manifest.version))  # the parent may not abandon it either
        base = None if announce.base is None else self._store.complete.get(announce.base)
        if base is not None and not manifest.fits(base.manifest):
            base = None
        stored = self._store.begin(manifest)
        intake = Intake(stored, window=window_of(manifest.chunk_bytes), now=self._now, base=base)
        self._intakes[manifest.version] = intake
        self._downlink.announce(stored, newest=manifest.version == self._newest)
        self._ask(intake)

    def _begin_next(self) -> None:
        """What was announced while a version arrived that must not be abandoned."""
        announce, self._next = self._next, None
        if announce is not None:
            self._on_announce(announce)

    def _check(self, manifest: m.Manifest) -> None:
        if manifest.digest != version_digest(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: its digest is not that of its files")
        if len({entry.name for entry in manifest.files}) < len(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: two of its files have one name")
        if manifest.chunk_bytes > self._chunk_bytes:
            raise BrokenVersionError(
                f"relay.chunk_bytes={self._chunk_bytes} is below the {manifest.chunk_bytes} that version"
                f" {manifest.version} was cut with; set the same for the publisher and all nodes"
            )

    def _ask(self, intake: Intake) -> None:
        for fetch in intake.grant():
            self._uplink.tell(fetch)

    def _on_chunk(self, chunk: m.Chunk) -> None:
        intake = self._intakes.get(chunk.version)
        if intake is None:
            return  # overtaken while it was on its way
        try:
            verdict = intake.accept(chunk)
        except (NoRoomError, BrokenVersionError) as error:
            self._fail(chunk.version, str(error))
            return
        if verdict is Verdict.DAMAGED:
            self._uplink.tell(m.Fetch(chunk.version, chunk.file, chunk.index, 1))
        elif verdict is Verdict.WRITTEN:
            self._downlink.forward(intake.stored, chunk.file, chunk.index)
            if intake.stored.has_file(chunk.file):
                self._group.create_task(self._verify(intake, chunk.file), name=f"{self.name}-verify")
            self._ask(intake)

    async def _verify(self, intake: Intake, file: int) -> None:
        try:
            digest = await asyncio.to_thread(file_digest, intake.stored.file_path(file))
        except FileNotFoundError:
            assert self._intakes.get(intake.version) is not intake, f"{intake.stored.folder} lost a file"
        if self._intakes.get(intake.version) is not intake:
            return  # given up in the meantime
        try:
            right = intake.judge_file(file, digest)
        except BrokenVersionError as error:
            self._fail(intake.version, str(error))
            return
        if not right:
            self._ask(intake)
        elif intake.verified:
            self._finish(intake)

    def _finish(self, intake: Intake) -> None:
        self._uplink.tell(m.Done(intake.version))
        self._store.commit(intake.stored)
        del self._intakes[intake.version]
        self._now_complete(intake.stored.manifest, intake)
        self._begin_next()

    # What becomes of versions.

    @property
    def _newest(self) -> int:
        """The highest version that is here or arrives, -1 if there is none."""
        return max(self._store.newest, *self._intakes, -1)

    def _find(self, version: int) -> StoredVersion | None:
        if version in self._intakes:
            return self._intakes[version].stored
        return self._store.complete.get(version)

    def _wanted(self, version: int) -> bool:
        return version in self._downlink.held or version in self._desk.awaited()

    def _needs(self, version: int) -> bool:
        if version in self._store.complete:
            return False
        return version in self._intakes or version > self._newest or self._wanted(version)

    def _now_complete(self, manifest: m.Manifest, intake: Intake | None = None) -> None:
        self._emit(
            m.VersionComplete(
                self.name,
                manifest.version,
                manifest.digest,
                manifest.num_bytes,
                wire_bytes=intake.wire_bytes if intake else 0,
                first_byte_s=intake.first_byte_s if intake else 0.0,
                elapsed_s=intake.elapsed_s if intake else 0.0,
            )
        )
        for version, stored in self._store.complete.items():
            if version < self._newest and stored.base is not None:
                self._encoder.forget(stored)
        self._desk.completed(manifest.version)
        self._retire_surplus()

    def _on_lost(self, version: int) -> None:
        if version in self._intakes:
            self._drop(version)
            self._uplink.tell(m.Attach(self.name))  # to hear of the newest, which may have been declined
        self._downlink.refuse(version, m.Lost(version), newest=False)
        self._desk.lost(version)
        self._begin_next()

    def _fail(self, version: int, reason: str) -> None:
        """This version cannot be had here. Those below are told; the node itself goes on."""
        log.error("%s gives up version %d: %s", self.name, version, reason)
        failed = m.Failed(version, reason)
        self._uplink.tell(m.Done(version))
        self._downlink.refuse(version, failed, newest=version >= self._newest)
        if version in self._intakes:
            self._drop(version)
        if version > self._newest:
            self._failure = failed
        self._desk.failed(failed)
        self._emit(m.VersionFailed(self.name, version, reason))
        self._begin_next()

    def _drop(self, version: int) -> None:
        stored = self._intakes.pop(version).stored
        self._downlink.forget(version)
        self._delete(stored)

    def _retire_surplus(self) -> None:
        under_way = [intake.stored for intake in self._intakes.values()]
        encoding = [stored for stored in self._store.complete.values() if stored.unencoded]
        bases = {stored.base for stored in (*under_way, *encoding)}
        for stored in self._store.surplus(self._downlink.held | {base for base in bases if base is not None}):
            self._delete(stored)

    def _delete(self, stored: StoredVersion) -> None:
        doomed = self._store.retire(stored)
        self._group.create_task(asyncio.to_thread(self._store.delete, doomed), name=f"{self.name}-delete")
