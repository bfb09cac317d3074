"""Connections to other nodes than the parent, which send chunks of a version that this node joins late.

`NodeVersions` opens them when it starts to download a long version in full, and closes them at its end. One
source's records, beside `Lanes` as from a parent:

    asking    AskHeld(v, digest) -> Held(v, runs) | Lost(v)   at each connect, and every `parent_timeout_s`
    lending   Fetch(v)*         -> Chunk*                    while the source has chunks and no child that fetches
    left      a connection that stays broken, or `Lost(v)`: its chunks are requested of the others
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import laminar_py.relay.messages as m
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.uplink import Uplink, UplinkOwner

log = logging.getLogger(__name__)

MAX_SOURCES = 3  # besides the parent


class Borrower(Protocol):
    """The owner of `Sources`, which has versions that arrive."""

    @property
    def joining(self) -> Sequence[m.Manifest]:
        """Versions that arrive in full and of which much is missing."""
        ...

    def handle_held(self, source: str, held: m.Held) -> None:
        """Request chunks that a source lists in `held`."""
        ...

    def leave_source(self, source: str, version: int | None = None) -> None:
        """Request the outstanding chunks of a source from others, of one version or of all."""
        ...

    def handle_chunk(self, chunk: m.Chunk, source: str) -> None:
        """Store a chunk."""
        ...

    def take_chunk(self, chunk: m.Chunk, body: ChunkBody, source: str) -> Callable[[], None] | None:
        """Write a chunk in a lane's thread; return the rest of the work, for the event loop."""
        ...


Connect = Callable[[Sequence[str], UplinkOwner], Uplink]


class Sources:
    """The sources of one node: up to `MAX_SOURCES` of the `candidates`, which may be replaced at any time."""

    def __init__(self, borrower: Borrower, connect: Connect, candidates: Sequence[str] = ()) -> None:
        self.candidates = tuple(candidates)  # endpoints, the best first
        self._borrower = borrower
        self._connect = connect
        self._open: dict[str, tuple[_Source, asyncio.Task[None]]] = {}  # by endpoint
        self._left: set[str] = set()  # endpoints without an answer, until `close`

    def open(self, tasks: asyncio.TaskGroup, parents: Iterable[str], parent: str) -> None:
        """Connect to further candidates, and after them to other parents than `parent`."""
        self.leave(parent)
        for endpoint in dict.fromkeys((*self.candidates, *parents)):
            if endpoint != parent and endpoint not in self._left | self._open.keys():
                if len(self._open) == MAX_SOURCES:
                    return
                source = _Source(endpoint, self, self._borrower, self._connect)
                self._open[endpoint] = source, tasks.create_task(source.uplink.run(), name=f"source-{endpoint}")

    def send(self, source: str, message: m.Upward) -> None:
        """Send a record to a source that is open."""
        self._open[source][0].uplink.send(message)

    def leave(self, endpoint: str, *, silent: bool = False) -> None:
        """Close the connection to a source, if it is open; `open` passes a silent one over."""
        if endpoint in self._open:
            self._open.pop(endpoint)[1].cancel()
            if silent:
                self._left.add(endpoint)
            self._borrower.leave_source(endpoint)

    def close(self) -> None:
        """Close all connections."""
        for endpoint in list(self._open):
            self.leave(endpoint)
        self._left.clear()


class _Source:
    """Owner of the uplink to one source."""

    is_idle = False  # a source has no other place

    def __init__(self, endpoint: str, sources: Sources, borrower: Borrower, connect: Connect) -> None:
        self._endpoint = endpoint
        self._sources = sources
        self._borrower = borrower
        self.uplink = connect([endpoint], self)

    def reattach(self) -> None:
        """Ask others for the chunks that were on their way, and ask again what this source has."""
        self._borrower.leave_source(self._endpoint)
        self.resend_requests()

    def resend_requests(self) -> None:
        """Ask which chunks the source has now."""
        for manifest in self._borrower.joining:
            self.uplink.send(m.AskHeld(manifest.version, manifest.digest))

    def handle(self, message: m.ToChild) -> bool:
        """Handle a record of the source; always True, since there is no other place to go."""
        match message:
            case m.Chunk():
                self._borrower.handle_chunk(message, self._endpoint)
            case m.Held():
                self._borrower.handle_held(self._endpoint, message)
            case m.Lost(version):
                self._borrower.leave_source(self._endpoint, version)
        return True

    def take_chunk(self, chunk: m.Chunk, body: ChunkBody) -> Callable[[], None] | None:
        """Write a chunk in a lane's thread."""
        return self._borrower.take_chunk(chunk, body, self._endpoint)

    def left_parent(self, old: str, new: str) -> None:
        """Leave the source, which does not answer."""
        log.info("%s takes no chunks from %s: it does not answer", self.uplink.name, old)
        self._sources.leave(old, silent=True)
