"""A replica's end of the relay: hears of new versions and pulls them from the node of its host.

Implements `protocols.WeightSource`, beside the replica. Invariant: a question that the
node has not answered is asked again whenever the connection comes back, and every few seconds.
"""

import asyncio
import secrets
from collections.abc import Callable

from laminar_py.records.protocols import PulledVersion, VersionLostError
from laminar_py.relay.node.uplink import Uplink
from laminar_py.relay.wire import messages as m
from laminar_py.relay.wire.transport import RelayKeys, Wire


class RelayError(RuntimeError):
    """The node cannot give the version; the message names the setting to change where there is one."""


class Subscriber:
    """`await run()` in a task until `await close()`; the questions may be put at any time.

    `name` holds the pin: a revived replica of the same name finds the version it pulled last still held.
    """

    def __init__(self, endpoint: str, name: str, keys: RelayKeys | None, *, heartbeat_s: float = 5.0) -> None:
        self.name = name
        self._wire = Wire(keys, heartbeat_s=heartbeat_s)
        self._uplink = Uplink(
            name,
            [endpoint],
            self,
            wire=self._wire,
            timeout_s=heartbeat_s,
            chunk_bytes=0,
        )
        self._changed = asyncio.Event()  # set, and replaced, when one of the next four changes
        self._newest = -1
        self._failure: m.Failed | None = None  # why there is not even a first version
        self._answer: m.Granted | m.Refused | None = None
        self._closed = False
        self._pulling = asyncio.Lock()  # a pull ends the hold of the one before: one at a time
        self._question: m.Pull | None = None
        self._num_pulls = 0
        self._released: m.Release | None = None  # of what was pulled last
        self._session = secrets.randbits(63)
        self._running = False
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Listen to the node, which need not be there yet, until `close`."""
        if self._closed:
            return
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                listening = group.create_task(self._uplink.run(), name=f"{self.name}-listen")
                await self._until(lambda: self._closed)
                listening.cancel()
        finally:
            self._wire.close()
            self._stopped.set()

    def attach(self, endpoint: str) -> None:
        """Turn to the node there, which is the same one or another with the store of this host."""
        self._uplink.parents = (endpoint,)

    async def close(self) -> None:
        """End `run`; whoever waits for an answer gets `RelayError`."""
        self._closed = True
        self._notify()
        if self._running:
            await self._stopped.wait()
        else:
            self._wire.close()

    async def latest(self) -> int:
        """The newest complete version at the node; waits for the first. Raises `RelayError` if that failed."""
        return await self.wait_newer(-1)

    async def wait_newer(self, version: int) -> int:
        """The newest complete version, once it is above `version`. Raises `RelayError` like `latest`."""
        await self._until(lambda: self._closed or self._newest > version or self._failure is not None)
        if self._closed or self._newest <= version:
            raise RelayError(self._failure.reason if self._failure else f"subscriber {self.name} is closed")
        return self._newest

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Pull that version (default the newest complete one), held on this host until the next pull.

        Raises `VersionLostError` if no relay up to the root has it, `RelayError` if the node cannot hold it.
        """
        async with self._pulling:
            self._num_pulls += 1
            self._released = None
            self._question = m.Pull(self._num_pulls, self._session, self.name, version)
            self._uplink.tell(self._question)
            try:
                await self._until(lambda: self._closed or self._answer is not None)
                answer = self._answer
            finally:
                self._question = self._answer = None
        if isinstance(answer, m.Granted):
            return PulledVersion(answer.version, answer.path, answer.digest)
        if answer is None:
            raise RelayError(f"subscriber {self.name} is closed")
        raise VersionLostError(answer.reason) if answer.lost else RelayError(answer.reason)

    def release(self) -> None:
        """Let go of what was pulled last, e.g. once it is loaded and not asked for again."""
        self._released = m.Release(self._num_pulls, self._session, self.name)
        self._uplink.tell(self._released)

    # ---- what `uplink` calls

    def greet(self) -> None:
        """Ask again what has no answer yet."""
        self._uplink.tell(m.Subscribe())
        if self._question is not None:
            self._uplink.tell(self._question)
        elif self._released is not None:
            self._uplink.tell(self._released)

    def remind(self) -> None:
        """Ask again what has no answer yet."""
        self.greet()

    def handle(self, message: m.ToChild) -> bool:
        """Take the node's word."""
        match message:
            case m.Newest(version):
                self._newest, self._failure = version, None
            case m.Failed():
                self._failure = message
            case m.Granted(id=id) | m.Refused(id=id) if self._question is not None and id == self._question.id:
                self._answer = message
        self._notify()
        return True

    @property
    def is_idle(self) -> bool:
        """True always: there is no other node."""
        return True

    def left_parent(self, old: str, new: str) -> None:
        """Ignored: a lost node is its own supervisor's business."""

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
