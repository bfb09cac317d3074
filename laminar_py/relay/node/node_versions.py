"""Versions of one node: which it has, which arrive or are looked for, and when one is kept no longer.

Used by the node alone, which hands over what parent, children and publisher say. Invariant: a version that a
child wants, a subscriber holds or a delta builds on stays in the store.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable

from laminar_py.relay.node.arrivals import Arrivals
from laminar_py.relay.node.desk import Desk
from laminar_py.relay.node.downlink import Downlink
from laminar_py.relay.node.intake import Intake
from laminar_py.relay.node.uplink import Uplink
from laminar_py.relay.store.version import StoredVersion
from laminar_py.relay.store.versions import Store
from laminar_py.relay.wire import messages as m

log = logging.getLogger(__name__)

ENCODERS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # threads
PATIENCE = 8  # chunks without a delta, before any has one, after which the rest is not tried


class NodeVersions:
    """Everything that a node knows of versions; `tasks` is set while it runs, and `emit` gets its reports."""

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
        self.failure: m.Failed | None = None  # of the newest version, for children that come later
        self.desk = Desk(store, downlink.send, pulled=self._pulled, now=now)
        self.arrivals = Arrivals(
            store,
            downlink,
            chunk_bytes=chunk_bytes,
            tell=uplink.tell,
            is_wanted=self._is_wanted,
            finished=self._finished,
            discard=self._discard,
            give_up=self.give_up,
            now=now,
        )
        self._name = uplink.name
        self._uplink = uplink
        self._downlink = downlink
        self._store = store
        self._encoder = Encoder(downlink.forward, self.retire_surplus)
        self._emit = emit

    @property
    def newest(self) -> int:
        """The highest version that is complete here or arrives, -1 if there is none."""
        return self.arrivals.newest

    @property
    def newest_complete(self) -> int:
        """The highest version that is complete here, -1 if there is none."""
        return self._store.newest

    def find(self, version: int) -> StoredVersion | None:
        """A version that is here, if only in part."""
        return self.arrivals.find(version) or self._store.complete.get(version)

    def needs(self, version: int) -> bool:
        """True if it is not here, and newer than all that is, or asked for from below."""
        if version in self._store.complete:
            return False
        return version in self.arrivals or version > self.arrivals.newest or self._is_wanted(version)

    def locate(self, version: int) -> None:
        """Have the nodes above find and keep a version that somebody below needs."""
        if version in self._store.complete:
            return
        if self._uplink.parents:
            self._uplink.tell(m.Want(version, arriving=version in self.arrivals))
            return
        self.discover()  # it may just have been published
        if version not in self._store.complete:
            self.lose(version)

    def want_what_is_missing(self) -> None:
        """Ask the parent for each version that somebody below waits for."""
        for version in self.desk.awaited() | self._downlink.held:
            if self.find(version) is None:
                self._uplink.tell(m.Want(version))

    def look_around(self) -> None:
        """Find versions that were published unnoticed, and children that are gone."""
        if not self._uplink.parents:
            self.discover()
        if self._store.complete:
            self._downlink.greet_holders(m.Newest(self._store.newest))
        self.retire_surplus()

    def discover(self) -> None:
        """Take up versions that the publisher has written to the root's store."""
        for stored in self._store.discover():
            newest = stored.manifest.version == self._store.newest
            if newest and self._downlink.has_children:
                others = [one for one in self._store.complete.values() if one is not stored]
                self._encoder.start(stored, others, self.tasks)
            self._downlink.announce(stored, newest=newest)
            self._now_complete(stored.manifest)

    def lose(self, version: int) -> None:
        """Tell those below that no relay has the version."""
        if version in self.arrivals:
            self.arrivals.drop(version)
            self._uplink.tell(m.Attach(self.arrivals.newest))  # to hear of the newest, which was declined
        self._downlink.refuse(version, m.Lost(version), newest=False)
        self.desk.lost(version)
        self.arrivals.begin_next()

    def give_up(self, version: int, reason: str) -> None:
        """Tell those below that the version cannot be had here; the node itself goes on."""
        log.error("%s gives up version %d: %s", self._name, version, reason)
        failed = m.Failed(version, reason)
        self._uplink.tell(m.Done(version))
        self._downlink.refuse(version, failed, newest=version >= self.arrivals.newest)
        self.arrivals.drop(version)
        self.arrivals.gave_up(version)
        if version > self.arrivals.newest:
            self.failure = failed
        self.desk.failed(failed)
        self._emit(m.VersionFailed(self._name, version, reason))
        self.arrivals.begin_next()

    def retire_surplus(self) -> None:
        """Let go of versions beyond those to keep that nobody needs."""
        self._forget_deltas()
        bases = {stored.base for stored in self._store.complete.values() if stored.unencoded}
        needed = {base for base in bases | self.arrivals.bases if base is not None}
        for stored in self._store.surplus(self._downlink.held | needed):
            self._encoder.forget(stored)
            self._downlink.forget(stored.manifest.version)
            self._discard(stored)

    def _forget_deltas(self) -> None:
        """Keep deltas of the newest two alone, of the second only once encoded, for else its base must stay.

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
            self.tasks.create_task(asyncio.to_thread(self._store.delete, doomed), name=f"{self._name}-delete")

    def _is_wanted(self, version: int) -> bool:
        return version in self._downlink.held or version in self.desk.awaited()

    def _finished(self, intake: Intake) -> None:
        self._now_complete(intake.stored.manifest, intake)

    def _now_complete(self, manifest: m.Manifest, intake: Intake | None = None) -> None:
        self._emit(
            m.VersionComplete(
                node=self._name,
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
        self.desk.completed(manifest.version)
        self.retire_surplus()

    def _pulled(self, subscriber: str, version: int, waited_s: float) -> None:
        self._emit(m.VersionPulled(self._name, subscriber, version, waited_s))


class Encoder:
    """Makes a version's deltas against the version before, chunk by chunk, at the root.

    `forward` keeps the promises of a chunk that is ready now; `done` is told that a base is needed no more.
    Invariant: whoever waits for the delta of a chunk gets that, or the chunk itself: also when weights turn out to
    change everywhere, and when the version is overtaken.
    """

    def __init__(self, forward: Callable[[StoredVersion, int, int], None], done: Callable[[], None]) -> None:
        self._forward = forward
        self._done = done

    def start(self, stored: StoredVersion, older: Iterable[StoredVersion], group: asyncio.TaskGroup) -> None:
        """Begin, if there is a version before that it can build on."""
        base = max(older, key=lambda one: one.manifest.version, default=None)
        if base is None or not stored.manifest.fits(base.manifest):
            return
        stored.base = base.manifest.version
        files = range(len(stored.manifest.files))
        stored.unencoded = {(file, i) for file in files for i in range(stored.manifest.num_chunks(file))}
        group.create_task(self._encode(stored, base), name=f"encode-{stored.manifest.version}")

    async def _encode(self, stored: StoredVersion, base: StoredVersion) -> None:
        left = iter(sorted(stored.unencoded))
        vain = 0

        async def work() -> None:
            nonlocal vain
            for file, index in left:
                try:
                    delta = await asyncio.to_thread(stored.encode, base, file, index)
                except FileNotFoundError:  # retired, which an overtaken version may be
                    assert stored.base is None, f"{base.folder} went while {stored.folder} was built on it"
                if stored.base is None:
                    return  # given up meanwhile
                stored.encoded(file, index, delta)
                self._forward(stored, file, index)
                vain += delta is None
                if vain >= PATIENCE and not stored.deltas:
                    self.forget(stored)

        async with asyncio.TaskGroup() as workers:
            for _ in range(ENCODERS):
                workers.create_task(work())
        self._done()

    def forget(self, stored: StoredVersion) -> None:
        """No deltas of this version any more."""
        waiting = sorted(stored.unencoded)
        stored.forget_deltas()
        for file, index in waiting:
            self._forward(stored, file, index)
