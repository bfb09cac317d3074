"""Payload of a run: which host has which segment; rescue from crashed parts, archive and deletion.

Owned by the controller, which works with references and reads no token. A part writes segments under the label
that it was started with, so the name of a segment tells its writer and its host. A segment is deleted only if no
reference to it is on record or in memory, neither before nor after the search, and if its writer has begun another
segment and reports no more about it (`tests/workers/test_payload.py`).
"""

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count

from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.archive import ArchiveAnswer, ArchiveRequest, archive_pieces, file_name
from laminar_py.ledger.pieces import PieceRow
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.segments.local import drop_local, is_local, keep_here, lead_to_kept
from laminar_py.ledger.segments.salvage import Known, Salvage, Salvaged, SalvageRequest, salvage
from laminar_py.ledger.segments.writer import (
    SegmentFile,
    discard,
    labels_here,
    part_of,
    segment_files,
    segments_here,
)
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import PieceRef
from laminar_py.records.trajectory import Status
from laminar_py.runtime.cluster.backend import on_node
from laminar_py.runtime.cluster.errors import NoAnswerError, PartCrashedError, RemoteCallError, UnwritableError
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.stores import Stores

log = logging.getLogger(__name__)

SETTLES_S = 60.0  # a segment, unless its part's newest, gets no more tokens or references after so long a pause
ROWS_AT_ONCE = 50_000  # references in one file of the archive
ROWS_APART = 10_000  # from which on a process of its own writes the file
ANSWER_S = 60.0  # for a host to list its folder, or to delete files
WRITE_S = 600.0  # for a host to write to the archive, or to a new segment
KEEP_S = 3600.0  # for a host to copy segments to the run's folder, at the end


class PayloadHosts:
    """Knows the host of each segment, and rescues, archives and deletes segments."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.key = secrets.token_hex(32)
        self.stores = Stores(incarnation, key=self.key)
        self._incarnation = incarnation
        self._placement = incarnation.placement
        self._ledger = incarnation.ledger
        self._run = incarnation.run
        self._folder = str(incarnation.run.segments)
        self._nodes: dict[str, str] = {}  # cluster node of each label
        self._present: dict[str, str] = {}  # part -> its newest label
        self._silent: set[str] = set()  # nodes whose last answer was late
        self._one_loss = asyncio.Lock()
        self._starts = count()

    # ---- where things are

    async def new_label(self, part: str, node: str | None) -> str:
        """Return a label for a part that starts on a node, e.g. `replica-3-2-17`: the 17th start of incarnation 2.

        The store of its host is up on return, so others can read its segments. Raises PartCrashedError if the host
        is gone.
        """
        if self._placement.spread and node is not None:
            await self.stores.bring_up(node)
        return self._name(part, node or self._here)

    def stores_for(self, refs: Iterable[PieceRef], node: str | None) -> dict[str, str]:
        """Return segment -> name of its store, for the segments of `refs` that are not on the reader's node."""
        if not self._placement.spread:
            return {}
        elsewhere = {ref.segment for ref in refs if self._node_of(ref.segment) != (node or self._here)}
        return {segment: self.stores.name_of(self._node_of(segment)) for segment in elsewhere}

    async def find_segments(self, recovered: Recovered) -> dict[str, str]:
        """Find the segments of earlier incarnations.

        Returns the live trajectories whose segments are missing, each with a reason.
        """
        sizes: dict[str, int] = {}  # bytes of each segment
        for node, files in (await self._files()).items():
            for file in files:
                sizes.setdefault(file.name, file.num_bytes)
                self._nodes.setdefault(part_of(file.name), node)
        for node in set(self._nodes.values()):
            self.stores.require(node)
        return {entry.id: why for entry in recovered.live if (why := _missing(entry, sizes))}

    # ---- after crashes

    async def salvage(self, label: str, running: Mapping[str, Known]) -> Salvage:
        """Rescue unreported tokens of these trajectories from a crashed part; none if its host does not answer."""
        return await self._salvage(self._nodes[label], f"{label}.*", running, part=f"salvage-{label}")

    async def salvage_all(self, live: Sequence[LiveTrajectory]) -> list[Salvaged]:
        """Rescue unreported tokens of all trajectories that ran when the last controller crashed.

        Returns none if the run went back to a copy of its ledger: its journals may be newer than the copy.
        """
        if self._run.went_back:
            await self._discard_journals()
            return []
        running = {
            entry.id: Known(entry.epoch, entry.tokens[-1].end if entry.tokens else 0)
            for entry in live
            if entry.status is Status.RUNNING
        }
        answers = await asyncio.gather(
            *(
                self._salvage(node, "*", running, part=f"salvage-all-{index}")
                for index, node in enumerate(self._all_nodes)
            )
        )
        return [tokens for answer in answers for tokens in answer.found]

    async def salvaged(self, label: str, answer: Salvage) -> None:
        """Delete the journals of a crashed part, once their tokens are on record."""
        self._present.pop(f"salvage-{label}", None)
        if answer.journals:
            await self._ledger.commit()
            await self._discard(self._nodes[label], answer.journals)

    async def is_lost(self, label: str) -> bool:
        """Return True if the host of a crashed part is gone as well, and with it the segments of the part.

        If hosts share the folder, the segments outlive their host, and the controller's host takes them over.
        """
        await self._placement.refresh()
        node = self._nodes[label]
        if self._placement.is_alive(node):
            return False
        seen = decode(list[str], await self._on(self._here, labels_here, self._folder) or encode([]))
        for other in [name for name in seen if self._nodes.get(name) == node]:
            self._nodes[other] = self._here
        return self._nodes[label] == node

    async def lose_host_of(self, label: str, scheduler: TrajectoryScheduler) -> None:
        """Drop the trajectories whose segments were only on a crashed part's host."""
        async with self._one_loss:  # parts that crashed with the same host lose it once
            node = self._nodes[label]
            needed = await self._needed(scheduler)
            lost = {segment for segment in needed if self._node_of(segment) == node}
            await self._lose(lost, f"host {self._placement.ip(node)} is gone", scheduler)

    # ---- archive and deletion

    async def archive(self, step: int, scheduler: TrajectoryScheduler) -> int:
        """Archive the pieces that no rollback to `step` or later needs; return how many trajectories moved."""
        rows_by_node: dict[str, list[PieceRow]] = {}
        for row in await self._ledger.settled_pieces(step):
            rows_by_node.setdefault(self._node_of(row.segment), []).append(row)
        files = [
            (node, rows) for node, all_rows in rows_by_node.items() for rows in _at_most(all_rows, ROWS_AT_ONCE)
        ]
        seq = self._ledger.seq
        answers = await asyncio.gather(
            *(self._archive(node, file_name(seq, index), rows) for index, (node, rows) in enumerate(files))
        )
        written = [answer for answer in answers if answer is not None]
        unreadable = {number: reason for answer in written for number, reason in answer.unreadable.items()}
        archived, failed = set[int](), set[int]()  # trajectories with a piece in a written file, in a failed file
        for answer, (_, rows) in zip(answers, files, strict=True):
            (failed if answer is None else archived).update(row.trajectory for row in rows)
        moved = archived - failed - unreadable.keys()
        await self._ledger.archived([answer.event for answer in written], sorted(moved))
        if unreadable:
            reason = next(iter(unreadable.values()))
            log.error("pieces of %d trajectories cannot be read: %s", len(unreadable), reason)
            await self._ledger.record_lost_pieces(unreadable.keys(), reason)
        await self._tidy(scheduler, settles_s=SETTLES_S)
        return len(moved)

    async def close(self, scheduler: TrajectoryScheduler) -> None:
        """Delete journals and unneeded segments; copy segments on disks of hosts into the run's folder.

        Called when all trajectories have ended and are reported. Raises UnwritableError.
        """
        await self._discard_journals()
        self._present.clear()
        await self._tidy(scheduler, settles_s=-math.inf)
        if is_local(self._run.segments):
            await self._copy_needed(scheduler)

    async def _tidy(self, scheduler: TrajectoryScheduler, *, settles_s: float) -> None:
        """Delete segments without a reference; missing segments with a reference are lost.

        Replicas report new segments while hosts list theirs.
        """
        needed_before = await self._needed(scheduler)
        listed = await self._files()
        needed_after = await self._needed(scheduler)
        present = {file.name for files in listed.values() for file in files}
        missing = {segment: self._node_of(segment) for segment in (needed_before & needed_after) - present}
        lost = [name for name, node in missing.items() if node in listed or not self._placement.is_alive(node)]
        await self._lose(lost, f"segment {min(lost, default='')} is gone from its host", scheduler)
        labels, needed = set(self._present.values()), needed_before | needed_after
        unneeded = {
            node: _unneeded_segments(files, needed, present=labels, settles_s=settles_s)
            for node, files in listed.items()
        }
        await asyncio.gather(*(self._discard(node, segment_files(names)) for node, names in unneeded.items()))

    async def _copy_needed(self, scheduler: TrajectoryScheduler) -> None:
        """Copy needed segments from the hosts to the run's folder; segments that no host has are lost."""
        needed, folder = await self._needed(scheduler), self._run.segments
        names = encode(segment_files(needed))
        await asyncio.gather(
            *(
                self._on(node, keep_here, self._folder, names, limit_s=KEEP_S, must_write=True)
                for node in self._all_nodes
            )
        )
        local = str(folder.readlink())
        await asyncio.to_thread(lead_to_kept, folder, segment_files(needed))
        lost = needed - {file.name for file in decode(list[SegmentFile], segments_here(self._folder))}
        await self._lose(lost, f"the host of segment {min(lost, default='')} is gone", scheduler)
        await asyncio.gather(
            *(self._on(node, drop_local, local) for node in self._all_nodes if node not in self._silent)
        )

    async def _needed(self, scheduler: TrajectoryScheduler) -> set[str]:
        return await self._ledger.segments() | scheduler.book.segments()

    async def _lose(self, segments: Collection[str], reason: str, scheduler: TrajectoryScheduler) -> None:
        """Record that these segments are lost, and drop the live trajectories that need them."""
        if segments:
            log.error("%s, %d in all", reason, len(segments))
            await scheduler.lost_tokens.drop_segments(segments, reason)
            await self._ledger.record_lost_pieces(await self._ledger.holders(segments), reason)

    # ---- on hosts

    @property
    def _here(self) -> str:
        here = self._placement.here.node
        assert here is not None, "the controller is on a node"
        return here

    @property
    def _all_nodes(self) -> list[str]:
        """The controller's node, and all other live nodes if the run spans several."""
        return self._placement.alive if self._placement.spread else [self._here]

    def _name(self, part: str, node: str) -> str:
        label = f"{part}-{self._incarnation.number}-{next(self._starts)}"
        self._nodes[label], self._present[part] = node, label
        return label

    def _node_of(self, segment: str) -> str:
        return self._nodes.get(part_of(segment), self._here)

    async def _files(self) -> dict[str, list[SegmentFile]]:
        """Return the segments of each host that answers; all are asked at once, since each starts a process."""
        nodes = self._all_nodes
        answers = await asyncio.gather(*(self._on(node, segments_here, self._folder) for node in nodes))
        answered = zip(nodes, answers, strict=True)
        return {node: decode(list[SegmentFile], answer) for node, answer in answered if answer is not None}

    async def _salvage(self, node: str, pattern: str, running: Mapping[str, Known], *, part: str) -> Salvage:
        """Rescue tokens from the journals of a host; a store starts there only if some were found."""
        nothing = Salvage([], [])
        if not running:
            return nothing
        request = SalvageRequest(pattern, self._name(part, node), dict(running))
        answer = await self._on(node, salvage, self._folder, encode(request), limit_s=WRITE_S)
        rescued = nothing if answer is None else decode(Salvage, answer)
        if rescued.found and self._placement.spread:
            try:
                await self.stores.bring_up(node)
            except PartCrashedError:
                return nothing
        return rescued

    async def _archive(self, node: str, name: str, rows: Sequence[PieceRow]) -> ArchiveAnswer | None:
        request = ArchiveRequest(str(self._incarnation.run.path), name, list(rows))
        if node in self._silent:
            return None  # called again once it has answered a small call
        apart = len(rows) >= ROWS_APART
        answer = await self._on(node, archive_pieces, encode(request), limit_s=WRITE_S, apart=apart)
        return None if answer is None else decode(ArchiveAnswer, answer)

    async def _discard_journals(self) -> None:
        await asyncio.gather(*(self._discard(node, ["*.journal"]) for node in self._all_nodes))

    async def _discard(self, node: str, names: Sequence[str]) -> None:
        if names:
            await self._on(node, discard, self._folder, encode(list(names)))

    async def _on(
        self,
        node: str,
        function: Callable[..., bytes],
        *arguments: str | bytes,
        limit_s: float | None = None,
        apart: bool = False,
        must_write: bool = False,
    ) -> bytes | None:
        """Call a function on a host; return its answer within `limit_s`, ANSWER_S if None.

        Returns None if the host is gone, the function raises, or the time is over. With `must_write` an error of
        the function raises UnwritableError.
        """
        limit_s = ANSWER_S if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await on_node(node, function, *arguments, apart=apart)
        except TimeoutError:
            self._silent.add(node)
            log.error("%s on %s: no answer in %.0f s", function.__name__, self._placement.ip(node), limit_s)
        except (RemoteCallError, OSError) as error:
            if must_write:
                raise UnwritableError(f"segments of {self._placement.ip(node)}: {error}") from None
            log.error("%s on %s: %s", function.__name__, self._placement.ip(node), error)
        except NoAnswerError as error:
            log.warning("%s: no answer from %s: %s", function.__name__, self._placement.ip(node), error)
        else:
            self._silent.discard(node)
            return answer
        return None


async def restore_live(recovered: Recovered, payload: PayloadHosts, scheduler: TrajectoryScheduler) -> None:
    """Give the scheduler the trajectories of a crashed controller; drop trajectories without segments."""
    missing = await payload.find_segments(recovered)
    await scheduler.restore(recovered, salvaged=await payload.salvage_all(recovered.live))
    await scheduler.lost_tokens.drop_trajectories(missing)


def _missing(entry: LiveTrajectory, sizes: Mapping[str, int]) -> str:
    """Return which segment of a trajectory is missing, as a reason; "" if all are there."""
    for ref in (*(tokens.at for tokens in entry.tokens), *(column.at for column in entry.columns.values())):
        if sizes.get(ref.segment, 0) < ref.offset + ref.num_bytes:
            return f"{ref.segment} is on no host, or ends before byte {ref.offset + ref.num_bytes}"
    return ""


def _unneeded_segments(
    files: Sequence[SegmentFile], needed: Collection[str], *, present: Collection[str], settles_s: float
) -> list[str]:
    """Return the segments of a host that are unneeded and complete; `files` are in the order of their making."""
    newest = {part_of(file.name): file.name for file in files}
    writing = {name for label, name in newest.items() if label in present}
    return [
        file.name
        for file in files
        if file.name not in needed and file.name not in writing and file.age_s > settles_s
    ]


def _at_most(rows: Sequence[PieceRow], size: int) -> Iterable[Sequence[PieceRow]]:
    """Yield rows in parts of about `size`, with all rows of a trajectory in one part."""
    first = 0
    while first < len(rows):
        end = min(first + size, len(rows))
        while end < len(rows) and rows[end].trajectory == rows[end - 1].trajectory:
            end += 1
        yield rows[first:end]
        first = end
