"""The scoring stage before scorers in the same loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from laminar_py.records.scoring import Score, Unscored
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.stage import MOST_CRASHES, MOST_IN_HAND, ScorerCrashedError, ScorerHandle, ScoringStage
from tests.reward.requests import make_requests

PATIENCE_S = 60.0


class GatedScorer:
    """Scores what it has when its gate is open; remembers what it got together. Crashes over "crash"."""

    def __init__(self, concurrency: int = 4, elapsed_s: float = 9.0) -> None:
        self.concurrency = concurrency
        self.batches: list[list[str]] = []
        self.gate = asyncio.Event()
        self._elapsed_s = elapsed_s
        self._scores: asyncio.Queue[Score] = asyncio.Queue()

    async def submit_responses(self, requests: Sequence[Unscored]) -> None:
        self.batches.append([request.request.response for request in requests])
        await asyncio.sleep(0)  # as over a wire
        if "crash" in self.batches[-1]:
            raise ScorerCrashedError
        for request in requests:
            score = Score(trajectory_id=request.id, value=1.0, elapsed_s=self._elapsed_s)
            self._scores.put_nowait(score)

    async def next_scores(self) -> list[Score]:
        await self.gate.wait()
        return [await self._scores.get()]


def open_scorer(concurrency: int = 4, elapsed_s: float = 9.0) -> GatedScorer:
    scorer = GatedScorer(concurrency, elapsed_s)
    scorer.gate.set()
    return scorer


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


async def no_restart(index: int) -> ScorerHandle:
    raise AssertionError(f"scorer {index} was restarted")


def make_stage(
    scorers: Sequence[ScorerHandle],
    inbox: Inbox,
    *,
    queue: int = 64,
    wanted: Callable[[str], bool] = lambda name: True,
    restart: Callable[[int], Awaitable[ScorerHandle]] = no_restart,
    one_by_one: Callable[[], bool] = lambda: False,
) -> ScoringStage:
    return ScoringStage(
        scorers, queue=queue, wanted=wanted, deliver=inbox.deliver, restart=restart, one_by_one=one_by_one
    )


def unscored(*responses: str) -> list[Unscored]:
    return [Unscored(request=request) for request in make_requests(*responses)]


@asynccontextmanager
async def running(stage: ScoringStage, *responses: str) -> AsyncIterator[None]:
    for request in unscored(*responses):
        stage.submit_response(request)
    task = asyncio.create_task(stage.run())
    try:
        await settle()
        yield
    finally:
        task.cancel()
        await asyncio.wait([task], timeout=PATIENCE_S)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_scorer_gets_as_many_as_it_works_on_and_more_as_it_has_room() -> None:
    scorer, inbox = GatedScorer(concurrency=2), Inbox()
    stage = make_stage([scorer], inbox)
    async with running(stage, *"abcde"):
        assert (scorer.batches, len(stage._waiting), stage.num_unscored) == ([["a", "b"]], 3, 5)
        scorer.gate.set()
        assert len(await inbox.wait(5)) == 5
        await settle()
    assert [response for batch in scorer.batches for response in batch] == list("abcde")
    assert (stage.num_unscored, stage.oldest_s) == (0, 0.0)


async def test_a_scorer_whose_scores_are_quick_gets_some_in_advance() -> None:
    scorer, inbox = open_scorer(concurrency=1, elapsed_s=0.0), Inbox()
    stage = make_stage([scorer], inbox, queue=1000)
    async with running(stage, *"abcdefgh" * 40):
        await inbox.wait(320)
    assert len(scorer.batches[0]) == 1
    assert 8 < max(len(batch) for batch in scorer.batches) <= MOST_IN_HAND


async def test_what_comes_for_a_scorer_that_has_work_comes_in_one_call() -> None:
    scorer, inbox = GatedScorer(concurrency=4), Inbox()
    stage = make_stage([scorer], inbox)
    first, *others = unscored(*"abc")
    async with running(stage, "z"):
        stage.submit_response(first)
        for request in others:
            await settle()
            stage.submit_response(request)
        assert scorer.batches == [["z"]]
        async with asyncio.timeout(PATIENCE_S):
            while len(scorer.batches) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert scorer.batches == [["z"], ["a", "b", "c"]]


async def test_what_waits_is_shared_among_scorers_that_have_room() -> None:
    scorers, inbox = [GatedScorer(), GatedScorer()], Inbox()
    async with running(make_stage(scorers, inbox), *"abcd"):
        assert all(scorer.batches for scorer in scorers)
        given = [response for scorer in scorers for batch in scorer.batches for response in batch]
        assert sorted(given) == list("abcd")


async def test_what_was_dropped_while_it_waited_makes_room_for_what_is_wanted() -> None:
    scorer, inbox = open_scorer(), Inbox()
    stage = make_stage([scorer], inbox, queue=3, wanted=lambda name: name not in ("g0.0", "g0.2"))
    for request in unscored(*"abcde"):  # of which a deadline dropped `a` and `c`
        stage.submit_response(request)
    assert (len(stage._waiting), stage.num_unscored) == (3, 3), "b, d and e"
    async with running(stage):
        assert set(await inbox.wait(3)) == {"g0.1", "g0.3", "g0.4"}


async def test_what_was_dropped_while_it_waited_takes_no_time_of_a_scorer() -> None:
    scorer, inbox, dropped = open_scorer(), Inbox(), set[str]()
    stage = make_stage([scorer], inbox, wanted=lambda name: name not in dropped)
    dropped |= {"g0.0", "g0.1", "g0.3"}
    async with running(stage, *"abcd"):
        assert set(await inbox.wait(1)) == {"g0.2"}
        await settle()
    assert scorer.batches == [["c"]]
    assert (stage.num_unscored, stage.oldest_s) == (0, 0.0)


async def test_what_a_crashed_scorer_had_is_scored_once_by_the_next_before_what_waits() -> None:
    class Crashing(GatedScorer):
        async def next_scores(self) -> list[Score]:
            await self.gate.wait()
            raise ScorerCrashedError

    crashing, successor, inbox = Crashing(concurrency=2), open_scorer(concurrency=2), Inbox()

    async def restart(index: int) -> ScorerHandle:
        return successor

    async with running(make_stage([crashing], inbox, restart=restart), *"abc"):
        crashing.gate.set()
        assert set(await inbox.wait(3)) == {"g0.0", "g0.1", "g0.2"}
    assert (crashing.batches, successor.batches) == ([["a", "b"]], [["a"], ["b"], ["c"]])


async def test_one_by_one_takes_one_and_leaves_the_others_in_the_queue() -> None:
    scorer, inbox = GatedScorer(), Inbox()
    stage = make_stage([scorer], inbox, one_by_one=lambda: True)
    async with running(stage, *"abc"):
        assert (scorer.batches, len(stage._waiting)) == ([["a"]], 2)
        scorer.gate.set()
        await inbox.wait(3)
    assert scorer.batches == [["a"], ["b"], ["c"]]


async def test_a_scorer_rests_while_its_score_is_being_delivered() -> None:
    scorer, rest = open_scorer(concurrency=1), asyncio.Event()

    async def deliver(scores: Sequence[Score]) -> None:
        await rest.wait()

    stage = ScoringStage([scorer], queue=9, wanted=lambda name: True, deliver=deliver, restart=no_restart)
    async with running(stage, *"ab"):
        assert scorer.batches == [["a"]]
        rest.set()
        await settle()
        assert scorer.batches == [["a"], ["b"]]


async def test_an_error_of_the_restart_ends_the_stage() -> None:
    stage = make_stage([GatedScorer()], Inbox())
    stage.submit_response(unscored("crash")[0])
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await stage.run()
    assert "scorer 0 was restarted" in str(caught.value.exceptions[0])


async def test_a_response_that_crashes_each_scorer_fails_alone_after_few_crashes() -> None:
    restarts: list[int] = []

    async def restart(index: int) -> ScorerHandle:
        restarts.append(index)
        return open_scorer(concurrency=64)

    inbox, responses = Inbox(), [*map(str, range(40)), "crash", *map(str, range(41, 100))]
    stage = make_stage([open_scorer(concurrency=64)], inbox, queue=200, restart=restart)
    async with running(stage, *responses):
        scores = await inbox.wait(100)
    failed = [score for score in scores.values() if score.value is None]
    assert [score.trajectory_id for score in failed] == ["g0.40"]
    assert failed[0].failure is DropReason.REWARD_FAILED
    assert f"crashed {MOST_CRASHES} times" in failed[0].detail
    assert restarts == [0] * MOST_CRASHES
    assert (stage.num_unscored, stage._crashes) == (0, {})


async def test_long_fields_of_problems_fill_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar_py.reward.stage.MESSAGE_BYTES", 1)
    scorer = GatedScorer(concurrency=3)
    async with running(make_stage([scorer], Inbox()), "a", "b", "c"):
        await settle()
        assert scorer.batches == [["a"], ["b"], ["c"]]
