"""A relay node: takes versions from its parent, passes them on chunk by chunk, and serves its host's subscribers.

One process per host runs a `RelayNode`; the root shares its store with the publisher and has no parent. A node
serves a version to subscribers only when all its digests are right (law 3). It serves the changes earlier, when
the checksums of all deltas are right, which cover the digest of their base. Children get a version from its first
chunk on. Handlers are synchronous, so no record is handled in the middle of another; only loops and threads wait.

The protocol, as states and the records (`relay/messages.py`) that are sent in them. A child and its parent:

    attached     Attach(newest)          -> Announce(newer)   at each connect, and every `parent_timeout_s`
    downloading  Announce(v), Fetch(v)*  -> Chunk* | Lost(v)  Fetch grants credits; the parent sends chunks as it
                                                              gets them itself (cut-through), as deltas against a
                                                              base that the child says it has
    joining      AskHeld(v)  to others    -> Held(v) | Lost(v) v comes in full and is long: `relay/sources.py`
    opening      OpenLanes(n)            -> Lanes(tickets)    chunks then bypass this connection: `relay/lanes.py`
    arrived                                                   v's changes are offered; threads make v of its deltas
                                                              and prove its digest; no other version overtakes it
    complete     Done(v)                                      verified here, or no longer needed here
    overtaken    Announce(v') with v' > v                     v is abandoned, unless a pull or a child wants it,
                                                              v' builds on it, or v itself overtook another
    wanting      Want(v)           -> Announce(v) | Lost(v)   a pull of an older version, passed on upwards
    holding      Want(v, arriving)       -> Lost(v)           v is on its way and may not be abandoned
    failed       Failed(v)                                    the parent cannot have v: try the next parent

A subscriber and its node:

    subscribed   Subscribe               -> Newest*           now and for each complete version
    pulling      Pull(id, base)          -> Granted(id) | Refused(id)  with change files since `base`, if this
                                                              host has all: perhaps before the folder is complete
    released     Release                                      the version pulled last need not stay
"""

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import laminar_py.relay.messages as m
from laminar_py.config.cluster import Seal, check_seal
from laminar_py.relay.downlink import Downlink
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.lanes import ParentLanes
from laminar_py.relay.messages import RelayKeys
from laminar_py.relay.requests import MAX_WINDOW, window_of
from laminar_py.relay.sockets import IPC, Listener, SocketFactory, tcp_host
from laminar_py.relay.sources import Sources
from laminar_py.relay.uplink import VISIT_S, Uplink
from laminar_py.relay.version_store import VersionStore, watch_folder
from laminar_py.relay.versions import NodeVersions

log = logging.getLogger(__name__)

CONTROL_RECORDS = 256  # that may wait for a connection, in addition to chunks
BUSY_S = 2.0  # after a child's last request, in which the node lends no chunks to others

DEFAULT_LANES = max(1, min(4, len(os.sched_getaffinity(0)) // 2))  # each keeps a core busy while a version arrives


class RelayNode:
    """A node of the tree: `await node.start()`, then `await node.run()` until `await node.close()`.

    `parents` are endpoints, nearest first, root last (`Topology.ancestors`); the root has none. The node leaves
    a parent that is silent for `parent_timeout_s` or breaks the connection. It connects to the next parent, and
    after the last to the first. After `visit_s` with another parent than the nearest, an idle node tries the
    nearest again. A long version that comes in full is requested also of `sources`, endpoints of any other nodes,
    and of the other parents. `seal` and `lanes` are as in `RelayConfig`. `emit` gets the node's events.
    """

    def __init__(
        self,
        name: str,
        *,
        store: Path,
        keys: RelayKeys | None,
        parents: Sequence[str] = (),
        sources: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        keep_versions: int = 2,
        chunk_bytes: int = 4 * 2**20,
        parent_timeout_s: float = 5.0,
        visit_s: float = VISIT_S,
        seal: Seal = Seal.AEAD,
        lanes: int | None = None,
        emit: Callable[[m.RelayEvent], None] = lambda event: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._address, self._seal = (host, port), seal
        self._max_queue = 4 * window_of(chunk_bytes) + CONTROL_RECORDS
        self._remind_s, self._emit, self._now = parent_timeout_s, emit, now
        self._child_fetched_s = -math.inf  # when a child last requested a chunk
        self._sockets, self._downlink = SocketFactory(keys, heartbeat_s=parent_timeout_s), Downlink()
        num_lanes = 0 if seal is Seal.CURVE else lanes or DEFAULT_LANES
        connect = partial(Uplink, name, sockets=self._sockets, timeout_s=parent_timeout_s, chunk_bytes=chunk_bytes)
        self._uplink = connect(parents, self, num_lanes=num_lanes, visit_s=visit_s)
        self._store = VersionStore(store, keep_versions=keep_versions)
        self._versions = NodeVersions(
            self._uplink, self._downlink, self._store, chunk_bytes=chunk_bytes, emit=emit, now=now
        )
        self._versions.sources = Sources(self._versions, partial(connect, num_lanes=min(1, num_lanes)), sources)
        self._running, self._closing, self._stopped = False, asyncio.Event(), asyncio.Event()

    @property
    def endpoint(self) -> str:
        """Address for children and subscribers, e.g. `tcp://127.0.0.1:41234`; known after `start`."""
        return self._listener.endpoint

    @property
    def _listener(self) -> Listener:
        assert self._downlink.listener is not None, f"{self.name} has not been started"
        return self._downlink.listener

    async def start(self) -> None:
        """Bind the ports and open the store. Raises `ConfigError` naming relay.host or relay.seal."""
        check_seal(self._seal, self._address[0])
        listener = self._sockets.listen(*self._address, max_queue=self._max_queue)
        self._downlink.listener = listener
        if self._seal is not Seal.CURVE and not listener.endpoint.startswith(IPC):
            host, sealed = tcp_host(listener.endpoint), self._seal is Seal.AEAD and self._sockets.has_keys
            self._downlink.lanes = ParentLanes(host, sealed=sealed, max_queue=self._max_queue)
        self._store.open()

    def set_parents(self, parents: Sequence[str], sources: Sequence[str] = ()) -> None:
        """Replace the parents, nearest first, of which the root has none, and the other sources."""
        self._uplink.parents = tuple(parents)
        self._versions.sources.candidates = tuple(sources)

    async def run(self) -> None:
        """Serve the port, and follow a parent or watch the root's store, until `close`; then close all sockets."""
        listener = self._listener
        if self._closing.is_set():
            return
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                self._versions.tasks = group
                tasks = [group.create_task(self._serve(listener), name=f"{self.name}-serve")]
                if self._downlink.lanes is not None:
                    tasks.append(group.create_task(self._downlink.lanes.run(), name=f"{self.name}-lanes"))
                tasks.append(group.create_task(self._check_regularly(), name=f"{self.name}-check"))
                if self._uplink.parents:
                    tasks.append(group.create_task(self._uplink.run(), name=f"{self.name}-follow"))
                else:
                    tasks.append(group.create_task(self._watch_store(), name=f"{self.name}-published"))
                self._versions.retire_surplus()
                await self._closing.wait()
                self._versions.stop()
                for task in tasks:
                    task.cancel()
        finally:
            self._close_sockets()

    async def close(self) -> None:
        """Stop `run` and wait until it has closed the sockets; close them if `run` was never called."""
        self._closing.set()
        if self._running:
            await self._stopped.wait()
        else:
            self._close_sockets()

    def _close_sockets(self) -> None:
        if self._downlink.listener is not None:
            self._downlink.listener.close()
        if self._downlink.lanes is not None:
            self._downlink.lanes.close()
        self._sockets.close()
        self._versions.stop()
        self._store.close()
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
            case m.AskHeld():
                self._handle_ask(sender, message)
            case m.Want():
                self._handle_want(sender, message)
            case m.Done(version):
                self._downlink.remove_want(sender, version)
                self._versions.retire_surplus()
            case m.OpenLanes(count):
                self._downlink.open_lanes(sender, count)
            case m.Subscribe():
                self._versions.subscribers.subscribe(sender)
            case m.Pull(version=version, base=base):
                if base >= 0:
                    self._versions.want_changes()
                if not self._versions.subscribers.handle_pull(sender, message) and version is not None:
                    self._versions.locate(version)
                self._versions.retire_surplus()  # the pin may have moved
            case m.Release():
                self._versions.subscribers.handle_release(message)
                self._versions.retire_surplus()

    def _handle_attach(self, child: bytes, newest_there: int) -> None:
        """Attach a child; announce the newest version, or a failure, that is above `newest_there`."""
        self._downlink.attach(child)
        versions = self._versions
        newest, failure = versions.find(versions.newest), versions.failure
        if newest is not None and newest.manifest.version > newest_there:
            self._downlink.send(child, m.Announce(newest.manifest, newest.base))
        if failure and failure.version > max(versions.newest, newest_there):
            self._downlink.send(child, failure)

    def _handle_fetch(self, child: bytes, fetch: m.Fetch) -> None:
        """Send or promise the chunks that a child asks for, as far as its credits reach.

        Sends `Lost` if the version is not here, unless nodes above still look for it.
        """
        if self._downlink.is_attached(child):
            self._child_fetched_s = self._now()
        stored = self._versions.find(fetch.version)
        if stored is None:
            if fetch.version not in self._downlink.wanted:  # else nodes above still look for it
                self._downlink.send(child, m.Lost(fetch.version))
            return
        for index in range(fetch.first_chunk, fetch.first_chunk + min(fetch.credits, MAX_WINDOW)):
            if not stored.is_chunk(fetch.file, index):
                break
            try:
                self._downlink.request_chunk(child, stored, fetch.file, index, base=fetch.base)
            except OSError as error:  # somebody deleted the files
                log.error("%s cannot read version %d: %s", self.name, fetch.version, error)
                self._downlink.send(child, m.Lost(fetch.version))
                return

    def _handle_ask(self, sender: bytes, asked: m.AskHeld) -> None:
        """Say which chunks of a version are here; none while a version arrives, or a child fetches chunks."""
        stored = self._versions.find(asked.version)
        if stored is None or stored.manifest.digest != asked.digest:
            self._downlink.send(sender, m.Lost(asked.version))
            return
        lends = self._versions.is_idle and self._now() - self._child_fetched_s >= BUSY_S
        self._downlink.send(sender, m.Held(asked.version, stored.whole_runs() if lends else ()))

    def _handle_want(self, child: bytes, want: m.Want) -> None:
        """Record that a child wants a version; announce it if it is here, and ask above if it is incomplete."""
        self._downlink.add_want(child, want.version)
        stored = self._versions.find(want.version)
        if stored is not None and not want.arriving:
            self._downlink.send(child, m.Announce(stored.manifest, stored.base))
        self._versions.locate(want.version)

    async def _watch_store(self) -> None:
        """At the root, announce each version as soon as the publisher renames its folder."""
        try:
            watch = watch_folder(self._store.path)
        except OSError as error:  # the kernel limits a user's watches
            log.warning("%s looks for versions only every %g s: cannot watch %s", self.name, self._remind_s, error)
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
        """Every `parent_timeout_s`, find versions and crashed children whose event was lost."""
        while True:
            await asyncio.sleep(self._remind_s)
            self._versions.check()

    # ---- called by the uplink

    def reattach(self) -> None:
        """Send a new or restarted parent the versions that this node has and wants."""
        self._versions.reattach()

    def resend_requests(self) -> None:
        """Repeat requests that the parent may have lost."""
        self._versions.resend_requests()

    def handle(self, message: m.ToChild) -> bool:
        """Handle a record from the parent; False if the node should try its next parent."""
        match message:
            case m.Chunk():
                self._versions.handle_chunk(message)
            case m.Announce():
                self._versions.handle_announce(message)
            case m.Lost(version):
                self._versions.handle_lost(version)
            case m.Failed(version) if self._versions.needs(version):
                if len(self._uplink.parents) > 1:
                    return False
                self._versions.fail_version(version, message.reason)
        return True

    def take_chunk(self, chunk: m.Chunk, body: ChunkBody) -> Callable[[], None] | None:
        """Write a chunk in a lane's thread; return the rest of the work, for the event loop."""
        return self._versions.take_chunk(chunk, body)

    @property
    def is_idle(self) -> bool:
        """True while no version arrives."""
        return self._versions.is_idle

    def left_parent(self, old: str, new: str) -> None:
        """Emit `ParentLost`: the node leaves the parent at endpoint `old` for the parent at `new`."""
        log.warning("%s leaves its parent at %s and connects to %s", self.name, old, new)
        self._emit(m.ParentLost(self.name, old, new))
