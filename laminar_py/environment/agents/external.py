"""External agents, which run elsewhere: trajectories wait for them, each is handed to the first that asks.

Owned by `agents.kind`; the endpoint hands them out to whoever has the run's key, which a file of the run has.
Invariant: a trajectory is handed out once, unless its process of environments died since.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.environment.protocol import Problem

KEY_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTrajectory:
    """A trajectory that is, or was, to be had: its agent's key, and its problem."""

    key: str
    problem: Problem
    withdraw: Callable[[], None]

    async def end(self) -> None:
        """Have nobody take it any more; whoever has it is refused from here on."""
        self.withdraw()


class ExternalAgents:
    """Trajectories that wait for agents, the longest waiting first; `key` is that of those who may take one."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._offers: dict[str, OfferedTrajectory] = {}  # by the agent's key
        self._some = asyncio.Event()

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> OfferedTrajectory:
        """Offer a trajectory, whose requests are to have `key`; nobody tells when its agent has `ended`."""
        offer = OfferedTrajectory(key=key, problem=problem, withdraw=lambda: self._withdraw(key))
        self._offers[key] = offer
        self._some.set()
        return offer

    async def take(self, patience_s: float) -> OfferedTrajectory | None:
        """The one that waits longest; None where there was none for so long."""
        try:
            async with asyncio.timeout(patience_s):
                while not self._offers:
                    await self._some.wait()
        except TimeoutError:
            return None
        offer = self._offers[next(iter(self._offers))]
        offer.withdraw()
        return offer

    def _withdraw(self, key: str) -> None:
        self._offers.pop(key, None)
        if not self._offers:
            self._some.clear()


class ExternalFile(msgspec.Struct, frozen=True):
    """Address at which external agents ask for trajectories, and the key for it."""

    url: str
    key: str


def run_key(path: Path) -> str:
    """The key in the file of an earlier process, or a new one."""
    if path.is_file():
        return msgspec.json.decode(path.read_bytes(), type=ExternalFile).key
    return f"sk-run-{secrets.token_urlsafe(KEY_BYTES)}"


def tell_where(path: Path, *, url: str, key: str) -> None:
    """Write the file, which nobody but its owner reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.touch(mode=0o600)
    beside.write_bytes(msgspec.json.encode(ExternalFile(url, key)))
    os.replace(beside, path)
