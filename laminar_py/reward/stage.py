"""The scoring stage: finished trajectories wait here for a reward. The controller owns it.

The controller submits finished responses and gets scores through the callback `deliver`. Each response that a
scorer takes gets exactly one score (law 6): when a scorer crashes, its replacement scores its responses again.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from laminar_py.records.scoring import Score, Unfinished, Unscored

log = logging.getLogger(__name__)

AHEAD_S = 0.5  # seconds of work that a scorer has queued beyond its running calls
MOST_IN_HAND = 256
GATHER_S = 0.05  # a scorer with work and room waits so long, so that one call sends more responses
SMOOTHING = 0.1  # weight of the newest score in the mean time of a score


class ScorerCrashedError(Exception):
    """The process of a scorer has crashed. A `ScorerHandle` raises it, and the stage starts a replacement."""


class ScorerHandle(Protocol):
    """A scorer, in whatever process it runs. The scoring stage calls it."""

    @property
    def concurrency(self) -> int:
        """Number of responses that it works on at the same time."""
        ...

    async def submit_responses(self, responses: Sequence[Unscored]) -> None:
        """Hand over responses. Each gets one score; a failure is a score with its reason."""
        ...

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Hand over partial responses to terms that work ahead; no answer comes back."""
        ...

    async def next_scores(self) -> list[Score]:
        """Wait for a score, and return all available scores."""
        ...


class ScorerLoad:
    """Responses that a scorer has, and how many more it may get.

    It gets as many as it works on at a time, and `AHEAD_S` seconds of further work if scores are quick.
    """

    def __init__(self, concurrency: int) -> None:
        self.requests: dict[str, Unscored] = {}  # by trajectory
        self._concurrency = concurrency
        self._mean_s = AHEAD_S

    @property
    def room(self) -> int:
        """Number of responses that the scorer may get now."""
        ahead = int(self._concurrency * AHEAD_S / max(self._mean_s, 1e-4))
        return max(self._concurrency, min(ahead, MOST_IN_HAND)) - len(self.requests)

    def remove_scored(self, score: Score) -> None:
        """Remove a response that has its score, and update the mean time of a score."""
        del self.requests[score.trajectory_id]
        self._mean_s += SMOOTHING * (score.elapsed_s - self._mean_s)


class ScoringStage:
    """Sends waiting responses to scorers that have room, first come, first served.

    At most `queue` responses wait. `queue` is at least the number of trajectories whose score can be `wanted` at a
    time. Responses that a deadline dropped are not scored and make room, so `submit_response` always finds some.
    `restart(i)` ends scorer i and returns its replacement, ready. While `one_by_one()` is true, a scorer gets one
    response at a time.
    """

    def __init__(
        self,
        scorers: Sequence[ScorerHandle],
        *,
        queue: int,
        wanted: Callable[[str], bool],
        deliver: Callable[[Sequence[Score]], Awaitable[None]],
        restart: Callable[[int], Awaitable[ScorerHandle]],
        one_by_one: Callable[[], bool] = lambda: False,
    ) -> None:
        self._scorers = list(scorers)
        self._loads = [ScorerLoad(scorer.concurrency) for scorer in scorers]
        self._most = queue
        self._wanted = wanted
        self._deliver = deliver
        self._restart = restart
        self._one_by_one = one_by_one
        self._waiting: deque[Unscored] = deque()  # bounded by `queue`: `submit_response` drops unwanted responses
        self._since: dict[str, float] = {}  # arrival of each response without a score, the oldest first
        self._news = asyncio.Event()  # a response waits, or a scorer has room

    @property
    def num_waiting(self) -> int:
        """Number of responses that no scorer has yet."""
        return len(self._waiting)

    @property
    def num_unscored(self) -> int:
        """Number of responses without a score, waiting or at a scorer."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest response without a score arrived; 0 if there is none."""
        return asyncio.get_running_loop().time() - next(iter(self._since.values())) if self._since else 0.0

    def grow(self, queue: int) -> None:
        """Raise the bound of the waiting queue; never lower it."""
        self._most = max(self._most, queue)

    def submit_response(self, unscored: Unscored) -> None:
        """Queue a response, which a scorer gets as soon as it has room."""
        if len(self._waiting) >= self._most:
            self._waiting = deque(waiting for waiting in self._waiting if self._is_wanted(waiting))
            assert len(self._waiting) < self._most, f"{unscored.id}: more than {self._most} wait for scores"
        self._waiting.append(unscored)
        self._since[unscored.id] = asyncio.get_running_loop().time()
        self._news.set()

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Let scorers work ahead on responses that still generate, except while they work one by one."""
        if not self._one_by_one():
            for scorer in self._scorers:
                scorer.look_ahead(responses)

    async def run(self) -> None:
        """Feed the scorers and deliver their scores until cancelled."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._scorers)):
                group.create_task(self._serve(index), name=f"scoring-{index}")

    async def _serve(self, index: int) -> None:
        """Feed one scorer and deliver its scores. If it crashes, queue its responses first and replace it."""
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed(index), name=f"scorer-{index}-feed")
                    tasks.create_task(self._drain(index), name=f"scorer-{index}-drain")
            except* ScorerCrashedError as errors:
                lost = list(self._loads[index].requests.values())
                log.warning("scorer %d is replaced, %d responses wait again: %r", index, len(lost), errors)
                self._waiting.extendleft(reversed(lost))
                self._scorers[index] = scorer = await self._restart(index)
                self._loads[index] = ScorerLoad(scorer.concurrency)
                self._news.set()

    async def _feed(self, index: int) -> None:
        """Send a scorer waiting responses whenever it has room. Raises `ScorerCrashedError`."""
        scorer, load = self._scorers[index], self._loads[index]
        while True:
            while requests := self._next_requests(load):
                load.requests.update({request.id: request for request in requests})
                await scorer.submit_responses(requests)
            self._news.clear()
            await self._news.wait()
            if load.requests and len(self._waiting) < load.room:
                await asyncio.sleep(GATHER_S)

    def _next_requests(self, load: ScorerLoad) -> list[Unscored]:
        """Take a fair share of the waiting responses, so that slow rewards spread over the scorers."""
        fair = 1 + len(self._waiting) // len(self._scorers)
        room = 1 - len(load.requests) if self._one_by_one() else min(load.room, fair)
        requests: list[Unscored] = []
        while self._waiting and len(requests) < room:
            request = self._waiting.popleft()
            if self._is_wanted(request):
                requests.append(request)
        return requests

    def _is_wanted(self, unscored: Unscored) -> bool:
        if self._wanted(unscored.id):
            return True
        self._since.pop(unscored.id, None)
        return False

    async def _drain(self, index: int) -> None:
        """Deliver a scorer's scores as they come, and note its new room. Raises `ScorerCrashedError`."""
        scorer, load = self._scorers[index], self._loads[index]
        while True:
            scores = await scorer.next_scores()
            for score in scores:
                self._since.pop(score.trajectory_id, None)
            await self._deliver(scores)
            for score in scores:
                load.remove_scored(score)
            self._news.set()
