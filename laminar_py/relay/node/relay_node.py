"""A relay: takes versions from its parent, gives them on chunk by chunk, and serves the host's subscribers.

One per host; the root shares its store with the publisher and has no parent. Invariant: a version is served to
subscribers only when complete and verified, to children from its first chunk on. Handlers are synchronous, so each
record is dealt with whole; only the loops and the threads wait. `uplink` speaks to the parent, `downlink` to
children, `desk` to subscribers; `node_versions` knows what becomes of each version.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from laminar_py.relay.node.downlink import Downlink, Pace
from laminar_py.relay.node.intake import MAX_WINDOW, window_of
from laminar_py.relay.node.node_versions import NodeVersions
from laminar_py.relay.node.uplink import VISIT_S, Uplink
from laminar_py.relay.store.versions import Store, watch_names
from laminar_py.relay.wire import messages as m
from laminar_py.relay.wire.transport import Listener, PortInUseError, RelayKeys, Wire

log = logging.getLogger(__name__)

CONTROL_RECORDS = 256  # beside chunks, that may wait for a connection
PORT_AGAIN_S = 0.1  # between two looks at a port that is held


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
        self._downlink = Downlink(Pace(max_bytes_per_s, now=now))
        self._uplink = Uplink(
            name,
            parents,
            self,
            wire=self._wire,
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
        """Scan the store and bind. Raises `ConfigError` naming relay.base_port or relay.host.

        A port that another process holds is waited for, `patience_s` at most.
        """
        deadline = asyncio.get_running_loop().time() + patience_s
        while self._downlink.listener is None:
            try:
                self._downlink.listener = self._wire.listen(*self._address, max_queue=self._max_queue)
            except PortInUseError:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(PORT_AGAIN_S)
        self._store.open()

    def follow(self, parents: Sequence[str]) -> None:
        """Have these for parents from here on, in this order; the root has none."""
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
                tasks.append(group.create_task(self._look_around(), name=f"{self.name}-look"))
                tasks.append(group.create_task(self._downlink.keep_pace(), name=f"{self.name}-pace"))
                if self._uplink.parents:
                    tasks.append(group.create_task(self._uplink.run(), name=f"{self.name}-follow"))
                else:
                    tasks.append(group.create_task(self._take_up_published(), name=f"{self.name}-published"))
                self._versions.retire_surplus()
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

    # ---- below: children, subscribers

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
                self._versions.retire_surplus()
            case m.Subscribe():
                self._versions.desk.subscribe(sender)
            case m.Pull(version=version):
                if not self._versions.desk.ask(sender, message) and version is not None:
                    self._versions.locate(version)
                self._versions.retire_surplus()  # the pin may have moved
            case m.Release():
                self._versions.desk.release(message)
                self._versions.retire_surplus()

    def _on_attach(self, child: bytes, heard_of: int) -> None:
        self._downlink.attach(child)
        newest, failure = self._versions.find(self._versions.newest), self._versions.failure
        if newest is not None and newest.manifest.version > heard_of:
            self._downlink.send(child, m.Announce(newest.manifest, newest.base))
        if failure and failure.version > max(self._versions.newest, heard_of):
            self._downlink.send(child, failure)

    def _on_fetch(self, child: bytes, fetch: m.Fetch) -> None:
        stored = self._versions.find(fetch.version)
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
        stored = self._versions.find(want.version)
        if stored is not None and not want.arriving:
            self._downlink.send(child, m.Announce(stored.manifest, stored.base))
        self._versions.locate(want.version)

    async def _take_up_published(self) -> None:
        """Take up each version as soon as the publisher gives its folder the name."""
        try:
            watch = watch_names(self._store.path)
        except OSError as error:  # of watches a user has a limited number
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

    async def _look_around(self) -> None:
        """Now and then: a version may have come unnoticed, and a child that wants one may be gone."""
        while True:
            await asyncio.sleep(self._remind_s)
            self._versions.look_around()

    # ---- above: what `uplink` calls

    def greet(self) -> None:
        """Tell a parent that is new, or as good as new, what is here and what is not."""
        self._versions.failure = None
        self._uplink.tell(m.Attach(self._versions.newest_complete))
        self._versions.arrivals.greet()
        self._versions.want_what_is_missing()

    def remind(self) -> None:
        """Say again what may have been lost."""
        self._versions.arrivals.remind()
        self._versions.want_what_is_missing()

    def handle(self, message: m.ToChild) -> bool:
        """Deal with what the parent sent; False if the next one should be tried."""
        match message:
            case m.Chunk():
                self._versions.arrivals.received(message)
            case m.Announce():
                self._versions.arrivals.announced(message)
            case m.Lost(version):
                self._versions.lose(version)
            case m.Failed(version) if self._versions.needs(version):
                if len(self._uplink.parents) > 1:
                    return False
                self._versions.give_up(version, message.reason)
        return True

    @property
    def is_idle(self) -> bool:
        """True while nothing arrives."""
        return not self._versions.arrivals

    def left_parent(self, old: str, new: str) -> None:
        """Report that the node turns from one endpoint to another."""
        self._emit(m.ParentLost(self.name, old, new))
