"""The control plane of a run, built from its parts, in one process without sockets.

    reports -> Reports ----> WaitingQueue -> Dispatcher -> assignments
                  |  ^                ^
                  v  | lost versions  | replacements
    scores --> Closing ----> Consumption -> batches for the learner
                  ^
               Deadlines

All parts share one `Book`. `TrajectoryScheduler` is owned by the controller (or a simulator), which brings reports
and scores in and carries assignments out.
"""

import asyncio
from collections.abc import Callable, Sequence

from laminar_py.control.book import Book, ControlSettings, Phase, Recorder
from laminar_py.control.closing import Closing, Credit, Stages
from laminar_py.control.consumption import Consumption
from laminar_py.control.deadlines import Deadlines
from laminar_py.control.dispatcher import Dispatcher
from laminar_py.control.evaluation import Evaluation, Evaluations
from laminar_py.control.moves import Round
from laminar_py.control.recovery import restore
from laminar_py.control.reports import Reports
from laminar_py.control.routing import Router
from laminar_py.control.waiting import WaitingQueue
from laminar_py.ledger.recovery import Recovered
from laminar_py.records.codec import FloatArray
from laminar_py.records.protocols import Clock
from laminar_py.records.replica import Assignment, Move, ReplicaReport
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import Prompt


class TrajectoryScheduler:
    """Every trajectory's way from issue to consumption; `consumption` has the learner's end of it."""

    def __init__(
        self,
        settings: ControlSettings,
        *,
        prompt_at: Callable[[int], Prompt],
        recorder: Recorder,
        stages: Stages,
        credit: Credit,
        clock: Clock,
    ) -> None:
        self.book = book = Book(settings, recorder)
        self.views, self.moves = book.views, book.moves
        self.consumption = Consumption(book, settings.bound)
        self._router = router = Router(book)
        self._evaluations = evaluations = Evaluations(book)
        self._waiting = waiting = WaitingQueue(book, router=router, evaluations=evaluations)
        self._closing = closing = Closing(
            book,
            consumption=self.consumption,
            evaluations=evaluations,
            stages=stages,
            credit=credit,
            clock=clock,
        )
        self._reports = Reports(book, waiting=waiting, evaluations=evaluations, closing=closing)
        self._deadlines = Deadlines(book, waiting=waiting, closing=closing, clock=clock)
        self._dispatcher = Dispatcher(
            book, router=router, waiting=waiting, evaluations=evaluations, prompt_at=prompt_at
        )

    # ---- phases

    def admit(self) -> None:
        """Hand out training, and issue new groups."""
        self.book.phase = Phase.ADMITTING

    def continue_live(self) -> None:
        """Hand out what is live, and issue nothing new."""
        self.book.phase = Phase.CONTINUING

    def pause(self) -> None:
        """Hand out nothing of training, and end all moves."""
        self.book.phase = Phase.PAUSED
        self.moves.end_all()

    async def restore(self, recovered: Recovered) -> None:
        """Take up what a dead controller left; before anything else."""
        await restore(
            recovered, self.book, waiting=self._waiting, evaluations=self._evaluations, closing=self._closing
        )

    # ---- out

    def dispatch(self) -> dict[int, list[Assignment]]:
        """Assignments of this moment, by replica."""
        return self._dispatcher.dispatch()

    def for_starting(self, replica: int) -> list[Assignment]:
        """Assignments that a replica starts with: work of versions that nobody else serves, oldest first."""
        return self._dispatcher.for_starting(replica)

    def take_aborts(self) -> dict[int, list[str]]:
        """Dropped trajectories that replicas still run, by replica; each is told once."""
        return self._deadlines.take_aborts()

    def move(self, version: int, planned: Sequence[Move]) -> Round:
        """Begin what still holds of a plan among replicas that promised to keep `version`."""
        return self._dispatcher.move(version, planned)

    @property
    def has_demand(self) -> bool:
        """True where a replica that becomes free would get new prompts."""
        return self._router.num_admitted > 0

    def evaluate(self, prompts: Sequence[Prompt], version: int | None = None) -> "asyncio.Future[Evaluation]":
        """Answer `prompts` greedily under `version` (None: whatever the next idle replica serves).

        The future's result has the rewards; it fails with `EvaluationLostError` if the version is lost.
        """
        return self._evaluations.request(prompts, version)

    # ---- in

    def published(self, version: int) -> None:
        """Take in that the learner published `version`."""
        self.book.newest_version = version

    async def on_report(self, report: ReplicaReport) -> None:
        """Take in what a replica did."""
        await self._reports.on_report(report)

    async def on_replica_lost(self, replica: int) -> None:
        """Take in that a replica died: what it had keeps its stored prefix and waits for another."""
        await self._reports.on_replica_lost(replica)

    async def on_score(self, score: Score) -> None:
        """Take in a score; it may complete its group."""
        await self._closing.on_score(score)

    async def on_reference(self, trajectory_id: str, logprobs: FloatArray) -> None:
        """Take in the reference's log-probabilities [L] of a finished response."""
        await self._closing.on_reference(trajectory_id, logprobs)

    async def enforce_deadlines(self) -> None:
        """Drop what can never go on, and close groups whose stragglers are past the deadline."""
        await self._reports.drop_unreachable()
        await self._deadlines.enforce()

    def is_live(self, trajectory_id: str) -> bool:
        """True for one that is neither consumed nor dropped."""
        return trajectory_id in self.book.live

    def awaits_score(self, trajectory_id: str) -> bool:
        """True where a score would tell anything: of a live trajectory, or a counterfactual one."""
        return self.book.followed(trajectory_id) is not None
