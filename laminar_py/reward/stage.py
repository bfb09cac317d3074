"""The scoring stage: finished trajectories wait here for a reward. Pure asyncio; its scorers are given to it.

The controller submits what a replica has finished and gets scores through `deliver`. Neither side ever waits for
the stage. Invariant: every request that a scorer takes is delivered exactly one score, also if the scorer dies
over it: what it had is scored again by the one in its place.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from laminar_py.records.scoring import Score, ScorerHandle, Unfinished, Unscored

log = logging.getLogger(__name__)

AHEAD_S = 0.5  # of work that a scorer has in hand beyond what it works on
MOST_IN_HAND = 256
GATHER_S = 0.05  # in which more may come for a scorer that has work and room, so that one call brings it all
SMOOTHING = 0.1  # weight of a score in the mean time of one


class ScorerDiedError(Exception):
    """The process of a scorer is gone; a `ScorerHandle` raises it, the stage has it restarted."""


class Hand:
    """Responses that a scorer has: as many as it works on at a time, and `AHEAD_S` more where scores are quick."""

    def __init__(self, at_once: int) -> None:
        self.requests: dict[str, Unscored] = {}  # by trajectory
        self._at_once = at_once
        self._mean_s = AHEAD_S

    @property
    def room(self) -> int:
        """Responses that it may get now."""
        ahead = int(self._at_once * AHEAD_S / max(self._mean_s, 1e-4))
        return max(self._at_once, min(ahead, MOST_IN_HAND)) - len(self.requests)

    def take_back(self, score: Score) -> None:
        """Take out a response that has its score."""
        del self.requests[score.trajectory_id]
        self._mean_s += SMOOTHING * (score.elapsed_s - self._mean_s)


class ScoringStage:
    """Waiting trajectories go to scorers that have room, in the order in which they came.

    `queue` is at least the number of trajectories whose score can be `wanted` at a time; what a deadline dropped
    while it waited is not scored and makes room, so `submit` always finds some. `restart(i)` ends scorer i and
    returns a new one, ready. `one_by_one` is true while scorers are to take no more than that.
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
        self._hands = [Hand(scorer.at_once) for scorer in scorers]
        self._most = queue
        self._wanted = wanted
        self._deliver = deliver
        self._restart = restart
        self._one_by_one = one_by_one
        self._waiting: deque[Unscored] = deque()  # `submit` keeps it to what is wanted, which is bounded
        self._since: dict[str, float] = {}  # what has no score yet, the oldest first, and when it came
        self._news = asyncio.Event()  # something waits, or a scorer has room

    @property
    def num_waiting(self) -> int:
        """Trajectories that no scorer has taken yet."""
        return len(self._waiting)

    @property
    def num_unscored(self) -> int:
        """Trajectories that wait or that a scorer has."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest of those came, 0 without any."""
        return asyncio.get_running_loop().time() - next(iter(self._since.values())) if self._since else 0.0

    def grow(self, queue: int) -> None:
        """Let as many wait, if that is more than before."""
        self._most = max(self._most, queue)

    def submit(self, unscored: Unscored) -> None:
        """Score it as soon as a scorer has room."""
        if len(self._waiting) >= self._most:
            self._waiting = deque(waiting for waiting in self._waiting if self._is_wanted(waiting))
            assert len(self._waiting) < self._most, f"{unscored.id}: more than {self._most} wait for scores"
        self._waiting.append(unscored)
        self._since[unscored.id] = asyncio.get_running_loop().time()
        self._news.set()

    def look_ahead(self, responses: Sequence[Unfinished]) -> None:
        """Have scorers work ahead on responses that still generate, but not while they work one by one."""
        if not self._one_by_one():
            for scorer in self._scorers:
                scorer.look_ahead(responses)

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._scorers)):
                group.create_task(self._serve(index), name=f"scoring-{index}")

    async def _serve(self, index: int) -> None:
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed(index), name=f"scorer-{index}-feed")
                    tasks.create_task(self._drain(index), name=f"scorer-{index}-drain")
            except* ScorerDiedError as errors:
                lost = list(self._hands[index].requests.values())
                log.warning("scorer %d is replaced, %d responses wait again: %r", index, len(lost), errors)
                self._waiting.extendleft(reversed(lost))
                self._scorers[index] = scorer = await self._restart(index)
                self._hands[index] = Hand(scorer.at_once)
                self._news.set()

    async def _feed(self, index: int) -> None:
        scorer, hand = self._scorers[index], self._hands[index]
        while True:
            while requests := self._take(hand):
                hand.requests.update({request.id: request for request in requests})
                await scorer.submit_responses(requests)
            self._news.clear()
            await self._news.wait()
            if hand.requests and len(self._waiting) < hand.room:
                await asyncio.sleep(GATHER_S)

    def _take(self, hand: Hand) -> list[Unscored]:
        """A fair share of what waits, so that slow rewards spread over the scorers."""
        fair = 1 + len(self._waiting) // len(self._scorers)
        room = 1 - len(hand.requests) if self._one_by_one() else min(hand.room, fair)
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
        scorer, hand = self._scorers[index], self._hands[index]
        while True:
            scores = await scorer.next_scores()
            for score in scores:
                self._since.pop(score.trajectory_id, None)
            await self._deliver(scores)
            for score in scores:
                hand.take_back(score)
            self._news.set()
