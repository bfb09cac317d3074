"""The control plane of a run, built from its parts, in one process without sockets.

    reports -> Reports ----> WaitingQueue -> Dispatcher -> assignments
                  |  ^                ^
                  v  | lost versions  | replacements
    scores --> Closing ----> Consumption -> batches for the learner
                  ^
          Deadlines, LostTokens

All parts share one `Book`. The controller (or a simulator) owns the `TrajectoryScheduler`, passes reports and
scores to it, and sends its assignments to replicas.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.section import ConfigError
from laminar_py.control.book import Book, Phase, Recorder
from laminar_py.control.closing import Closing, Stages
from laminar_py.control.consumption import Consumption, StepBatch
from laminar_py.control.dispatcher import Dispatcher
from laminar_py.control.drops import Deadlines, LostTokens
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.groups import Credit, Group
from laminar_py.control.reports import ConsecutiveFailures, Reports
from laminar_py.control.settings import ControlSettings
from laminar_py.control.waiting import Router, WaitingQueue
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.segments.salvage import Salvaged
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.host import Clock
from laminar_py.records.scoring import GroupRewards
from laminar_py.records.trajectory import Kind, Prompt, Status


def check_scored(live: Iterable[LiveTrajectory], algorithm: AlgorithmConfig) -> None:
    """Raise `ConfigError` if a training response was scored without a column that the algorithm needs."""
    for entry in live:
        for column in algorithm.scored_columns if entry.kind is Kind.TRAIN and entry.reward is not None else ():
            own = entry.columns.get(column.name)
            if own is None or own.dtype is not column.dtype:
                raise ConfigError(
                    f"algorithm.name={algorithm.name}: needs the column {column.name!r} in {column.dtype}, without"
                    f" which {entry.id} was scored; resume with the algorithm of before, or start a run of its own"
                )


async def restore(
    recovered: Recovered,
    book: Book,
    *,
    waiting: WaitingQueue,
    evaluations: Evaluations,
    closing: Closing,
    reports: Reports,
    salvaged: Iterable[Salvaged],
) -> None:
    """Fill an empty book with the trajectories that were live, and append tokens `salvaged` from their replicas.

    An evaluation that the resumed run does not request again is dropped.
    """
    more = {one.trajectory_id: one for one in salvaged}
    book.next_prompt, book.ages = recovered.next_prompt, recovered.ages
    book.refilled, book.rewards = list(recovered.refilled), recovered.rewards
    evaluations.next_index = max(evaluations.next_index, recovered.next_evaluation)
    for trajectory in recovered.live:
        book.recorder.machine.adopt(trajectory)
        if trajectory.kind is Kind.EVAL and not evaluations.restore_member(trajectory):
            evaluations.abandon(trajectory)
            continue
        if trajectory.kind is Kind.TRAIN:
            next_sample = recovered.next_sample[trajectory.group_id]
            group = book.groups.setdefault(
                trajectory.group_id,
                Group(id=trajectory.group_id, prompt=trajectory.prompt, next_sample=next_sample),
            )
            group.members[trajectory.id] = trajectory
        if trajectory.status is Status.RUNNING:
            reports.restore_salvaged(trajectory, more.get(trajectory.id))
            book.record(trajectory.interrupted("controller_crashed"))
        if trajectory.status in (Status.QUEUED, Status.INTERRUPTED):
            waiting.append(trajectory)
        else:
            closing.restore_member(trajectory)
    for group in list(book.groups.values()):
        await closing.restore(group)


class TrajectoryScheduler:
    """Moves every trajectory from issue to consumption.

    Callers use its parts directly: `reports` for a replica's report, `closing` for a score, `dispatcher` for
    assignments, `consumption` for batches, `evaluations` for passes over held-out problems.
    """

    def __init__(
        self,
        settings: ControlSettings,
        *,
        prompt_at: Callable[[int], Prompt],
        on_rewards: Callable[[GroupRewards], None] = lambda rewards: None,
        on_failing: Callable[[str], None] = lambda message: None,
        recorder: Recorder,
        stages: Stages,
        credit: Credit,
        clock: Clock,
    ) -> None:
        self.book = book = Book(settings, recorder)
        self.views, self.moves = book.views, book.moves
        self.consumption = Consumption(book, settings.bound)
        self.router = router = Router(book)
        self.evaluations = evaluations = Evaluations(book)
        self._waiting = waiting = WaitingQueue(book, router=router, evaluations=evaluations)
        self.closing = closing = Closing(
            book,
            consumption=self.consumption,
            evaluations=evaluations,
            stages=stages,
            credit=credit,
            clock=clock,
            on_rewards=on_rewards,
        )
        self.lost_tokens = lost_tokens = LostTokens(
            book, waiting=waiting, evaluations=evaluations, consumption=self.consumption, closing=closing
        )
        step = settings.admission.batch * settings.group_size
        failures = ConsecutiveFailures(step=step, in_flight=lambda: len(book.live), clock=clock, end=on_failing)
        self.reports = Reports(
            book, waiting=waiting, evaluations=evaluations, closing=closing, lost=lost_tokens, failures=failures
        )
        self.deadlines = Deadlines(book, waiting=waiting, closing=closing, clock=clock)
        self.dispatcher = Dispatcher(
            book, router=router, waiting=waiting, evaluations=evaluations, prompt_at=prompt_at
        )

    # ---- phases

    def admit(self) -> None:
        """Let replicas get training work, new groups included."""
        self.book.phase = Phase.ADMITTING

    def continue_live(self) -> None:
        """Let replicas get live trajectories, but issue no new group."""
        self.book.phase = Phase.CONTINUING

    def pause(self) -> None:
        """Give replicas no training work, and end all moves."""
        self.book.phase = Phase.PAUSED
        self.moves.end_all()

    def end(self) -> None:
        """Give replicas no more work, and end all moves: the run stops, and a resume finishes its evaluations."""
        self.book.phase = Phase.ENDING
        self.moves.end_all()

    def await_restore(self) -> None:
        """Give replicas nothing until `restore`: a trajectory that is requested again may already be live."""
        self.book.phase = Phase.RESTORING

    async def restore(self, recovered: Recovered, *, salvaged: Iterable[Salvaged] = ()) -> None:
        """Continue a crashed controller's trajectories, with `salvaged` tokens of replicas; allow evaluations."""
        await restore(
            recovered,
            self.book,
            waiting=self._waiting,
            evaluations=self.evaluations,
            closing=self.closing,
            reports=self.reports,
            salvaged=salvaged,
        )
        if self.book.phase is Phase.RESTORING:
            self.book.phase = Phase.PAUSED

    # ---- the fleet

    def join(self, replica: int) -> None:
        """Add a new replica, or keep a replica that was about to leave."""
        self.views.join(replica)

    def leave(self, replica: int) -> None:
        """Give a replica no new work; trajectories that were to move there stay, or move elsewhere."""
        self.views.leave(replica)
        self.moves.leave(replica)

    def resize(self, *, capacity: int) -> None:
        """Set the number of live groups to the capacity of a fleet that grew or shrank."""
        settings = self.book.settings
        admission = replace(settings.admission, capacity=capacity)
        self.book.settings = replace(settings, admission=admission)

    # ---- between the parts

    async def next_batch(self, *, groups: int, version: int) -> StepBatch:
        """Return the next batch for a learner at `version`.

        A response whose score is late is dropped, so that its group still makes the step.
        """
        last_call = self.deadlines.drop_unscored
        return await self.consumption.next_batch(groups=groups, version=version, last_call=last_call)

    def published(self, version: int) -> None:
        """Note that the learner published `version`."""
        self.book.newest_version = version
        self.book.ages.record_version(version)

    async def enforce_deadlines(self) -> None:
        """Drop trajectories that no replica can continue; close groups whose stragglers are past the deadline."""
        await self.reports.drop_unreachable()
        await self.deadlines.enforce()

    def is_live(self, trajectory_id: str) -> bool:
        """Return whether a trajectory is neither consumed nor dropped."""
        return trajectory_id in self.book.live
