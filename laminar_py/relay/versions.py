"""The versions of one relay node: complete, arriving, wanted, and surplus versions to retire.

`RelayNode` owns `NodeVersions` and passes records of parent, children and subscribers on. The newest version wins,
but of two versions one is always completed, however fast they are published; so is a version that the next one
builds on (`tests/relay/test_tree.py::test_however_fast_versions_come_one_of_two_is_completed`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import msgspec

import laminar_py.relay.messages as m
from laminar_py.relay.delta_encoder import THREADS, DeltaEncoder
from laminar_py.relay.digests import version_digest
from laminar_py.relay.downlink import Downlink, LocalSubscribers
from laminar_py.relay.downloads import BrokenVersionError, ChunkOutcome, Decision, Download, decide
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.requests import PARENT, window_of
from laminar_py.relay.sources import Sources
from laminar_py.relay.stored_version import NoRoomError, StoredVersion
from laminar_py.relay.uplink import Uplink
from laminar_py.relay.version_store import VersionStore

log = logging.getLogger(__name__)

MAX_DOUBLINGS = 10  # of the pause before a failed version is tried again: an hour and a half
# Of deltas, requests for chunks and pulls of changes, before work that takes cores and memory
HEAD_START_S = 0.005


class NodeVersions:
    """The versions of one node. `RelayNode` sets `sources`, and `tasks` when it runs.

    A version that a child wants, a subscriber pinned or a delta builds on stays in the store
    (`tests/relay/test_store.py::test_what_is_newest_pinned_or_held_stays`).
    """

    sources: Sources
    tasks: asyncio.TaskGroup

    def __init__(
        self,
        uplink: Uplink,
        downlink: Downlink,
        store: VersionStore,
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
        self._name = uplink.name
        self._uplink = uplink
        self._downlink = downlink
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._encoder = DeltaEncoder(store, downlink.forward_chunk, self._handle_compared)
        self._changes_wanted = False  # a subscriber has pulled with a base
        self._emit = emit
        self._now = now
        self._downloads: dict[int, Download] = {}  # by version
        self._overtook: int | None = None  # arriving version for which another one was abandoned
        self._later: m.Announce | None = None  # the newest with `Decision.LATER`
        self._failed = -1  # the highest version that was given up
        self._num_failures = 0  # of that version
        self._retiring = False  # while `_retire_surplus` runs
        self._unmapping: StoredVersion | None = None  # whose pages a thread releases
        self._pause = 0  # reminders before the parent may announce it again: twice as many after each failure

    @property
    def is_idle(self) -> bool:
        """True while no version arrives."""
        return not self._downloads

    @property
    def newest(self) -> int:
        """The highest version that is complete here or arrives, -1 if there is none."""
        return max(self._store.newest, *self._downloads, -1)

    def find(self, version: int) -> StoredVersion | None:
        """Return a version that is complete or arrives here; None if it does neither."""
        if version in self._downloads:
            return self._downloads[version].stored
        return self._store.complete.get(version)

    def needs(self, version: int) -> bool:
        """True if the version has not arrived here, and is on its way, above all here, or wanted below."""
        if version in self._store.complete:
            return False
        if version in self._downloads:
            return not self._downloads[version].arrived
        return version > self.newest or self._is_wanted(version)

    def stop(self) -> None:
        """Let no thread compare versions or write into arriving ones any more, at the end of the node."""
        self._encoder.close()
        for version in list(self._downloads):
            download = self._downloads.pop(version)
            download.stop()
            download.drop_changes()
        self.sources.close()

    # ---- called for children, subscribers and the root's folder

    def locate(self, version: int) -> None:
        """Ask the nodes above for a wanted version that is not here; at the root, send `Lost` if it is gone."""
        if version in self._store.complete:
            return
        if self._uplink.parents:
            self._uplink.send(m.Want(version, arriving=version in self._downloads))
            return
        self.discover()  # the publisher may just have completed it
        if version not in self._store.complete:
            self.handle_lost(version)

    def check(self) -> None:
        """Find versions whose event was lost, probe children that may have crashed, retire the surplus."""
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
                self._encode(stored, payloads=True, changes=self._changes_wanted)
            elif newest and self._changes_wanted:
                self._encode(stored, payloads=False, changes=True)
            self._downlink.announce(stored, newest=newest)
            self._handle_complete(stored.manifest)

    def want_changes(self) -> None:
        """Make change files from now on, since an engine has a base; also for the newest version."""
        newest = self._store.complete.get(self._store.newest)
        if not self._changes_wanted and newest is not None:
            self._encode(newest, payloads=False, changes=True)
        self._changes_wanted = True

    def _encode(self, stored: StoredVersion, *, payloads: bool, changes: bool) -> None:
        """Compare a version with the version before, if that is here and has the same layout."""
        older = (other for other in self._store.complete.values() if other is not stored)
        base = max(older, key=lambda other: other.manifest.version, default=None)
        if base is not None and stored.manifest.has_layout_of(base.manifest):
            found = self._store.begin_changes(stored, base) if changes else None
            self._encoder.start(stored, base, self.tasks, payloads=payloads, changes=found)

    def _handle_compared(self) -> None:
        """Answer pulls that waited for changes; the base may be surplus now."""
        self.subscribers.answer_waiting()
        self.retire_surplus()

    @property
    def _surplus(self) -> list[StoredVersion]:
        """Complete versions that are not to be kept, pinned, wanted, or the base of a running delta."""
        bases = {base.manifest.version for base in self._encoder.bases}
        arriving = (download.stored.base for download in self._downloads.values())
        bases |= {base for base in arriving if base is not None}
        return self._store.surplus(self._downlink.wanted | bases)

    def retire_surplus(self) -> None:
        """Retire surplus versions soon, when a thread has unmapped them: 13 to 43 ms a GB."""
        self._stop_old_encoders()
        if self._surplus and not self._retiring:
            self._retiring = True
            self.tasks.create_task(self._retire_surplus(), name=f"{self._name}-retire")

    async def _retire_surplus(self) -> None:
        try:
            await asyncio.sleep(HEAD_START_S)
            while surplus := self._surplus:
                await asyncio.to_thread(self._unmap, surplus[0])
                if surplus[0] in self._surplus:
                    self._retire(surplus[0])
        finally:
            self._retiring = False

    def _unmap(self, stored: StoredVersion) -> None:
        """Release the pages of a version, in a thread."""
        self._unmapping = stored
        try:
            stored.release_pages()
        finally:
            self._unmapping = None

    def _retire(self, stored: StoredVersion) -> None:
        self._encoder.stop(stored)
        self._downlink.forget_version(stored.manifest.version)
        self._discard(stored)

    # ---- called for the parent

    def reattach(self) -> None:
        """Send a new or restarted parent this node's newest version, and ask for all that arrive or are wanted."""
        self.failure = None
        self._uplink.send(m.Attach(self._store.newest))
        self._later, self._pause = None, 0  # the parent will announce them again
        for version in self._downloads:
            self._uplink.send(m.Want(version))
        self._want_missing()

    def resend_requests(self) -> None:
        """Send the parent the highest known version, and repeat requests that the parent may have lost."""
        failed = self._failed if self._pause > 0 else -1
        waiting = -1 if self._waiting is None else self._waiting
        self._uplink.send(m.Attach(max(self.newest, waiting, failed)))
        self._pause -= 1
        for download in self._downloads.values():
            self._send_requests(download.requests.repeat_overdue())
            self._fill_window(download)
        self._open_sources()
        self._want_missing()

    def handle_announce(self, announce: m.Announce) -> None:
        """Act on a version that the parent announces: download it, resume, postpone or decline it."""
        version = announce.manifest.version
        decision = decide(
            announce,
            complete=self._store.complete,
            arriving=self._downloads,
            waiting=self._waiting,
            wanted=self._is_wanted(version),
            overtook=self._unabandoned,
        )
        match decision:
            case Decision.START:
                with self._failing(version):
                    self._start_download(announce)
            case Decision.RESUME:
                self._downloads[version].requests.restart(PARENT)
                self._fill_window(self._downloads[version])
            case Decision.LATER:
                self._later = announce
                for arriving in self._downloads.keys() & {self._unabandoned, announce.base}:
                    self._uplink.send(m.Want(arriving, arriving=True))  # the parent may not abandon it either
            case Decision.DECLINE:
                self._uplink.send(m.Done(version))
                self._compare_digests(announce.manifest)

    def take_chunk(self, chunk: m.Chunk, body: ChunkBody, source: str = PARENT) -> Callable[[], None] | None:
        """Check and write a chunk in a lane's thread; return the rest of the work, for the event loop.

        Raises `LaneError` if `body` does not open.
        """
        download = self._downloads.get(chunk.version)
        if download is None:
            return None
        if chunk.base is not None:
            payload = memoryview(bytearray(body.size))
            body.open_into(payload)
            chunk = msgspec.structs.replace(chunk, data=payload)
        try:
            outcome = download.write(chunk, body, source)
        except (NoRoomError, BrokenVersionError) as error:
            return partial(self._finish_chunk, download, chunk, error, source)
        return partial(self._finish_chunk, download, chunk, outcome, source)

    def handle_chunk(self, chunk: m.Chunk, source: str = PARENT) -> None:
        """Store a chunk of any source. The last chunk completes the version; an error gives the version up."""
        download = self._downloads.get(chunk.version)
        if download is None:
            return  # the version was overtaken while the chunk was in flight
        with self._failing(chunk.version):
            self._advance(download, chunk, download.accept(chunk, source), source)

    def _finish_chunk(
        self,
        download: Download,
        chunk: m.Chunk,
        outcome: ChunkOutcome | NoRoomError | BrokenVersionError,
        source: str,
    ) -> None:
        """Record a chunk that a lane's thread has written, or the error of that."""
        if self._downloads.get(chunk.version) is not download:
            return  # the version was overtaken, or began once more
        with self._failing(chunk.version):
            if not isinstance(outcome, ChunkOutcome):
                raise outcome
            self._advance(download, chunk, download.record(chunk, outcome, source), source)

    @contextmanager
    def _failing(self, version: int, download: Download | None = None) -> Iterator[None]:
        """Give a version up where the block finds it broken, without room, or the file system fails.

        Does nothing where the version's `download` was dropped meanwhile. The error is raised on where the version
        is complete already.
        """
        try:
            yield
        except (NoRoomError, BrokenVersionError, OSError) as error:
            if version in self._store.complete:
                raise
            if download is not None and self._downloads.get(version) is not download:
                return
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"relay.shm={self._store.path}: version {version} cannot be kept there: {error}"
            self.fail_version(version, reason)

    def handle_lost(self, version: int) -> None:
        """Stop the download of a version that no node has; notify the children and subscribers that want it."""
        if version in self._downloads and self._downloads[version].arrived:
            return  # it needs no other node any more
        if version in self._downloads:
            self._drop(version)
            self._uplink.send(m.Attach(self.newest))  # so that the parent announces the newest again
        self._downlink.refuse(version, m.Lost(version), newest=False)
        self.subscribers.handle_lost(version)
        self._start_waiting()

    def fail_version(self, version: int, reason: str) -> None:
        """Give up a version that this node cannot have; log `reason`, and notify parent, children, subscribers."""
        log.error("%s gives up version %d: %s", self._name, version, reason)
        failed = m.Failed(version, reason)
        self._uplink.send(m.Done(version))
        self._downlink.refuse(version, failed, newest=version >= self.newest)
        self._drop(version)
        self._note_failure(version)
        if version > self.newest:
            self.failure = failed
        self.subscribers.handle_failed(failed)
        self._emit(m.VersionFailed(self._name, version, reason))
        self._start_waiting()

    # ---- called for other sources

    @property
    def joining(self) -> list[m.Manifest]:
        """Versions that arrive in full and of which much is missing."""
        downloads = [item for item in self._downloads.values() if item.stored.base is None]
        return [item.stored.manifest for item in downloads if item.requests.is_long]

    def handle_held(self, source: str, held: m.Held) -> None:
        """Request chunks that a source lists in `held`."""
        download = self._downloads.get(held.version)
        if download is not None and download.stored.base is None:
            download.requests.lend(source, held.runs)
            self._fill_window(download)

    def leave_source(self, source: str, version: int | None = None) -> None:
        """Request the outstanding chunks of a source from others, of one version or of all."""
        for download in self._downloads.values():
            if version in (None, download.version):
                download.requests.drop(source)
                self._fill_window(download)

    def _open_sources(self) -> None:
        """Connect to other sources while a version arrives that they can help with; close them after it."""
        if self.joining:
            self.sources.open(self.tasks, self._uplink.parents, self._uplink.parent)
        elif all(item.stored.base is not None or item.requests.parent_only for item in self._downloads.values()):
            self.sources.close()

    # ---- downloads

    def _want_missing(self) -> None:
        """Ask the parent for each version that a child or a pull wants and that does not arrive here."""
        for version in self.subscribers.awaited | self._downlink.wanted:
            if self.find(version) is None:
                self._uplink.send(m.Want(version))

    def _start_download(self, announce: m.Announce) -> None:
        """Start to download an announced version, and announce it to children.

        If it is the newest version, it replaces running downloads of versions that no child or subscriber wants.
        Raises `NoRoomError`, `BrokenVersionError`.
        """
        manifest = announce.manifest
        self._check_manifest(manifest)
        for old in self._surplus:
            if old is not self._unmapping:  # files that a thread still maps are not written over
                self._retire(old)  # now: the version may need its room
        overtaken = []
        if manifest.version > self.newest:  # the newest version wins
            overtaken = [item.stored for item in self._downloads.values() if not self._is_wanted(item.version)]
        self._store.check_room(manifest, freed_bytes=sum(stored.allocated_bytes for stored in overtaken))
        for stored in overtaken:
            self._drop(stored.manifest.version)
            self._uplink.send(m.Done(stored.manifest.version))
            self._overtook = manifest.version
        if self._overtook == manifest.version:
            self._uplink.send(m.Want(manifest.version, arriving=True))  # the parent may not abandon it either
        base = None if announce.base is None else self._store.complete.get(announce.base)
        if base is not None and not manifest.has_layout_of(base.manifest):
            base = None
        stored = self._store.begin(manifest, base)
        window, changes = window_of(manifest.chunk_bytes), None
        if base is not None and self._changes_wanted:
            changes = self._store.begin_changes(stored, base)
        download = Download(stored, window=window, now=self._now, base=base, changes=changes)
        self._downloads[manifest.version] = download
        self._downlink.announce(stored, newest=manifest.version == self.newest)
        self._fill_window(download)
        if not self._store.complete:  # else the version may well arrive everywhere now; reminders will show
            self._open_sources()

    def _check_manifest(self, manifest: m.Manifest) -> None:
        """Raise `BrokenVersionError` if a manifest contradicts itself, or has larger chunks than this node."""
        if manifest.digest != version_digest(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: its digest and its files' digests differ")
        if len({entry.name for entry in manifest.files}) < len(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: two of its files have the same name")
        if manifest.chunk_bytes > self._chunk_bytes:
            raise BrokenVersionError(
                f"version {manifest.version} was cut into chunks of {manifest.chunk_bytes} bytes, above the"
                f" {self._chunk_bytes} of this node; use one size for the publisher and all nodes"
            )

    def _advance(self, download: Download, chunk: m.Chunk, outcome: ChunkOutcome, source: str) -> None:
        """Forward a chunk that was written or kept to children, and act on the last one.

        Requests a damaged chunk again. Raises `NoRoomError`, `BrokenVersionError`.
        """
        if outcome is ChunkOutcome.DAMAGED:
            self._send_requests([download.requests.ask_again((chunk.file, chunk.index), source)])
        if outcome is not ChunkOutcome.WRITTEN:
            return
        self._downlink.forward_chunk(download.stored, chunk.file, chunk.index)
        if download.stored.has_arrived(chunk.file):
            download.verify_file(chunk.file)
            if download.requests.parent_only:
                self._open_sources()
        if download.arrived:
            self._handle_arrived(download)
        else:
            self._fill_window(download)

    def _handle_arrived(self, download: Download) -> None:
        """Offer the changes of a version that has arrived, make its chunks of its deltas, or commit it.

        Raises `NoRoomError`, `BrokenVersionError`.
        """
        stored = download.stored
        if download.rebuilding:
            return  # which will call this again
        offers_changes = download.changes is not None and download.changes.finish() is not None
        if offers_changes:
            assert stored.base is not None, f"{stored.folder} has changes without a base"
            self._store.add_changes(stored, stored.base)
            self.subscribers.handle_newer(download.version)
        download.changes = None
        if not stored.is_whole:
            download.rebuilding = True
            after_s = HEAD_START_S if offers_changes else 0.0
            self.tasks.create_task(self._rebuild(download, after_s=after_s), name=f"rebuild-{download.version}")
            return
        if not stored.has_all_files():
            raise BrokenVersionError(
                f"version {download.version}: files in {stored.folder} were deleted while it arrived"
            )
        self._store.commit(stored)
        mapping = asyncio.to_thread(self._store.keep_mapped, stored)
        self.tasks.create_task(mapping, name=f"{self._name}-map")
        del self._downloads[download.version]
        self._open_sources()
        self._uplink.send(m.Done(download.version))
        self._handle_complete(stored.manifest, download)
        self._start_waiting()

    async def _rebuild(self, download: Download, *, after_s: float) -> None:
        """Make chunks of their deltas after a time, in threads; request each in full that comes out wrong.

        The full digests are proven here, after the version may have served its changes (law 3).
        """
        await asyncio.sleep(after_s)
        version = download.version
        chunks = iter(list(download.stored.waiting_chunks()))

        async def rebuild_chunks() -> None:
            """Make chunks from the iterator that all coroutines share, until none is left."""
            for file, index in chunks:
                right = await asyncio.to_thread(download.rebuild, file, index)
                if self._downloads.get(version) is not download:
                    return  # it was dropped meanwhile
                if right is None:
                    continue
                fetch = download.rebuilt(file, index, right=right)
                if fetch is not None:
                    self._uplink.send(fetch)
                elif download.stored.has_chunk(file, index):
                    self._downlink.forward_chunk(download.stored, file, index)

        with self._failing(version, download):
            await asyncio.gather(*(rebuild_chunks() for _ in range(THREADS)))
            download.rebuilding = False
            if download.arrived and self._downloads.get(version) is download:
                self._handle_arrived(download)

    def _fill_window(self, download: Download) -> None:
        self._send_requests(download.requests.fill())

    def _send_requests(self, requests: Iterable[tuple[str, m.Fetch]]) -> None:
        """Send requests to their sources."""
        for source, fetch in requests:
            if source == PARENT:
                self._uplink.send(fetch)
            else:
                self.sources.send(source, fetch)

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
                other_bytes=download.other_bytes if download else 0,
            )
        )
        self.subscribers.handle_complete(manifest.version)
        self.retire_surplus()

    def _drop(self, version: int) -> None:
        """Stop the download of a version, if it arrives, and retire its folder."""
        download = self._downloads.pop(version, None)
        if download is not None:
            download.stop()
            download.drop_changes()
            self._downlink.forget_version(version)
            self._discard(download.stored)
            self._open_sources()
            self.subscribers.answer_waiting()

    def _start_waiting(self) -> None:
        """Decide again about the announcement that waits in `_later`, since a download ended."""
        announce, self._later = self._later, None
        if announce is not None:
            self.handle_announce(announce)

    @property
    def _unabandoned(self) -> int | None:
        """An arriving version that no other may overtake: it has arrived already, or overtook one itself."""
        arrived = (version for version, download in self._downloads.items() if download.arrived)
        return next(arrived, self._overtook)

    @property
    def _waiting(self) -> int | None:
        return None if self._later is None else self._later.manifest.version

    def _note_failure(self, version: int) -> None:
        """Set the pause before the parent may announce a failed version again; it doubles at each failure."""
        if version >= self._failed:
            self._num_failures = self._num_failures + 1 if version == self._failed else 1
            self._failed = version
            self._pause = 2 ** min(self._num_failures, MAX_DOUBLINGS)

    def _compare_digests(self, manifest: m.Manifest) -> None:
        """Log an error if the parent has another content under the number of a version that is here."""
        here = self._store.complete.get(manifest.version)
        if here is not None and here.manifest.digest != manifest.digest:
            log.error(
                "version %d has digest %s here, %s at the parent: publish each content under its own number",
                manifest.version,
                here.manifest.digest,
                manifest.digest,
            )

    # ---- retiring

    def _stop_old_encoders(self) -> None:
        """Stop encoders of old versions that no child wants, so that their bases can leave the store."""
        for version, stored in list(self._store.complete.items()):
            if version not in self._downlink.wanted and version != self._store.newest:
                self._encoder.stop(stored)

    def _discard(self, stored: StoredVersion) -> None:
        """Retire a version; a thread deletes its folder, unless that became the spare folder."""
        doomed = self._store.retire(stored)
        self.tasks.create_task(asyncio.to_thread(self._store.delete, doomed), name=f"{self._name}-delete")

    def _is_wanted(self, version: int) -> bool:
        return version in self._downlink.wanted or version in self.subscribers.awaited
