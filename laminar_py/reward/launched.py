"""Addresses of servers that the run launches, in a scorer. Told by the run's leader, asked by terms.

Invariant: whoever asks for a pool of which none is up waits until one is.
"""

import asyncio
from collections.abc import Sequence

from laminar_py.records.servers import PoolAddresses, ServerAddress


class LaunchedServers:
    """Addresses as they were last told."""

    def __init__(self) -> None:
        self._newest = PoolAddresses(0, {})
        self._news = asyncio.Event()

    def update(self, addresses: PoolAddresses) -> None:
        """Take these, unless newer ones are known."""
        if addresses.number > self._newest.number:
            self._newest = addresses
            self._news.set()
            self._news = asyncio.Event()

    async def of(self, pool: str) -> Sequence[ServerAddress]:
        """Servers of a pool that are up, once any is."""
        while not (found := self._newest.pools.get(pool)):
            await self._news.wait()
        return found
