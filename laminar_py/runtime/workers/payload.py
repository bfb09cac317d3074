"""Payload of a run: which host has which segment, what is saved of the dead, archived and deleted.

Owned by the controller, which decides by references and sees no token. Parts write to segments under a label that
they are started with, so the name of a segment says which process wrote it, and on which host. Invariant: a
segment is deleted only when no reference leads to it, on record or in memory, before and after it was looked for,
its writer has gone on to another one, and nobody is about to tell of it.
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
from laminar_py.ledger.segments.folder import SegmentFile, discard, labels_here, segment_files, segments_here
from laminar_py.ledger.segments.local import drop_local, is_local, keep_here, lead_to_kept
from laminar_py.ledger.segments.salvage import Known, Salvage, Salvaged, SalvageRequest, salvage
from laminar_py.ledger.segments.writer import part_of
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.codec import decode, encode
from laminar_py.records.pieces import PieceRef
from laminar_py.records.trajectory import Status
from laminar_py.runtime.cluster.backend import on_node
from laminar_py.runtime.cluster.errors import NoAnswerError, PartDiedError, RemoteCallError, UnwritableError
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.stores import Stores

log = logging.getLogger(__name__)

SETTLES_S = 60.0  # a segment that got nothing for so long gets no more, and is told of, but the newest of a part
ROWS_AT_ONCE = 50_000  # references of one file of the archive
ROWS_APART = 10_000  # of which a file is not written in the controller's own process
ANSWER_S = 60.0  # for a host to look at its folder, or to delete there; a disk that stands still takes longer
WRITE_S = 600.0  # for a host to write what it has to the archive, or to a new segment
KEEP_S = 3600.0  # for a host to copy what is kept to the run's folder, at the end


class PayloadHosts:
    """Hosts of a run's segments, by the labels of the parts that write them."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.key = secrets.token_hex(32)
        self.stores = Stores(incarnation, key=self.key)
        self._incarnation = incarnation
        self._placement = incarnation.placement
        self._ledger = incarnation.ledger
        self._run = incarnation.run
        self._folder = str(incarnation.run.segments)
        self._nodes: dict[str, str] = {}  # Ray node of each label
        self._present: dict[str, str] = {}  # label of each part that runs, or ran last
        self._silent: set[str] = set()  # nodes that answered too late the last time
        self._losing: dict[str, asyncio.Task[None]] = {}  # by the node that is gone; it has not begun
        self._one_loss = asyncio.Lock()
        self._starts = count()

    # ---- where things are

    async def label(self, part: str, node: str | None) -> str:
        """A label for a part that starts on a node, e.g. `replica-3-2-17`: the 17th start of incarnation 2.

        Others can read what it writes, since the store of its host is up. Raises PartDiedError if that is gone.
        """
        if self._placement.spread and node is not None:
            await self.stores.up(node)
        return self._name(part, node or self._here)

    def stores_for(self, refs: Iterable[PieceRef], node: str | None) -> dict[str, str]:
        """Stores, by name, of those segments that a reader on this node has not got itself."""
        if not self._placement.spread:
            return {}
        elsewhere = {ref.segment for ref in refs if self._node_of(ref.segment) != (node or self._here)}
        return {segment: self.stores.name(self._node_of(segment)) for segment in elsewhere}

    async def find(self, recovered: Recovered) -> dict[str, str]:
        """Look for the segments of earlier incarnations; what is gone of live trajectories, by their ids."""
        there: dict[str, int] = {}
        for node, files in (await self._files()).items():
            for file in files:
                there.setdefault(file.name, file.num_bytes)
                self._nodes.setdefault(part_of(file.name), node)
        for node in set(self._nodes.values()):
            self.stores.need(node)
        return {entry.id: why for entry in recovered.live if (why := _missing(entry, there))}

    # ---- after deaths

    async def salvage(self, label: str, running: Mapping[str, Known]) -> Salvage:
        """Tokens of these that a dead part had and nobody was told; none where its host does not answer."""
        return await self._salvage(self._nodes[label], f"{label}.*", running, part=f"salvage-{label}")

    async def salvage_all(self, live: Sequence[LiveTrajectory]) -> list[Salvaged]:
        """Tokens of all that ran when the last controller died, likewise.

        None where the run went back to a copy of its ledger: journals may be of what it did after that.
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
                self._salvage(node, "*", running, part=f"salvage-all-{place}")
                for place, node in enumerate(self._all_nodes)
            )
        )
        return [one for answer in answers for one in answer.found]

    async def salvaged(self, label: str, answer: Salvage) -> None:
        """Delete the journals of a dead part, once what they had is on record."""
        self._present.pop(f"salvage-{label}", None)
        if answer.journals:
            await self._ledger.commit()
            await self._discard(self._nodes[label], answer.journals)

    async def is_lost(self, label: str) -> bool:
        """True where the host of a dead part is gone as well, and with it what the part wrote.

        A folder that hosts share outlives each of them: the controller's host takes over what it sees there.
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
        """Drop what only the host of a part had; parts that died with it share one that began after they asked."""
        node = self._nodes[label]
        losing = self._losing.get(node)
        if losing is None:
            losing = asyncio.create_task(self._lose_host(node, scheduler), name=f"lose-{node}")
            self._losing[node] = losing
        await asyncio.shield(losing)

    async def _lose_host(self, node: str, scheduler: TrajectoryScheduler) -> None:
        async with self._one_loss:
            del self._losing[node]  # who asks from now on may know of more
            known = await self._needed(scheduler)
            gone = {segment for segment in known if self._node_of(segment) == node}
            await self._lose(gone, f"host {self._placement.ip(node)} is gone", scheduler)

    # ---- what nobody needs any more

    async def archive(self, step: int, scheduler: TrajectoryScheduler) -> int:
        """Move to the archive what no rollback to `step` or later can need; the number of trajectories moved."""
        by_node: dict[str, list[PieceRow]] = {}
        for row in await self._ledger.settled_pieces(step):
            by_node.setdefault(self._node_of(row.segment), []).append(row)
        files = [(node, rows) for node, mine in by_node.items() for rows in _at_most(mine, ROWS_AT_ONCE)]
        seq = self._ledger.seq
        answers = await asyncio.gather(
            *(self._archive(node, file_name(seq, place), rows) for place, (node, rows) in enumerate(files))
        )
        written = [answer for answer in answers if answer is not None]
        unreadable = {number: why for answer in written for number, why in answer.unreadable.items()}
        asked = [
            (answer, {row.trajectory for row in rows}) for answer, (_, rows) in zip(answers, files, strict=True)
        ]
        moved = set[int]().union(*(numbers for answer, numbers in asked if answer is not None))
        moved = moved.difference(unreadable, *(numbers for answer, numbers in asked if answer is None))
        await self._ledger.archived([one.event for one in written], sorted(moved))
        if unreadable:
            first = next(iter(unreadable.values()))
            log.error("pieces of %d trajectories cannot be read: %s", len(unreadable), first)
            await self._ledger.record_lost_pieces(unreadable.keys(), first)
        await self._tidy(scheduler, settles_s=SETTLES_S)
        return len(moved)

    async def close(self, scheduler: TrajectoryScheduler) -> None:
        """Delete journals, and look for what is gone: all that ran has ended, and was told.

        What hosts have on disks of their own is in the run's folder after that. Raises UnwritableError.
        """
        await self._discard_journals()
        self._present.clear()
        await self._tidy(scheduler, settles_s=-math.inf)
        if is_local(self._run.segments):
            await self._keep(scheduler)

    async def _tidy(self, scheduler: TrajectoryScheduler, *, settles_s: float) -> None:
        """Delete segments to which no reference leads; what is gone of others is lost.

        Replicas go on telling of segments while hosts are asked for theirs.
        """
        before = await self._needed(scheduler)
        there = await self._files()
        after = await self._needed(scheduler)
        known = {file.name for files in there.values() for file in files}
        missing = {segment: self._node_of(segment) for segment in (before & after) - known}
        gone = [name for name, node in missing.items() if node in there or not self._placement.is_alive(node)]
        await self._lose(gone, f"segment {min(gone, default='')} is gone from its host", scheduler)
        present = set(self._present.values())
        idle = {
            node: _ended(files, before | after, present=present, settles_s=settles_s)
            for node, files in there.items()
        }
        await asyncio.gather(*(self._discard(node, segment_files(names)) for node, names in idle.items()))

    async def _keep(self, scheduler: TrajectoryScheduler) -> None:
        """Copy what is needed from the hosts to the run's folder; what none of them has by now is lost."""
        needed, folder = await self._needed(scheduler), self._run.segments
        names = encode(segment_files(needed))
        await asyncio.gather(*(self._kept(node, names) for node in self._all_nodes))
        place = str(folder.readlink())
        await asyncio.to_thread(lead_to_kept, folder, segment_files(needed))
        there = {file.name for file in decode(list[SegmentFile], segments_here(self._folder))}
        gone = needed - there
        await self._lose(gone, f"the host of segment {min(gone, default='')} is gone", scheduler)
        await asyncio.gather(
            *(self._on(node, drop_local, place) for node in self._all_nodes if node not in self._silent)
        )

    async def _kept(self, node: str, names: bytes) -> None:
        """Have a host copy its segments. Raises UnwritableError, `OSError`; a host that is gone has none."""
        try:
            async with asyncio.timeout(KEEP_S) as limit:
                await on_node(node, keep_here, self._folder, names)
        except RemoteCallError as error:
            reason = f"segments of {self._placement.ip(node)}: {error}"
            raise UnwritableError(reason) from None
        except TimeoutError:
            if not limit.expired():
                raise  # of its disk
            self._silent.add(node)
            log.error("no segments from %s in %.0f s; they stay there", self._placement.ip(node), KEEP_S)
        except NoAnswerError as error:
            log.warning("no segments from %s: %s", self._placement.ip(node), error)

    async def _needed(self, scheduler: TrajectoryScheduler) -> set[str]:
        return await self._ledger.segments() | scheduler.book.segments()

    async def _lose(self, segments: Collection[str], reason: str, scheduler: TrajectoryScheduler) -> None:
        """Put on record that these segments are gone, and drop what is live of them."""
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
        """The controller's node, where all else may have been once, and all others that are alive."""
        return self._placement.alive if self._placement.spread else [self._here]

    def _name(self, part: str, node: str) -> str:
        label = f"{part}-{self._incarnation.number}-{next(self._starts)}"
        self._nodes[label], self._present[part] = node, label
        return label

    def _node_of(self, segment: str) -> str:
        return self._nodes.get(part_of(segment), self._here)

    async def _files(self) -> dict[str, list[SegmentFile]]:
        """Segments of each host that answers; all are asked at once, since each has a process to start for it."""
        nodes = self._all_nodes
        answers = await asyncio.gather(*(self._on(node, segments_here, self._folder) for node in nodes))
        found = zip(nodes, answers, strict=True)
        return {node: decode(list[SegmentFile], answer) for node, answer in found if answer is not None}

    async def _salvage(self, node: str, pattern: str, running: Mapping[str, Known], *, part: str) -> Salvage:
        """Tokens in the journals of a host; a store is begun there only for what was found."""
        nothing = Salvage([], [])
        if not running:
            return nothing
        request = SalvageRequest(pattern, self._name(part, node), dict(running))
        answer = await self._on(node, salvage, self._folder, encode(request), limit_s=WRITE_S)
        found = nothing if answer is None else decode(Salvage, answer)
        if found.found and self._placement.spread:
            try:
                await self.stores.up(node)
            except PartDiedError:
                return nothing
        return found

    async def _archive(self, node: str, name: str, rows: Sequence[PieceRow]) -> ArchiveAnswer | None:
        request = ArchiveRequest(str(self._incarnation.run.path), name, list(rows))
        if node in self._silent:
            return None  # asked again once it has answered something small
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
    ) -> bytes | None:
        """Answer of a function on a host within `limit_s`, ANSWER_S if None.

        None where the host is gone, cannot do it, or does not answer in time.
        """
        limit_s = ANSWER_S if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await on_node(node, function, *arguments, apart=apart)
        except TimeoutError:
            self._silent.add(node)
            log.error("%s on %s: no answer in %.0f s", function.__name__, self._placement.ip(node), limit_s)
        except (RemoteCallError, OSError) as error:
            log.error("%s on %s: %s", function.__name__, self._placement.ip(node), error)
        except NoAnswerError as error:
            log.warning("%s: no answer from %s: %s", function.__name__, self._placement.ip(node), error)
        else:
            self._silent.discard(node)
            return answer
        return None


async def take_up(recovered: Recovered, payload: PayloadHosts, scheduler: TrajectoryScheduler) -> None:
    """Have the scheduler go on with what a dead controller left, but for what is gone meanwhile."""
    gone = await payload.find(recovered)
    await scheduler.restore(recovered, salvaged=await payload.salvage_all(recovered.live))
    await scheduler.lost_tokens.drop_trajectories(gone)


def _missing(entry: LiveTrajectory, there: Mapping[str, int]) -> str:
    """Name of what is gone of a trajectory; "" where all is there."""
    for ref in (*(one.at for one in entry.tokens), *(column.at for column in entry.columns.values())):
        if there.get(ref.segment, 0) < ref.offset + ref.num_bytes:
            return f"{ref.segment} is on no host, or ends before byte {ref.offset + ref.num_bytes}"
    return ""


def _ended(
    files: Sequence[SegmentFile], needed: Collection[str], *, present: Collection[str], settles_s: float
) -> list[str]:
    """Segments of one host that nobody needs and that get no more; files are in the order of their making."""
    newest = {part_of(file.name): file.name for file in files}
    writing = {name for label, name in newest.items() if label in present}
    return [
        file.name
        for file in files
        if file.name not in needed and file.name not in writing and file.age_s > settles_s
    ]


def _at_most(rows: Sequence[PieceRow], size: int) -> Iterable[Sequence[PieceRow]]:
    """Rows in parts of about a size, each trajectory whole in one of them."""
    first = 0
    while first < len(rows):
        end = min(first + size, len(rows))
        while end < len(rows) and rows[end].trajectory == rows[end - 1].trajectory:
            end += 1
        yield rows[first:end]
        first = end
