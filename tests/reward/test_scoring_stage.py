"""The scoring stage, before scorers in the same loop and before real processes that hang and die."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from laminar_py.records.protocols import Scorer
from laminar_py.records.scoring import Begun, Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason
from laminar_py.reward.stage import LIVES, ScoringStage, WorkerDiedError
from laminar_py.reward.worker import SLICE_S
from tests.reward.scoring_process import TIMEOUT_S, ScoringProcess
from tests.virtual_time import virtually

PATIENCE_S = 60.0
LIMIT_S = 10.0


def make_requests(*responses: str) -> list[ScoringRequest]:
    ids = np.array([1], dtype=np.int32)
    return [
        ScoringRequest(
            trajectory_id=f"g0.{index}",
            prompt="prompt",
            response=response,
            answer="7",
            finish_reason=FinishReason.STOP,
            response_ids=ids,
        )
        for index, response in enumerate(responses)
    ]


class GatedScorer:
    """Answers a batch when its gate is open; remembers the batches."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        self.batches.append([request.response for request in requests])
        await self.gate.wait()
        return [Score(trajectory_id=request.trajectory_id, value=1.0) for request in requests]


class Inbox:
    """Takes scores; `wait` returns when there are `count` of them."""

    def __init__(self) -> None:
        self.scores: list[Score] = []
        self._news = asyncio.Condition()

    async def deliver(self, scores: Sequence[Score]) -> None:
        async with self._news:
            self.scores.extend(scores)
            self._news.notify_all()

    async def wait(self, count: int) -> dict[str, Score]:
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(lambda: len(self.scores) >= count)
        assert len({score.trajectory_id for score in self.scores}) == len(self.scores) == count
        return {score.trajectory_id: score for score in self.scores}


async def no_restart(index: int, counts: bool) -> Scorer:
    raise AssertionError(f"worker {index} was restarted")


def make_stage(
    workers: Sequence[Scorer],
    inbox: Inbox,
    *,
    batch: int = 4,
    queue: int = 64,
    wanted: Callable[[str], bool] = lambda name: True,
    restart: Callable[[int, bool], Awaitable[Scorer]] = no_restart,
    one_by_one: Callable[[], bool] = lambda: False,
) -> ScoringStage:
    return ScoringStage(
        workers,
        batch=batch,
        timeout_s=LIMIT_S,
        queue=queue,
        wanted=wanted,
        deliver=inbox.deliver,
        restart=restart,
        one_by_one=one_by_one,
    )


@asynccontextmanager
async def running(stage: ScoringStage) -> AsyncIterator[None]:
    task = asyncio.create_task(stage.run())
    try:
        yield
    finally:
        stage.close()
        await asyncio.wait_for(task, PATIENCE_S)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_what_waits_goes_to_a_worker_together_up_to_the_batch() -> None:
    scorer, inbox = GatedScorer(), Inbox()
    stage = make_stage([scorer], inbox)
    async with running(stage):
        first, *rest = make_requests("a", "b", "c", "d", "e", "f")
        stage.submit(first)
        await settle()  # the worker is busy with `a` now
        for request in rest:
            stage.submit(request)
        assert stage.num_waiting == 5
        scorer.gate.set()
        assert len(await inbox.wait(6)) == 6
    assert scorer.batches == [["a"], ["b", "c", "d", "e"], ["f"]]


async def test_waiting_requests_are_shared_among_free_workers() -> None:
    scorers, inbox = [GatedScorer(), GatedScorer()], Inbox()
    stage = make_stage(scorers, inbox)
    for request in make_requests("a", "b", "c", "d"):
        stage.submit(request)
    async with running(stage):
        await settle()
        assert [scorer.batches for scorer in scorers] == [[["a", "b"]], [["c"]]]
        for scorer in scorers:
            scorer.gate.set()
        await inbox.wait(4)


async def test_what_was_dropped_while_it_waited_makes_room_for_what_is_wanted() -> None:
    scorer, inbox = GatedScorer(), Inbox()
    stage = make_stage([scorer], inbox, queue=3, wanted=lambda name: name not in ("g0.0", "g0.2"))
    for request in make_requests("a", "b", "c", "d", "e"):  # of which a deadline dropped `a` and `c`
        stage.submit(request)
    assert stage.num_waiting == 3, "b, d and e"
    assert stage.num_unscored == 3
    async with running(stage):
        scorer.gate.set()
        assert set(await inbox.wait(3)) == {"g0.1", "g0.3", "g0.4"}


async def test_what_was_dropped_while_it_waited_takes_no_time_of_a_worker() -> None:
    scorer, inbox, dropped = GatedScorer(), Inbox(), set[str]()
    stage = make_stage([scorer], inbox, wanted=lambda name: name not in dropped)
    for request in make_requests("a", "b", "c", "d"):
        stage.submit(request)
    dropped |= {"g0.0", "g0.1", "g0.3"}
    scorer.gate.set()
    async with running(stage):
        assert set(await inbox.wait(1)) == {"g0.2"}
    assert scorer.batches == [["c"]]
    assert (stage.num_unscored, stage.oldest_s) == (0, 0.0)


async def test_close_wakes_idle_workers_and_leaves_what_waits() -> None:
    scorer, inbox = GatedScorer(), Inbox()
    stage = make_stage([scorer, GatedScorer()], inbox, batch=1)
    async with running(stage):
        await settle()
    async with running(stage := make_stage([scorer], inbox, batch=1)):
        for request in make_requests("a", "b", "c"):
            stage.submit(request)
        await settle()
        stage.close()
        scorer.gate.set()
    assert [score.trajectory_id for score in inbox.scores] == ["g0.0"]


class Fleet:
    """Real scoring processes, and the stage's way to replace one."""

    def __init__(self) -> None:
        self.processes: list[ScoringProcess] = []
        self.restarts = 0
        self.deaths = 0  # of those, which count

    async def restart(self, index: int, counts: bool) -> Scorer:
        self.restarts += 1
        self.deaths += counts
        await self.processes[index].kill()
        self.processes[index] = await ScoringProcess.start()
        return self.processes[index]


@asynccontextmanager
async def real_stage(inbox: Inbox) -> AsyncIterator[tuple[ScoringStage, Fleet]]:
    fleet = Fleet()
    fleet.processes.append(await ScoringProcess.start())
    stage = ScoringStage(
        fleet.processes,
        batch=8,
        timeout_s=TIMEOUT_S,
        queue=64,
        wanted=lambda name: True,
        deliver=inbox.deliver,
        restart=fleet.restart,
        grace_s=0.5,
    )
    try:
        async with running(stage):
            yield stage, fleet
    finally:
        await fleet.processes[0].kill()


async def judge(*responses: str) -> tuple[list[Score], Fleet]:
    """The scores of one batch in order, and the fleet, which counts the workers that it took beyond the first."""
    inbox = Inbox()
    async with real_stage(inbox) as (stage, fleet):
        for request in make_requests(*responses):
            stage.submit(request)
        scores = await inbox.wait(len(responses))
    return [scores[f"g0.{index}"] for index in range(len(responses))], fleet


async def test_a_loop_in_python_costs_its_own_trajectory_and_no_worker() -> None:
    scores, fleet = await judge("1", "spin", "2")
    assert [score.value for score in scores] == [1.0, None, 2.0]
    assert (scores[1].failure, fleet.restarts) == (DropReason.REWARD_TIMEOUT, 0)


async def test_each_that_takes_too_long_is_told_at_once_and_not_after_its_batch() -> None:
    inbox = Inbox()
    async with real_stage(inbox) as (stage, fleet):
        for request in make_requests("1", *["spin"] * 5):
            stage.submit(request)
        arrived = [len(await inbox.wait(count)) for count in range(2, 7)]
    assert (arrived, fleet.restarts) == ([2, 3, 4, 5, 6], 0)


@pytest.mark.parametrize("kind", ["hang", "hold"])
async def test_a_hang_that_nothing_interrupts_drops_the_guilty_alone_and_is_no_death(kind: str) -> None:
    scores, fleet = await judge("1", kind, "2", "3")
    assert [score.value for score in scores] == [1.0, None, 2.0, 3.0]
    assert (scores[1].failure, fleet.restarts, fleet.deaths) == (DropReason.REWARD_TIMEOUT, 1, 0)
    assert re.search(
        r"reward.timeout_s=0.2, nor could it be stopped \(at .*scoring_process.py:\d+\)", scores[1].detail
    )


async def test_a_request_that_kills_its_workers_is_dropped_and_the_others_are_scored() -> None:
    scores, fleet = await judge("1", "die", "2")
    assert [score.value for score in scores] == [1.0, None, 2.0]
    assert (scores[1].failure, fleet.restarts, fleet.deaths) == (DropReason.REWARD_FAILED, LIVES, LIVES)


class Stuck(GatedScorer):
    """Hangs over the third of a batch, or has begun nothing that anybody knows."""

    def __init__(self, begun: Begun | None) -> None:
        super().__init__()
        self._begun = begun

    def begun(self) -> Begun | None:
        return self._begun


class Restarts:
    """Puts workers in the place of those that are gone, in order; `counted` says which were deaths."""

    def __init__(self, *workers: Scorer) -> None:
        self._workers = iter(workers)
        self.counted: list[bool] = []
        self.last_s = 0.0

    async def restart(self, index: int, counts: bool) -> Scorer:
        self.counted.append(counts)
        self.last_s = asyncio.get_running_loop().time()
        return next(self._workers)


def open_scorer() -> GatedScorer:
    scorer = GatedScorer()
    scorer.gate.set()
    return scorer


def test_the_limit_is_that_of_one_response_however_large_the_batch() -> None:
    inbox, restarts = Inbox(), Restarts(open_scorer())

    async def hang() -> None:
        stage = make_stage([Stuck(Begun("g0.2", hung=True))], inbox, batch=64, restart=restarts.restart)
        for request in make_requests(*"abcdefgh" * 8):
            stage.submit(request)
        async with running(stage):
            await inbox.wait(64)

    virtually(hang())
    assert [score.trajectory_id for score in inbox.scores if score.value is None] == ["g0.2"]
    assert restarts.counted == [False]
    assert restarts.last_s == SLICE_S + LIMIT_S + 3.0


def test_a_worker_that_hangs_over_none_of_its_batch_drops_nothing_and_is_a_death_but_over_one_alone() -> None:
    inbox, restarts = Inbox(), Restarts(Stuck(None), open_scorer())

    async def hang() -> None:
        stage = make_stage([Stuck(Begun("another"))], inbox, restart=restarts.restart)
        for request in make_requests("a", "b"):
            stage.submit(request)
        async with running(stage):
            await inbox.wait(2)

    virtually(hang())
    assert all(score.value is not None for score in inbox.scores)
    assert restarts.counted == [True, False]


async def test_one_by_one_takes_one_and_leaves_the_others_in_the_queue() -> None:
    scorer, inbox = GatedScorer(), Inbox()
    stage = make_stage([scorer], inbox, one_by_one=lambda: True)
    for request in make_requests("a", "b", "c"):
        stage.submit(request)
    async with running(stage):
        await settle()
        assert (scorer.batches, stage.num_waiting) == ([["a"]], 2)
        scorer.gate.set()
        await inbox.wait(3)
    assert scorer.batches == [["a"], ["b"], ["c"]]


async def test_what_a_slow_worker_leaves_over_is_not_sent_again_and_again() -> None:
    class Slow(GatedScorer):
        async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
            return (await super().score(requests))[:1]

    scorer, inbox = Slow(), Inbox()
    scorer.gate.set()
    stage = make_stage([scorer], inbox, batch=8)
    for request in make_requests(*"abcdefgh"):
        stage.submit(request)
    async with running(stage):
        await inbox.wait(8)
    assert [len(batch) for batch in scorer.batches] == [8, 2, 2, 2, 2, 2, 2, 1]


async def test_requests_of_a_worker_that_was_killed_are_scored_again() -> None:
    inbox = Inbox()
    async with real_stage(inbox) as (stage, fleet):
        await fleet.processes[0].kill()
        for request in make_requests("1", "2", "3"):
            stage.submit(request)
        scores = await inbox.wait(3)
    assert sorted(score.value for score in scores.values()) == [1.0, 2.0, 3.0]
    assert fleet.restarts == 1


async def test_an_error_of_the_restart_ends_the_stage() -> None:
    class Dead:
        async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
            raise WorkerDiedError

        def begun(self) -> None:
            return None

    stage = make_stage([Dead()], Inbox())
    stage.submit(make_requests("1")[0])
    outcome = await asyncio.wait_for(asyncio.gather(stage.run(), return_exceptions=True), PATIENCE_S)
    assert isinstance(outcome[0], ExceptionGroup)
    assert "worker 0 was restarted" in str(outcome[0].exceptions[0])
