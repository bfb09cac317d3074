"""Requests for the chunks of an arriving version, divided among the nodes that have them. Pure; no sockets.

A `Download` owns one `Requests`. Its sources are the parent, which sends each chunk once it has the chunk, and
other nodes, which list their chunks. A source gets more requests as its chunks arrive, so a fast one sends more.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from laminar_py.relay.messages import Fetch, Runs
from laminar_py.relay.stored_version import StoredVersion

# Enough bytes in flight to cover 25 Gb/s over 10 ms; a narrower window would idle between two grants.
_WINDOW_BYTES = 32 * 2**20
MIN_WINDOW, MAX_WINDOW = 4, 256  # chunks
MISSED_REMINDERS = 3  # after which a chunk is requested again
PARENT = ""  # name of the parent among sources; the others have their endpoints

ChunkKey: TypeAlias = tuple[int, int]  # file, chunk


def window_of(chunk_bytes: int) -> int:
    """Number of chunks that may be in flight to a node, e.g. 8 of 4 MiB."""
    return min(MAX_WINDOW, max(MIN_WINDOW, _WINDOW_BYTES // chunk_bytes))


@dataclass(slots=True)
class _Sender:
    """A node that sends chunks, and the chunks requested of it."""

    held: tuple[bytearray, ...] | None  # [files][chunks] 1 for each chunk that it has; None: all, perhaps later
    asked: dict[ChunkKey, int] = field(default_factory=dict)  # reminders since the request; the oldest first
    ahead: Iterator[ChunkKey] = field(default_factory=lambda: iter(()))  # chunks to request next

    def has(self, chunk: ChunkKey) -> bool:
        """True if a request of this chunk makes sense."""
        return self.held is None or bool(self.held[chunk[0]][chunk[1]])


class Requests:
    """Which source was asked for which chunk, e.g. `Requests(store.begin(manifest), window=8)`.

    The parent alone has at most `window` requested chunks that are not here yet; several sources share them, at
    least `MIN_WINDOW` each. A chunk is requested of one source at a time. At the end, an idle source takes over
    requests of a slower one, each chunk at most once
    (`tests/relay/test_sources.py::test_sources_send_every_chunk_and_few_of_them_twice`).
    """

    def __init__(self, stored: StoredVersion, *, window: int) -> None:
        self._stored = stored
        self._window = window  # full chunks
        self._wide_window = window  # chunks of the size that comes
        self._num_old = 0  # requests before a restart whose chunks may still come
        self._recent = deque[float](maxlen=window)  # bytes of the last chunks, by their bytes in full
        self._sources = {PARENT: _Sender(None)}
        self._taken_over: set[ChunkKey] = set()
        self._in_full: set[ChunkKey] = set()  # chunks whose deltas were wrong
        self.parent_only = False
        self.restart(PARENT)

    @property
    def is_long(self) -> bool:
        """True while so many chunks are missing that other sources can help."""
        return self._stored.num_missing > self._window and not self.parent_only

    def has_source(self, name: str) -> bool:
        """True unless this source was left; any thread may ask."""
        return name in self._sources

    def lend(self, name: str, runs: Runs) -> None:
        """Request chunks also of this source, which has these runs of them; without any, leave the source."""
        if not runs or self.parent_only:
            self.drop(name)
            return
        held = tuple(bytearray(count) for count in self._stored.chunk_counts)
        for file, first, count in runs:
            if file < len(held):
                end = min(first + count, len(held[file]))
                held[file][first:end] = b"\1" * (end - first)
        self._sources.setdefault(name, _Sender(held)).held = held
        self._look_again()

    def drop(self, name: str) -> None:
        """Leave a source other than the parent; the others are asked for its chunks."""
        if name != PARENT and self._sources.pop(name, None) is not None:
            self._look_again()

    def restart(self, name: str) -> None:
        """Forget all requests to a source, e.g. after a change of parent; `fill` requests the chunks again."""
        asked = self._sources[name].asked
        self._num_old, self._wide_window = len(asked), self._window
        asked.clear()
        self._look_again()

    def trust_parent_only(self) -> None:
        """Leave all other sources for good, and request all missing chunks of the parent."""
        self._sources, self.parent_only = {PARENT: self._sources[PARENT]}, True
        self.restart(PARENT)

    def widen(self, share: float) -> None:
        """Request one more chunk ahead, while no more bytes are in flight than with full chunks.

        `share` is the bytes that came for a chunk, by its bytes in full. The parent's queue has room for two such
        windows. After a restart it also has the old requests, so the window grows by one, once these came.
        """
        self._recent.append(share)
        if self._num_old:
            self._num_old -= 1
            return
        room = int(self._window * len(self._recent) / max(sum(self._recent), 1e-9))
        self._wide_window = max(self._window, min(MAX_WINDOW // 2, room, self._wide_window + 1))

    def fill(self) -> list[tuple[str, Fetch]]:
        """Return requests and their sources; none to a source with more than half of its share in flight."""
        requests = []
        alone = len(self._sources) == 1
        share = self._wide_window if alone else max(MIN_WINDOW, self._window // len(self._sources))
        for name, source in self._sources.items():
            if len(source.asked) * 2 > share:
                continue
            left = self._stored.num_missing - sum(len(other.asked) for other in self._sources.values())
            # Smaller requests towards the end let all sources end at about the same time.
            most = min(share - len(source.asked), math.ceil(left / len(self._sources)))
            chunks = list(islice(source.ahead, max(0, most)))
            if not chunks and not source.asked:
                chunks = self._take_over(source)
            source.asked |= dict.fromkeys(chunks, 0)
            requests += [(name, fetch) for fetch in self._fetches(chunks)]
        return requests

    def repeat_overdue(self) -> list[tuple[str, Fetch]]:
        """Count a reminder for each request; at `MISSED_REMINDERS` ask the parent again, and leave others."""
        for name, source in list(self._sources.items()):
            for chunk in source.asked:
                source.asked[chunk] += 1
            if name != PARENT and MISSED_REMINDERS in source.asked.values():
                self.drop(name)
        asked = self._sources[PARENT].asked
        overdue = [chunk for chunk, missed in asked.items() if missed >= MISSED_REMINDERS]
        asked |= dict.fromkeys(overdue, 0)
        return [(PARENT, fetch) for fetch in self._fetches(overdue)]

    def ask_again(self, chunk: ChunkKey, sender: str) -> tuple[str, Fetch]:
        """Request a chunk in full that `sender` sent damaged: of another source, if one has the chunk.

        Leaves the sender, unless it is the parent, until its next `Held`.
        """
        self.arrived(chunk)
        self.drop(sender)
        others = (name for name, source in self._sources.items() if name != sender and source.has(chunk))
        name = next(others, PARENT)
        self._sources[name].asked[chunk] = 0
        self._in_full.add(chunk)
        return name, self._fetches([chunk])[0]

    def arrived(self, chunk: ChunkKey) -> None:
        """Note that a chunk is here, from any source."""
        for source in self._sources.values():
            source.asked.pop(chunk, None)

    def _take_over(self, idle: _Sender) -> list[ChunkKey]:
        """Take from the source with the longest queue the last half of its chunks that `idle` has."""
        slow = max(self._sources.values(), key=lambda source: len(source.asked))
        chunks = [chunk for chunk in slow.asked if chunk not in self._taken_over and idle.has(chunk)]
        taken = chunks[len(chunks) // 2 :]
        for chunk in taken:
            del slow.asked[chunk]
        self._taken_over.update(taken)
        return taken

    def _look_again(self) -> None:
        """Let each source continue at the first chunk that it has and that is missing and not requested."""
        for source in self._sources.values():
            source.ahead = self._chunks_of(source)

    def _chunks_of(self, source: _Sender) -> Iterator[ChunkKey]:
        for chunk in self._stored.missing_chunks():
            if source.has(chunk) and not any(chunk in other.asked for other in self._sources.values()):
                yield chunk

    def _fetches(self, chunks: Iterable[ChunkKey]) -> Sequence[Fetch]:
        """Requests for chunks, one for each run of neighbours; without a base where their deltas were wrong."""
        runs: list[tuple[int, int, int, int | None]] = []  # file, first chunk, number of chunks, base
        for file, index in chunks:
            base = None if (file, index) in self._in_full else self._stored.base
            _, first, count, _ = runs[-1] if runs else (0, 0, 0, None)
            if runs and (file, first, index - first, base) == runs[-1]:
                runs[-1] = file, first, count + 1, base
            else:
                runs.append((file, index, 1, base))
        version = self._stored.manifest.version
        return [
            Fetch(version=version, file=file, first_chunk=first, credits=count, base=base)
            for file, first, count, base in runs
        ]
