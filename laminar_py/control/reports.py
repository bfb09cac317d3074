"""Reports of replicas on their way in: progress, interruptions, ends, losses. Owned by `control.scheduler`.

Every change of a trajectory goes through its `Lifecycle`.
"""

from collections.abc import Callable, Iterable

from laminar_py.control.book import Book
from laminar_py.control.closing import Closing
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.failing import Failing
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.control.losses import Losses
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.segments.salvage import Known, Salvaged
from laminar_py.records.events import Cut, VersionLoaded
from laminar_py.records.replica import Progress, ReplicaReport
from laminar_py.records.spans import clip_spans, num_turns
from laminar_py.records.trajectory import Break, Cap, DropReason, FinishReason, Kind, Status

REPLICA_DIED, HOST_LOST = "replica_died", "host_lost"  # reasons of an interruption


class Reports:
    """Takes in what replicas did; whatever goes on elsewhere is queued, whatever finished goes on to its group."""

    def __init__(
        self,
        book: Book,
        *,
        waiting: WaitingQueue,
        evaluations: Evaluations,
        closing: Closing,
        losses: Losses,
        failing: Failing,
    ) -> None:
        self._book = book
        self._failing = failing
        self._losses = losses
        self._waiting = waiting
        self._evaluations = evaluations
        self._closing = closing

    async def on_report(self, report: ReplicaReport) -> None:
        """Take in what a replica did."""
        for load in report.loads:
            self._book.record(
                VersionLoaded(
                    replica=report.replica,
                    version=load.version,
                    digest=load.digest,
                    elapsed_s=load.elapsed_s,
                    checksum=load.checksum,
                )
            )
        for progress in report.progress:
            lifecycle = self._book.live.get(progress.trajectory_id)
            if lifecycle is not None and lifecycle.accepts(progress):
                await self._on_progress(report.replica, lifecycle, progress)
        for trajectory_id in report.lost:
            lifecycle = self._book.live.get(trajectory_id)
            if lifecycle is not None and lifecycle.replica == report.replica:
                self._book.views.returned(report.replica, trajectory_id)
                await self._lose_version(lifecycle)
        self._book.generated_tokens += report.generated
        self._book.views.reported(
            report.replica,
            version=report.status.version,
            admissible=report.admissible,
            received=report.received,
        )

    def running_on(self, replica: int) -> dict[str, Known]:
        """Live trajectories that a replica has, and how much of each is on record."""
        names = sorted(self._book.views.by_index[replica].in_flight)
        followed = ((name, self._book.live.get(name)) for name in names)
        return {
            name: Known(lifecycle.epoch, lifecycle.length)
            for name, lifecycle in followed
            if lifecycle is not None and lifecycle.status is Status.RUNNING
        }

    async def on_replica_lost(self, replica: int, salvaged: Iterable[Salvaged] = (), *, reason: str) -> None:
        """Interrupt all that a dead replica had, with what was `salvaged`; each waits for another replica.

        `reason` is `replica_died`, or `host_lost` where nothing can be salvaged.
        """
        self._book.moves.forget(replica)
        more = {one.trajectory_id: one for one in salvaged}
        for trajectory_id in sorted(self._book.views.forget(replica)):
            lifecycle = self._book.live.get(trajectory_id)
            if lifecycle is not None and lifecycle.status is Status.RUNNING:
                self.take_over(lifecycle, more.get(trajectory_id))
                self._requeue(lifecycle, reason, self._waiting.append_displaced)

    def take_over(self, lifecycle: Lifecycle, salvaged: Salvaged | None) -> None:
        """Append what a dead replica had stored of a trajectory and not told, if anything."""
        if salvaged is not None and salvaged.tokens.start == lifecycle.length:
            self._grow(
                lifecycle,
                Progress(
                    trajectory_id=lifecycle.id,
                    epoch=lifecycle.epoch,
                    start=lifecycle.length,
                    tokens=salvaged.tokens,
                    spans=salvaged.spans,
                    generate_s=max(0.0, salvaged.used_s - lifecycle.used_s),
                ),
            )

    async def drop_unreachable(self) -> None:
        """Drop waiting trajectories that can go on nowhere any more."""
        for lifecycle in self._waiting.take_unreachable():
            await self._lose_version(lifecycle)

    async def _on_progress(self, replica: int, lifecycle: Lifecycle, progress: Progress) -> None:
        self._grow(lifecycle, progress)
        if progress.broken is not None:
            self._on_break(replica, lifecycle, progress.broken)
        elif progress.failure is not None:
            await self._on_failure(replica, lifecycle, progress.failure, progress.detail)
        elif progress.lost:
            self._book.views.returned(replica, lifecycle.id)
            await self._losses.begin_anew(lifecycle, DropReason.HOST_LOST, progress.detail)
        elif progress.finish_reason is not None:
            self._on_end(replica, lifecycle, progress)

    def _grow(self, lifecycle: Lifecycle, progress: Progress) -> None:
        """Append new tokens, in memory and on record."""
        restamped = lifecycle.grow(progress)
        begun = lifecycle.version if progress.begun is None else progress.begun
        if lifecycle.kind is Kind.EVAL and begun is not None:
            self._evaluations.runs_under(lifecycle, begun)
        if progress.tokens is not None:
            spans = clip_spans(progress.spans, progress.start)
            self._book.recorder.store_tokens(lifecycle.id, progress.tokens, spans)
        if restamped is not None:
            self._book.record(restamped)

    def _on_break(self, replica: int, lifecycle: Lifecycle, broken: Break) -> None:
        """Note that a stream broke off, or was interrupted for new weights and goes on where it is."""
        if broken is Break.CUT:
            self._book.record(lifecycle.cut_off())
        else:
            self._book.record(lifecycle.interrupt("new_weights"))
            self._book.record(lifecycle.resume(replica))

    async def _on_failure(self, replica: int, lifecycle: Lifecycle, reason: DropReason, detail: str) -> None:
        """Drop a trajectory whose request the engine never takes, or whose environment failed."""
        self._book.views.returned(replica, lifecycle.id)
        self._book.moves.ends(lifecycle.id)
        self._book.drop([lifecycle], reason, detail)
        self._failing.failed(reason, detail)
        await self._closing.settled(lifecycle)

    def _on_end(self, replica: int, lifecycle: Lifecycle, progress: Progress) -> None:
        """Take in that a stream is over: the trajectory is finished, or handed back."""
        self._book.views.returned(replica, lifecycle.id)
        if progress.finish_reason is FinishReason.ABORT:
            moving = self._book.moves.destination(lifecycle.id) is not None
            self._requeue(lifecycle, "repacked" if moving else "returned", self._waiting.append)
        else:
            self._book.moves.ends(lifecycle.id)
            self._finish(lifecycle, progress)

    def _requeue(self, lifecycle: Lifecycle, reason: str, queue: Callable[[Lifecycle], None]) -> None:
        """Interrupt a trajectory for another replica to take up."""
        self._book.record(lifecycle.interrupt(reason))
        queue(lifecycle)

    def _finish(self, lifecycle: Lifecycle, progress: Progress) -> None:
        settings = self._book.settings
        if progress.cut is Cap.SECONDS:
            self._book.record(Cut(lifecycle.id, Cap.SECONDS, settings.max_seconds or 0.0))
        elif progress.cut is Cap.TURNS:
            self._book.record(Cut(lifecycle.id, Cap.TURNS, num_turns(lifecycle.spans)))
        elif progress.finish_reason is FinishReason.LENGTH:
            self._book.record(Cut(lifecycle.id, Cap.TOKENS, lifecycle.sampling.max_new_tokens))
        self._book.record(lifecycle.finish(progress))
        self._failing.finished()
        self._closing.finished(lifecycle)

    async def _lose_version(self, lifecycle: Lifecycle) -> None:
        """Drop a trajectory that can go on under no version it knows, and issue its prompt anew.

        Where versions return it is kept for whoever resumes, and its evaluation ends here.
        """
        if self._book.settings.versions_return and lifecycle.kind is Kind.EVAL:
            self._requeue(lifecycle, "version_lost", self._waiting.append)
            self._evaluations.give_up(lifecycle)
            return
        await self._losses.begin_anew(
            lifecycle, DropReason.VERSION_LOST, f"version {self._waiting.pin(lifecycle)}"
        )
