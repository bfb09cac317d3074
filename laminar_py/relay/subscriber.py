"""A replica's end of the relay: learns about new versions and pulls them from the node of its host.

A replica's process owns a `Subscriber`, a `records.weights.WeightSource`. It repeats a request without answer at
each connect and every few seconds
(`tests/relay/test_subscriber.py::test_a_pull_outlives_the_node_it_was_put_to`).
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

import laminar_py.relay.messages as m
from laminar_py.records.weights import PulledVersion, VersionLostError
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.messages import RelayKeys
from laminar_py.relay.sockets import SocketFactory
from laminar_py.relay.uplink import Uplink

log = logging.getLogger(__name__)


class RelayError(RuntimeError):
    """The node cannot give a version; the message names the setting to change, if one helps."""


class Subscriber:
    """Client of one node: `await run()` in a task until `await close()`; call its methods at any time.

    The node pins the version that `name` pulled last, so a restarted replica of that name still finds the version.
    """

    def __init__(self, endpoint: str, name: str, keys: RelayKeys | None, *, heartbeat_s: float = 5.0) -> None:
        self.name = name
        self._sockets = SocketFactory(keys, heartbeat_s=heartbeat_s)
        self._uplink = Uplink(name, [endpoint], self, sockets=self._sockets, timeout_s=heartbeat_s, chunk_bytes=0)
        self._changed = asyncio.Event()  # set, then replaced, when one of the next four attributes changes
        self._newest = -1
        self._failure: m.Failed | None = None  # why the node has no version at all
        self._answer: m.Granted | m.Refused | None = None
        self._closed = False
        self._unreachable = False  # the log says so
        self._pull_lock = asyncio.Lock()  # a pull moves the pin of the one before, so only one runs at a time
        self._request: m.Pull | None = None  # without an answer
        self._num_pulls = 0
        self._release: m.Release | None = None  # sent after the last pull
        self._session = secrets.randbits(63)
        self._running = False
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Follow the node, which may start later, until `close`."""
        if self._closed:
            return
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._uplink.run(), name=f"{self.name}-listen")
                await self._wait_until(lambda: self._closed)
                listening.cancel()
        finally:
            self._sockets.close()
            self._stopped.set()

    def attach(self, endpoint: str) -> None:
        """Leave the current node for the node at `endpoint`, which must serve the same store of this host."""
        self._uplink.parents = (endpoint,)

    async def close(self) -> None:
        """End `run`. Waiting requests raise `RelayError`."""
        self._closed = True
        self._notify()
        if self._running:
            await self._stopped.wait()
        else:
            self._sockets.close()

    async def wait_newer(self, version: int) -> int:
        """Wait for a version above `version`; return the newest. Raises `RelayError` on failure or `close`."""
        await self._wait_until(lambda: self._closed or self._newest > version or self._failure is not None)
        if self._closed or self._newest <= version:
            raise RelayError(self._failure.reason if self._failure else f"subscriber {self.name} is closed")
        return self._newest

    async def pull(self, version: int | None = None, *, base: int = -1) -> PulledVersion:
        """Get a version (default: the newest), which stays on this host until the next pull.

        The answer names change files if this host has all of them since version `base`. Without a base the
        pull waits until the whole folder is verified. Raises `VersionLostError` if no node up to the root has it,
        `RelayError` if the node cannot hold it.
        """
        async with self._pull_lock:
            self._num_pulls += 1
            self._release = None
            self._request = m.Pull(
                id=self._num_pulls, session=self._session, name=self.name, version=version, base=base
            )
            self._uplink.send(self._request)
            try:
                await self._wait_until(lambda: self._closed or self._answer is not None)
                answer = self._answer
            finally:
                self._request = self._answer = None
        if isinstance(answer, m.Granted):
            return PulledVersion(answer.version, answer.path, answer.digest, answer.changes)
        if answer is None:
            raise RelayError(f"subscriber {self.name} is closed")
        raise VersionLostError(answer.reason) if answer.lost else RelayError(answer.reason)

    def release(self) -> None:
        """Let the node retire the version that was pulled last, e.g. once the engine has loaded it."""
        self._release = m.Release(self._num_pulls, self._session, self.name)
        self._uplink.send(self._release)

    # ---- called by the uplink

    def reattach(self) -> None:
        """Subscribe, and repeat the last request that has no answer."""
        self._unreachable = False
        self._uplink.send(m.Subscribe())
        if self._request is not None:
            self._uplink.send(self._request)
        elif self._release is not None:
            self._uplink.send(self._release)

    def resend_requests(self) -> None:
        """Subscribe again, and repeat the last request that has no answer."""
        self.reattach()

    def handle(self, message: m.ToChild) -> bool:
        """Keep a newest version, failure or answer to the waiting pull, and wake all waiters; always True."""
        match message:
            case m.Newest(version):
                self._newest, self._failure = version, None
            case m.Failed():
                self._failure = message
            case m.Granted(id=id) | m.Refused(id=id) if self._request is not None and id == self._request.id:
                self._answer = message
        self._notify()
        return True

    @property
    def is_idle(self) -> bool:
        """True always: there is no other node to prefer."""
        return True

    def take_chunk(self, chunk: m.Chunk, body: ChunkBody) -> None:
        """Do nothing: a subscriber opens no lanes."""

    def left_parent(self, old: str, new: str) -> None:
        """Only log it, once: the run's supervisor restarts a lost node."""
        if old != new:
            log.warning("%s leaves its node at %s and connects to %s", self.name, old, new)
        elif not self._unreachable:
            log.warning("%s cannot reach its node at %s; it keeps trying", self.name, old)
        self._unreachable = old == new

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
