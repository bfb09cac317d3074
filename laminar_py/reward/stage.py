"""The scoring stage: finished trajectories wait here for a reward. Pure asyncio; its workers are given to it.

The controller submits what a replica has finished and gets scores through `deliver`. Neither side ever waits for
the stage. Invariant: every request that a worker takes is delivered exactly one score, also if the worker hangs
or dies over it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from laminar_py.records.protocols import Scorer
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason

log = logging.getLogger(__name__)

LIVES = 3  # workers that one request may take down, alone in its batch, before it is given up


class WorkerDiedError(Exception):
    """The process behind a scorer is gone; a `Scorer` raises it, the stage has the worker restarted."""


class ScoringStage:
    """Up to `batch` waiting trajectories go to a free worker together; each is scored and judged on its own.

    A worker limits each trajectory to `timeout_s` itself. If a batch takes longer than all its limits and
    `grace_s`, its worker hangs where Python cannot interrupt it: it is replaced, and the members of the batch are
    tried one at a time, so that only the guilty one is dropped. `queue` is at least the number of trajectories
    whose score can be `wanted` at a time; what a deadline dropped while it waited is not scored and makes room, so
    `submit` always finds some. `restart(i)` ends worker i and returns a new one, ready.
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
        restart: Callable[[int], Awaitable[Scorer]],
        grace_s: float = 5.0,
    ) -> None:
        self._workers = list(workers)
        self._most = queue
        self._batch = batch
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._wanted = wanted
        self._deliver = deliver
        self._restart = restart
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
                del self._since[request.trajectory_id]

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
            while len(requests) > 1 and (scores := await self._score_together(index, requests)):
                await self._hand_over(scores)
                requests = requests[len(scores) :]
            for request in requests:
                await self._hand_over([await self._score_alone(index, request)])

    async def _hand_over(self, scores: Sequence[Score]) -> None:
        for score in scores:
            del self._since[score.trajectory_id]
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
                del self._since[request.trajectory_id]
                continue
            if not requests:
                share = min(self._batch, 1 + self._waiting.qsize() // len(self._workers))
            requests.append(request)
        return requests

    async def _score_together(self, index: int, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Scores of a batch, in order, up to the first member that took too long.

        None if the worker hung or died over a member, and was replaced.
        """
        try:
            return await self._call(index, requests)
        except (TimeoutError, WorkerDiedError) as error:
            await self._replace(index, requests, cause=error)
            return []

    async def _score_alone(self, index: int, request: ScoringRequest) -> Score:
        """Score of one request. A worker may be killed from outside, so a request may take several."""
        for _ in range(LIVES):
            try:
                return (await self._call(index, [request]))[0]
            except TimeoutError as error:
                await self._replace(index, [request], cause=error)
                detail = "hung where Python cannot interrupt it; its worker was replaced"
                return _failed(request, DropReason.REWARD_TIMEOUT, detail=detail)
            except WorkerDiedError as error:
                await self._replace(index, [request], cause=error)
        return _failed(request, DropReason.REWARD_FAILED, detail=f"its worker died {LIVES} times")

    async def _call(self, index: int, requests: Sequence[ScoringRequest]) -> list[Score]:
        async with asyncio.timeout(len(requests) * self._timeout_s + self._grace_s):
            scores = await self._workers[index].score(requests)
        asked = [request.trajectory_id for request in requests]
        given = [score.trajectory_id for score in scores]
        assert given == asked[: max(1, len(given))], f"{asked} were asked for, {given} given"
        return scores

    async def _replace(self, index: int, requests: Sequence[ScoringRequest], *, cause: Exception) -> None:
        ids = ", ".join(request.trajectory_id for request in requests)
        log.warning("scoring worker %d is replaced: %s over %s", index, type(cause).__name__, ids)
        self._workers[index] = await self._restart(index)


def _failed(request: ScoringRequest, reason: DropReason, *, detail: str) -> Score:
    return Score(trajectory_id=request.trajectory_id, value=None, failure=reason, detail=detail)
