"""The scoring stage: finished trajectories wait here for a reward. The controller owns it.

The controller submits finished responses and gets scores through the callback `deliver`. Each response that a
scorer takes gets exactly one score (law 6). When a scorer crashes, its responses wait again, and later scorers
get fewer of them together. A response that took down `MOST_CRASHES` scorers fails with a reason, so that it cannot
use up the restarts of the run.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from laminar_py.records.scoring import Score, Unscored
from laminar_py.records.trajectory import DropReason

log = logging.getLogger(__name__)

AHEAD_S = 0.5  # seconds of work that a scorer has queued beyond its running calls
MOST_IN_HAND = 256
MESSAGE_BYTES = 4 * 2**20  # fields of problems, e.g. tests of programs, after which a message is full
GATHER_S = 0.05  # a scorer with work and room waits so long, so that one call sends more responses
SMOOTHING = 0.1  # weight of the newest score in the mean time of a score
MOST_CRASHES = 4  # of scorers that had a response, before it fails
NARROWER = 8  # times fewer responses in hand, for each crash of a scorer that had one of them


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
    def most(self) -> int:
        """Number of responses that the scorer may have."""
        ahead = int(self._concurrency * AHEAD_S / max(self._mean_s, 1e-4))
        return max(self._concurrency, min(ahead, MOST_IN_HAND))

    def remove_scored(self, score: Score) -> None:
        """Remove a response that has its score, and update the mean time of a score."""
        del self.requests[score.trajectory_id]
        self._mean_s += SMOOTHING * (score.elapsed_s - self._mean_s)


class ScoringStage:
    """Sends waiting responses to scorers that have room, first come, first served.

    `wanted(id)` is False if a trajectory needs no score, e.g. after its deadline; the stage forgets its response.
    At most `queue` responses wait, which is at least the number of wanted ones, so `submit_response` finds room.
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
        self._crashes = Counter[str]()  # of scorers that had a response without a score, by trajectory
        self._since: dict[str, float] = {}  # arrival of each response without a score, the oldest first
        self._news = asyncio.Event()  # a response waits, or a scorer has room

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
        """Queue a response; a scorer with room gets it. A full queue first forgets unwanted responses."""
        if len(self._waiting) >= self._most:
            self._waiting = deque(waiting for waiting in self._waiting if not self._forget_unwanted(waiting))
            assert len(self._waiting) < self._most, f"{unscored.id}: more than {self._most} wait for scores"
        self._waiting.append(unscored)
        self._since[unscored.id] = asyncio.get_running_loop().time()
        self._news.set()

    async def run(self) -> None:
        """Feed the scorers and deliver their scores until cancelled."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._scorers)):
                group.create_task(self._serve(index), name=f"scoring-{index}")

    async def _serve(self, index: int) -> None:
        """Feed one scorer and deliver its scores. If it crashes, queue its responses first and restart it.

        A response that was in `MOST_CRASHES` crashed scorers gets a failed score instead.
        """
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed(index), name=f"scorer-{index}-feed")
                    tasks.create_task(self._drain(index), name=f"scorer-{index}-drain")
            except* ScorerCrashedError as errors:
                lost = self._loads[index].requests
                log.warning(
                    "scorer %d crashed and is restarted, its %d responses wait again: %s",
                    index,
                    len(lost),
                    errors.exceptions[0],
                )
                self._crashes.update(lost.keys())
                failed = [name for name in lost if self._crashes[name] >= MOST_CRASHES]
                self._waiting.extendleft(lost[name] for name in reversed(lost) if name not in failed)
                await self._deliver_scores([_crashed_score(name) for name in failed])
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
            if load.requests and len(self._waiting) < load.most - len(load.requests):
                await asyncio.sleep(GATHER_S)

    def _next_requests(self, load: ScorerLoad) -> list[Unscored]:
        """Remove from the queue the responses that a scorer gets now: at most its fair share, within its room.

        A response that had scorers crash shares a scorer with fewer others: `NARROWER` times fewer per crash.
        """
        fair = 1 + len(self._waiting) // len(self._scorers)
        room = 1 if self._one_by_one() else load.most
        crashes = max((self._crashes[name] for name in load.requests), default=0)
        requests: list[Unscored] = []
        num_bytes = 0
        while self._waiting and len(requests) < fair and num_bytes < MESSAGE_BYTES:
            crashes = max(crashes, self._crashes[self._waiting[0].id])
            if len(load.requests) + len(requests) >= max(1, room // NARROWER**crashes):
                break
            request = self._waiting.popleft()
            if not self._forget_unwanted(request):
                requests.append(request)
                num_bytes += len(request.request.fields_json)
        return requests

    def _forget_unwanted(self, unscored: Unscored) -> bool:
        """Forget a response if its score is no longer wanted; return whether it was forgotten."""
        if self._wanted(unscored.id):
            return False
        self._forget(unscored.id)
        return True

    def _forget(self, trajectory_id: str) -> None:
        self._since.pop(trajectory_id, None)
        self._crashes.pop(trajectory_id, None)

    async def _deliver_scores(self, scores: Sequence[Score]) -> None:
        """Pass scores to `deliver`, and forget their responses."""
        for score in scores:
            self._forget(score.trajectory_id)
        await self._deliver(scores)

    async def _drain(self, index: int) -> None:
        """Deliver a scorer's scores as they come, and wake `_feed`. Raises `ScorerCrashedError`."""
        scorer, load = self._scorers[index], self._loads[index]
        while True:
            scores = await scorer.next_scores()
            await self._deliver_scores(scores)
            for score in scores:
                load.remove_scored(score)
            self._news.set()


def _crashed_score(trajectory_id: str) -> Score:
    detail = f"its scorer crashed {MOST_CRASHES} times while it had this response; see the logs of the scorers"
    return Score(trajectory_id=trajectory_id, value=None, failure=DropReason.REWARD_FAILED, detail=detail)
