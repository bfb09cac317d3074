"""Turns on their way to environments that listen, as they are sampled: from replicas to processes of environments.

Frames go straight to the process that has the environment, and nothing answers them. Invariant: no turn depends on
one. What is lost with a connection or a process comes with the whole turn, over Ray.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from laminar_py.records.codec import encode
from laminar_py.records.environment import TurnPart
from laminar_py.relay.wire.post import Peer, Post
from laminar_py.relay.wire.transport import RelayKeys, read_record

UNSENT_S = 0.01  # between two tries to send while a connection is made
MOST_FRAMES = 128  # taken in before the event loop goes on with other work


class TurnPartReceiver:
    """The end of a process of environments, with an address of its own. Raises `ConfigError` without one."""

    def __init__(self, keys: RelayKeys, host: str) -> None:
        self._post = Post(keys, host)
        self.endpoint = self._post.endpoint

    async def run(self, hear: Callable[[Sequence[TurnPart]], None]) -> None:
        """Have `hear` told of what comes, until cancelled. Raises what that raises."""
        try:
            while True:
                await self._post.wait()
                for _, frame in self._post.drain(MOST_FRAMES):
                    parts = read_record(list[TurnPart], frame)
                    if parts is not None:
                        hear(parts)
                await asyncio.sleep(0)  # a socket that is always ready must not starve the other tasks
        finally:
            self._post.close()


class TurnPartSender:
    """A replica's end of the way to one process.

    `find` gives the address that the process has now, once there is one, and `connect` connects to it.
    """

    def __init__(self, find: Callable[[], Awaitable[str]], connect: Callable[[str], Peer]) -> None:
        self._find = find
        self._connect = connect
        self._peer: Peer | None = None

    def offer(self, parts: Sequence[TurnPart]) -> bool:
        """Hand parts over at once; False where the process is away, or takes nothing."""
        return self._peer is not None and self._peer.send(encode(parts))

    async def send(self, parts: Sequence[TurnPart]) -> None:
        """Hand parts over by a new connection, once the process is there."""
        self.close()
        self._peer = self._connect(await self._find())
        while not self.offer(parts):  # noqa: ASYNC110 (nobody tells when the connection is there)
            await asyncio.sleep(UNSENT_S)

    def close(self) -> None:
        """End the connection."""
        if self._peer is not None:
            self._peer.close()
            self._peer = None
