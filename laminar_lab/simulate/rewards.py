"""Rewards of a simulation: scorers give each response a random score after a random time.

Made by `simulate.run`. Scores are drawn in the order in which responses end.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from laminar_lab.emulation.settings import emulation_of
from laminar_lab.simulate.figures import EndedResponse
from laminar_py.config import RunConfig
from laminar_py.control import TrajectoryScheduler
from laminar_py.observe import Stats
from laminar_py.records.events import AnyEvent, Dropped, Issued
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import FinishReason, TrajectoryRef


class _Scoring(NamedTuple):
    """The coming score of a response with `length` tokens."""

    score: Score
    length: int
    cut: bool  # a cap ended the response


class SimulatedRewards:
    """Scores of responses. `on_event` receives every event of the run, and measures latencies."""

    def __init__(self, config: RunConfig, stats: Stats) -> None:
        self.ended: list[EndedResponse] = []
        self.num_events = 0
        self.num_open = 0  # responses without a score yet
        self._closed = False
        self._settings, self._stats = emulation_of(config).simulation, stats
        self._random = random.Random(config.seed)
        self._loop = asyncio.get_running_loop()
        self._issued: dict[str, float] = {}  # when, on the loop's clock
        scorers = emulation_of(config).simulation.scorers
        # without a limit, a scorer for each live response; the record divides the scorers among reward workers
        self._scorers_per_worker = (config.capacity if scorers is None else scorers) / config.reward.workers
        self._free = math.inf if scorers is None else scorers
        self._waiting: deque[_Scoring] = deque()  # at most `config.capacity`, as the next
        self._scored: asyncio.Queue[_Scoring] = asyncio.Queue()

    def connect(self, scheduler: TrajectoryScheduler, *, wake: Callable[[], None]) -> None:
        """Pass scores to a scheduler from now on; `wake` makes the fleet ask for more work."""
        self._scheduler, self._wake = scheduler, wake

    async def run(self) -> None:
        """Pass scores on when they are due, until cancelled."""
        while True:
            one = await self._scored.get()
            if not self._closed:
                await self._scheduler.incoming.on_score(one.score)
                self._stats.add_score(one.score.value or 0.0, (), one.length, cut=one.cut)
            self.num_open -= 1
            self._free += 1
            self._start_scoring()
            self._wake()  # the last score of a batch can free room for new trajectories

    def close(self) -> None:
        """Drop all further scores."""
        self._closed = True

    def on_event(self, event: AnyEvent) -> None:
        """Count events, and note when each live training trajectory was issued."""
        self.num_events += 1
        if type(event) is Issued:  # `type` is fast, and event classes have no subclasses
            self._issued[event.trajectory_id] = self._loop.time()
        elif type(event) is Dropped:
            self._issued.pop(event.trajectory_id, None)

    def score_response(self, trajectory: TrajectoryRef, *, version: int) -> None:
        """Start to score a response; `version` is the learner's newest."""
        if trajectory.id in self._issued:  # else the scheduler has dropped it
            latency_s = self._loop.time() - self._issued.pop(trajectory.id)
            age = version - trajectory.oldest_version
            self.ended.append(EndedResponse(self._stats.rl_s, latency_s, age))
        takes_s = self._settings.reward_median_s * self._random.lognormvariate(0.0, self._settings.reward_sigma)
        value = float(self._random.random() < self._settings.solved)
        score = Score(
            trajectory_id=trajectory.id, value=value, elapsed_s=takes_s, at_once=self._scorers_per_worker
        )
        self.num_open += 1
        cut = trajectory.finish_reason is FinishReason.LENGTH
        self._waiting.append(_Scoring(score, trajectory.length, cut))
        self._start_scoring()

    def _start_scoring(self) -> None:
        """Give waiting responses to free scorers, first come first served."""
        while self._waiting and self._free:
            one = self._waiting.popleft()
            if not self._scheduler.is_live(one.score.trajectory_id):  # a deadline has dropped it
                self.num_open -= 1
                continue
            self._free -= 1
            self._loop.call_later(one.score.elapsed_s, self._scored.put_nowait, one)
