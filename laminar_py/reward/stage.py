"""The scoring stage: finished trajectories wait here for a reward. Pure asyncio; its workers are given to it.

The controller submits what a replica has finished and gets scores through `deliver`. Neither side ever waits for
the stage. Invariant: every request that a worker takes is delivered exactly one score, also if the worker hangs
or dies over it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from laminar_py.records.protocols import Scorer
from laminar_py.records.scoring import Begun, Score, ScoringRequest
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.worker import SLICE_S

log = logging.getLogger(__name__)

LIVES = 3  # workers that one request may take down before it is given up


class WorkerDiedError(Exception):
    """The process behind a scorer is gone; a `Scorer` raises it, the stage has the worker restarted."""


class ScoringStage:
    """Up to `batch` waiting trajectories go to a free worker together; each is scored and judged on its own.

    A worker limits each trajectory to `timeout_s` itself, and begins none after `SLICE_S`. If a call takes longer
    than both and `grace_s`, the worker is replaced, as where it died. A response that hangs, as the worker itself
    has written, is dropped; another that it had in hand loses one of its `LIVES`; the others are scored again.
    Where none is named, e.g. as the file system is late, the batch is tried one by one and the one alone in its
    call is blamed. `one_by_one` is true while workers are to take no more than that.

    `queue` is at least the number of trajectories whose score can be `wanted` at a time; what a deadline dropped
    while it waited is not scored and makes room, so `submit` always finds some. `restart(i, counts)` ends worker i
    and returns a new one, ready; a worker that ended by itself counts as a death, but not where a response is
    blamed for a hang or for having been alone.
    """

    def __init__(
        self,
        workers: Sequence[Scorer],
        *,
        batch: int,
        timeout_s: float,
        queue: int,
        wanted: Callable[[str], bool],
        deliver: Callable[[Sequence[Score]], Awaitable[None]],
        restart: Callable[[int, bool], Awaitable[Scorer]],
        one_by_one: Callable[[], bool] = lambda: False,
        grace_s: float = 3.0,
    ) -> None:
        self._workers = list(workers)
        self._most = queue
        self._batch = batch
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._wanted = wanted
        self._deliver = deliver
        self._restart = restart
        self._one_by_one = one_by_one
        # Room for every score that is wanted and one end mark per worker: `put_nowait` cannot fail.
        self._waiting: asyncio.Queue[ScoringRequest | None] = asyncio.Queue(queue + len(self._workers))
        self._since: dict[str, float] = {}  # what has no score yet, the oldest first, and when it came
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Trajectories that no worker has taken yet."""
        return self._waiting.qsize()

    @property
    def num_unscored(self) -> int:
        """Trajectories that wait or that a worker has."""
        return len(self._since)

    @property
    def oldest_s(self) -> float:
        """Seconds since the oldest of those came, 0 without any."""
        return asyncio.get_running_loop().time() - next(iter(self._since.values())) if self._since else 0.0

    def submit(self, request: ScoringRequest) -> None:
        """Score it as soon as a worker is free."""
        assert not self._closed, f"{request.trajectory_id} submitted to a closed scoring stage"
        if self._waiting.qsize() >= self._most:
            self._forget_unwanted()
        self._waiting.put_nowait(request)
        self._since[request.trajectory_id] = asyncio.get_running_loop().time()

    def _forget_unwanted(self) -> None:
        waiting = [self._waiting.get_nowait() for _ in range(self._waiting.qsize())]
        for request in waiting:
            if request is None or self._wanted(request.trajectory_id):
                self._waiting.put_nowait(request)
            else:
                self._since.pop(request.trajectory_id, None)

    def close(self) -> None:
        """Workers end after the batch in hand; what waits is not scored any more."""
        if self._closed:
            return
        self._closed = True
        for _ in self._workers:
            self._waiting.put_nowait(None)

    async def run(self) -> None:
        """Serve until `close`."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._workers)):
                group.create_task(self._serve(index), name=f"scoring-{index}")

    async def _serve(self, index: int) -> None:
        while requests := await self._take():
            deaths, most, single = Counter[str](), len(requests), False
            while requests:
                called = requests[: 1 if single or self._one_by_one() else most]
                try:
                    scores = await self._call(index, called)
                except (TimeoutError, WorkerDiedError) as error:
                    begun = self._workers[index].begun()
                    log.warning("scoring worker %d is replaced: %r over %s", index, error, begun)
                    if begun is None or all(request.trajectory_id != begun.trajectory_id for request in called):
                        begun, single = None, True
                    hung = begun is not None and begun.hung and isinstance(error, TimeoutError)
                    scores = self._blame(called, begun, deaths, hung=hung)
                    await self._hand_over(scores)
                    alone = begun is None and len(called) == 1
                    self._workers[index] = await self._restart(index, not (hung or alone))
                else:
                    most = 2 * len(scores)  # slow ones are not sent many times over
                    await self._hand_over(scores)
                given = {score.trajectory_id for score in scores}
                requests = [request for request in requests if request.trajectory_id not in given]

    def _blame(
        self, called: Sequence[ScoringRequest], begun: Begun | None, deaths: Counter[str], *, hung: bool
    ) -> list[Score]:
        """Score of a response that its worker hung over, or was lost over too often; others are tried again."""
        if begun is None and len(called) > 1:
            return []  # nobody can be blamed
        name = begun.trajectory_id if begun is not None else called[0].trajectory_id
        if begun is not None and hung:
            detail = f"no value within reward.timeout_s={self._timeout_s:g}, nor could it be stopped{begun.place}"
            return [_failed(name, DropReason.REWARD_TIMEOUT, detail=detail)]
        deaths[name] += 1
        if deaths[name] < LIVES:
            return []
        return [_failed(name, DropReason.REWARD_FAILED, detail=f"its worker died or stopped {LIVES} times")]

    async def _hand_over(self, scores: Sequence[Score]) -> None:
        for score in scores:
            self._since.pop(score.trajectory_id, None)
        await self._deliver(scores)

    async def _take(self) -> list[ScoringRequest]:
        """A fair share of what waits, so that slow rewards spread over the workers; nothing once closed."""
        requests: list[ScoringRequest] = []
        share = 1
        while len(requests) < share and not (requests and self._waiting.empty()):
            request = await self._waiting.get()
            if self._closed or request is None:
                return []
            if not self._wanted(request.trajectory_id):
                self._since.pop(request.trajectory_id, None)
                continue
            if not requests:
                fair = 1 + self._waiting.qsize() // len(self._workers)
                share = 1 if self._one_by_one() else min(self._batch, fair)
            requests.append(request)
        return requests

    async def _call(self, index: int, requests: Sequence[ScoringRequest]) -> list[Score]:
        async with asyncio.timeout(SLICE_S + self._timeout_s + self._grace_s):
            scores = await self._workers[index].score(requests)
        asked = [request.trajectory_id for request in requests]
        given = [score.trajectory_id for score in scores]
        assert given == asked[: max(1, len(given))], f"{asked} were asked for, {given} given"
        return scores


def _failed(trajectory_id: str, reason: DropReason, *, detail: str) -> Score:
    return Score(trajectory_id=trajectory_id, value=None, failure=reason, detail=detail)
