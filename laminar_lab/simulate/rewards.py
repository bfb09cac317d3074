"""Rewards of a simulation: a score for each response, after a time that is drawn, by as many scorers as there are.

Owned by `simulate.run`. Scores are drawn in the order in which responses end.
"""

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from laminar_lab.simulate.figures import EndedResponse
from laminar_py.config import RunConfig
from laminar_py.control import TrajectoryScheduler
from laminar_py.observe import Stats
from laminar_py.records.events import AnyEvent, Dropped, Issued
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import FinishedTrajectory


class _Scoring(NamedTuple):
    """Score of a response of so many tokens, once a scorer has worked on it."""

    score: Score
    length: int


class SimulatedRewards:
    """Scores responses while it runs; `see` hears every event of the run."""

    def __init__(self, config: RunConfig, stats: Stats) -> None:
        self.ended: list[EndedResponse] = []
        self.num_events = 0
        self.num_open = 0  # responses that wait for a score
        self._closed = False
        self._settings, self._stats = config.simulation, stats
        self._random = random.Random(config.seed)
        self._loop = asyncio.get_running_loop()
        self._issued: dict[str, float] = {}  # when, on the loop's clock
        scorers = config.simulation.scorers
        # with no limit as many as there ever are responses; on record a worker of the config has its share of them
        self._scorers_per_worker = (config.capacity if scorers is None else scorers) / config.reward.workers
        self._free = math.inf if scorers is None else scorers
        self._waiting: deque[_Scoring] = deque()  # this and the next hold what is live, `config.capacity` at most
        self._scored: asyncio.Queue[_Scoring] = asyncio.Queue()

    def open(self, scheduler: TrajectoryScheduler, *, wake: Callable[[], None]) -> None:
        """Give scores to a scheduler from here on; `wake` has more handed out, as in a run."""
        self._scheduler, self._wake = scheduler, wake

    async def run(self) -> None:
        """Hand scores over as they are due, until cancelled."""
        while True:
            one = await self._scored.get()
            if not self._closed:
                await self._scheduler.closing.on_score(one.score)
                self._stats.add_score(one.score.value or 0.0, (), one.length)
            self.num_open -= 1
            self._free += 1
            self._begin()
            self._wake()  # with the last score of a batch another may be issued

    def close(self) -> None:
        """Score nothing more."""
        self._closed = True

    def see(self, event: AnyEvent) -> None:
        """Know when each training trajectory was issued, until it has ended."""
        self.num_events += 1
        if type(event) is Issued:  # no kind of event has others below it
            self._issued[event.trajectory_id] = self._loop.time()
        elif type(event) is Dropped:
            self._issued.pop(event.trajectory_id, None)

    def submit(self, trajectory: FinishedTrajectory, *, version: int) -> None:
        """Score a response after a while; `version` is the learner's newest."""
        if trajectory.id in self._issued:  # else it was dropped, and goes on for the record alone
            latency_s = self._loop.time() - self._issued.pop(trajectory.id)
            age = version - trajectory.oldest_version
            self.ended.append(EndedResponse(self._stats.rl_s, latency_s, age))
        takes_s = self._settings.reward_median_s * self._random.lognormvariate(0.0, self._settings.reward_sigma)
        value = float(self._random.random() < self._settings.solved)
        score = Score(
            trajectory_id=trajectory.id, value=value, elapsed_s=takes_s, at_once=self._scorers_per_worker
        )
        self.num_open += 1
        self._waiting.append(_Scoring(score, trajectory.length))
        self._begin()

    def _begin(self) -> None:
        """Have free scorers work on what waits, first come first served."""
        while self._waiting and self._free:
            one = self._waiting.popleft()
            if not self._scheduler.is_live(one.score.trajectory_id):  # a deadline has dropped it meanwhile
                self.num_open -= 1
                continue
            self._free -= 1
            self._loop.call_later(one.score.elapsed_s, self._scored.put_nowait, one)
