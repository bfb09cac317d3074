"""Scoring of a run: finished trajectories to the stage, scores to the scheduler. Owned by the controller."""

from collections.abc import Sequence

from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import Kind, Prompt, Trajectory
from laminar_py.reward.stage import ScoringStage
from laminar_py.workers.incarnation import Incarnation
from laminar_py.workers.scorers import Scorers

BATCH = 64


class Scoring:
    """Scoring stage and its processes; at most `most` trajectories can wait for a score."""

    def __init__(self, incarnation: Incarnation, *, scheduler: TrajectoryScheduler, most: int) -> None:
        self._scorers = Scorers(incarnation)
        self._scheduler = scheduler
        self._stats = incarnation.stats
        self._timeout_s = incarnation.config.reward.timeout_s
        self._most = most
        self._stage: ScoringStage | None = None

    def spawn(self) -> None:
        """Start the processes; `start` starts what runs in them."""
        self._scorers.spawn()

    async def start(self) -> None:
        """Bring the processes up. Raises ConfigError where the reward cannot be loaded."""
        self._stage = ScoringStage(
            await self._scorers.start(),
            batch=BATCH,
            timeout_s=self._timeout_s,
            queue=self._most,
            wanted=self._scheduler.awaits_score,
            deliver=self._deliver,
            restart=self._scorers.restart,
        )

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._ready.run()

    def submit(self, trajectory: Trajectory, prompt: Prompt) -> None:
        """Take it up as soon as a scorer is free."""
        self._ready.submit(
            ScoringRequest(
                trajectory_id=trajectory.id,
                prompt=prompt.text,
                response="",
                answer=prompt.answer,
                finish_reason=trajectory.finish_reason,
                response_ids=trajectory.response_ids,
            )
        )

    @property
    def _ready(self) -> ScoringStage:
        assert self._stage is not None, "scoring is used after `start`"
        return self._stage

    async def _deliver(self, scores: Sequence[Score]) -> None:
        for score in scores:
            lifecycle = self._scheduler.book.live.get(score.trajectory_id)
            await self._scheduler.closing.on_score(score)
            if lifecycle is not None and lifecycle.kind is Kind.TRAIN and score.value is not None:
                self._stats.scored(score.value, lifecycle.length)
