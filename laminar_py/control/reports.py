"""Reports of replicas become events: progress, interruptions, ends, failures. `control.scheduler` owns `Reports`.

`ConsecutiveFailures` ends the run when too many trajectories fail in a row.
"""

from collections.abc import Callable, Iterable

from laminar_py.control.book import Book
from laminar_py.control.closing import Closing
from laminar_py.control.drops import LostTokens
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.segments.salvage import Known, Salvaged
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.events import Cut, Restamped
from laminar_py.records.host import Clock
from laminar_py.records.replica import Progress, ReplicaReport
from laminar_py.records.spans import clip_spans, num_turns, replace_spans
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, InterruptReason, Kind, Status

MIN_FAILURES = 32  # in a row before a run ends: an environment that fails now and then rarely fails so often
OUTAGE_S = 600.0  # for an outage of a service that environments need


class ConsecutiveFailures:
    """Counts failures since the last finished trajectory; calls `end` with a message when the run has to end.

    The run ends when at least `MIN_FAILURES` trajectories fail in a row, at least as many as a step has (`step`),
    and at least as many as are live (`in_flight`). If a trajectory finished before, the run also waits `OUTAGE_S`.
    """

    def __init__(
        self, *, step: int, in_flight: Callable[[], int], clock: Clock, end: Callable[[str], None]
    ) -> None:
        self._most = max(MIN_FAILURES, step)
        self._in_flight = in_flight
        self._clock = clock
        self._end = end
        self._count = 0
        self._since_s = 0.0
        self._any_finished = False

    def finished(self) -> None:
        """Note a finished trajectory, which resets the count."""
        self._count, self._any_finished = 0, True

    def failed(self, reason: DropReason, detail: str) -> None:
        """Count a failure; end the run if there are too many in a row."""
        now_s = self._clock.now()
        if not self._count:
            self._since_s = now_s
        self._count += 1
        waits = self._any_finished and now_s - self._since_s < OUTAGE_S
        if self._count >= max(self._most, self._in_flight()) and not waits:
            self._end(
                f"{self._count} trajectories in a row failed ({reason}), the last: {detail}; fix the cause and"
                " --resume"
            )


class Reports:
    """Turns reports into events; queues interrupted trajectories again, and sends finished ones to their group."""

    def __init__(
        self,
        book: Book,
        *,
        waiting: WaitingQueue,
        evaluations: Evaluations,
        closing: Closing,
        lost: LostTokens,
        failures: ConsecutiveFailures,
    ) -> None:
        self._book = book
        self._failures = failures
        self._lost = lost
        self._waiting = waiting
        self._evaluations = evaluations
        self._closing = closing

    async def on_report(self, report: ReplicaReport) -> None:
        """Record a replica's loaded versions, its trajectories' progress, and its free places."""
        for load in report.loads:
            self._book.record(load)
        for progress in report.progress:
            trajectory = self._book.live.get(progress.trajectory_id)
            if trajectory is not None and trajectory.accepts(progress):
                await self._on_progress(report.replica, trajectory, progress)
        for trajectory_id in report.lost:
            trajectory = self._book.live.get(trajectory_id)
            if trajectory is not None and trajectory.runs_on == report.replica:
                self._book.views.returned(report.replica, trajectory_id)
                await self._lose_version(trajectory)
        self._book.generated_tokens += report.generated
        self._book.views.reported(
            report.replica,
            version=report.status.version,
            admissible=report.admissible,
            received=report.received,
        )

    def running_on(self, replica: int) -> dict[str, Known]:
        """Return epoch and recorded length of each live trajectory that a replica runs, by id."""
        names = sorted(self._book.views.by_index[replica].in_flight)
        followed = ((name, self._book.live.get(name)) for name in names)
        return {
            name: Known(trajectory.epoch, trajectory.length)
            for name, trajectory in followed
            if trajectory is not None and trajectory.status is Status.RUNNING
        }

    async def on_replica_lost(self, replica: int, salvaged: Iterable[Salvaged] = ()) -> None:
        """Interrupt and queue all trajectories of a crashed replica, after appending `salvaged` tokens."""
        self._book.moves.forget(replica)
        salvaged_by_id = {item.trajectory_id: item for item in salvaged}
        for trajectory_id in sorted(self._book.views.forget(replica)):
            trajectory = self._book.live.get(trajectory_id)
            if trajectory is not None and trajectory.status is Status.RUNNING:
                self.restore_salvaged(trajectory, salvaged_by_id.get(trajectory_id))
                self._requeue(trajectory, "replica_crashed", self._waiting.append_displaced)

    def restore_salvaged(self, trajectory: LiveTrajectory, salvaged: Salvaged | None) -> None:
        """Append tokens that a crashed replica had stored but not reported, if there are any."""
        if salvaged is not None and salvaged.tokens.start == trajectory.length:
            self._grow(
                trajectory,
                Progress(
                    trajectory_id=trajectory.id,
                    epoch=trajectory.epoch,
                    start=trajectory.length,
                    tokens=salvaged.tokens,
                    spans=salvaged.spans,
                    generate_s=max(0.0, salvaged.used_s - trajectory.used_s),
                ),
            )

    async def drop_unreachable(self) -> None:
        """Drop waiting trajectories whose version no replica will serve again."""
        for trajectory in self._waiting.take_unreachable():
            await self._lose_version(trajectory)

    async def _on_progress(self, replica: int, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Append the new tokens; then handle an interrupt, a failure, lost tokens or the end, if reported."""
        self._grow(trajectory, progress)
        if progress.broken is not None:
            self._on_interrupt(replica, trajectory, progress.broken)
        elif progress.failure is not None:
            await self._on_failure(replica, trajectory, progress.failure, progress.detail)
        elif progress.lost:
            self._book.views.returned(replica, trajectory.id)
            await self._lost.drop_and_reissue(trajectory, DropReason.HOST_LOST, progress.detail)
        elif progress.finish_reason is not None:
            self._on_end(replica, trajectory, progress)

    def _grow(self, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Append new tokens; record `Restamped` if the engine corrected the versions of earlier tokens."""
        trajectory.here_s = progress.generate_s - progress.queue_s
        trajectory.environment_s += progress.environment_s
        if progress.tokens is not None:
            spans = clip_spans(progress.spans, progress.start)
            self._book.recorder.store_tokens(trajectory.id, progress.tokens, spans)
        reaches_back = bool(progress.spans) and progress.spans[0].start < progress.start
        if reaches_back:
            spans = replace_spans(trajectory.token_spans, progress.spans)
            if spans != trajectory.token_spans:
                self._book.record(Restamped(trajectory.id, spans))
        begun = trajectory.last_version if progress.begun is None else progress.begun
        if trajectory.kind is Kind.EVAL and begun is not None:
            self._evaluations.runs_under(trajectory, begun)

    def _on_interrupt(self, replica: int, trajectory: LiveTrajectory, broken: InterruptReason) -> None:
        """Record that a stream was cut off, or paused for new weights and resumed on the same replica."""
        if broken is InterruptReason.CUT:
            self._book.record(trajectory.cut_off())
        else:
            self._book.record(trajectory.interrupted("new_weights"))
            self._book.record(trajectory.resumed(replica))

    async def _on_failure(self, replica: int, trajectory: LiveTrajectory, reason: DropReason, detail: str) -> None:
        """Drop a trajectory whose request the engine refuses, or whose environment failed."""
        self._book.views.returned(replica, trajectory.id)
        self._book.moves.ends(trajectory.id)
        self._book.drop([trajectory], reason, detail)
        self._failures.failed(reason, detail)
        await self._closing.settled(trajectory)

    def _on_end(self, replica: int, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Finish a trajectory whose stream ended, or queue it again if the replica handed it back."""
        self._book.views.returned(replica, trajectory.id)
        if progress.finish_reason is FinishReason.ABORT:
            moving = self._book.moves.destination(trajectory.id) is not None
            self._requeue(trajectory, "repacked" if moving else "returned", self._waiting.append)
        else:
            self._book.moves.ends(trajectory.id)
            self._finish(trajectory, progress)

    def _requeue(self, trajectory: LiveTrajectory, reason: str, queue: Callable[[LiveTrajectory], None]) -> None:
        """Record an interruption, and queue the trajectory for another replica."""
        self._book.record(trajectory.interrupted(reason))
        queue(trajectory)

    def _finish(self, trajectory: LiveTrajectory, progress: Progress) -> None:
        """Record the cap that cut a response, if any, and its end; then send it to scoring."""
        settings = self._book.settings
        if progress.cut is Cap.SECONDS:
            self._book.record(Cut(trajectory.id, Cap.SECONDS, settings.max_seconds or 0.0))
        elif progress.cut is Cap.TURNS:
            self._book.record(Cut(trajectory.id, Cap.TURNS, num_turns(trajectory.token_spans)))
        elif progress.finish_reason is FinishReason.LENGTH:
            self._book.record(Cut(trajectory.id, Cap.TOKENS, self._book.sampling(trajectory).max_new_tokens))
        self._book.record(trajectory.finished(progress))
        self._failures.finished()
        self._closing.finished(trajectory)

    async def _lose_version(self, trajectory: LiveTrajectory) -> None:
        """Drop a trajectory whose version no replica will serve again, and issue its prompt again.

        If a resumed run publishes the version again, an evaluation's member stays queued, but its pass fails now.
        """
        if self._book.settings.versions_return and trajectory.kind is Kind.EVAL:
            self._requeue(trajectory, "version_lost", self._waiting.append)
            self._evaluations.give_up(trajectory)
            return
        await self._lost.drop_and_reissue(
            trajectory, DropReason.VERSION_LOST, f"version {self._waiting.pin(trajectory)}"
        )
