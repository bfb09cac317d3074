"""Which response is blamed where a scoring process was lost, and what the file says of it that names it."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from laminar_py.records.scoring import Begun, Score, ScoringRequest
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.begun import BegunFile, read_begun
from laminar_py.reward.stage import LIVES, WorkerDiedError
from tests.reward.test_scoring_stage import (
    GatedScorer,
    Inbox,
    Restarts,
    Stuck,
    make_requests,
    make_stage,
    open_scorer,
    running,
)
from tests.virtual_time import virtually


def test_a_worker_that_was_stopped_over_a_response_drops_nothing() -> None:
    """Nobody but the worker knows of a hang: one that was stopped has not written that."""
    inbox, restarts = Inbox(), Restarts(open_scorer())

    async def stop() -> None:
        stage = make_stage([Stuck(Begun("g0.1"))], inbox, restart=restarts.restart)
        for request in make_requests("a", "b"):
            stage.submit(request)
        async with running(stage):
            await inbox.wait(2)

    virtually(stop())
    assert all(score.value is not None for score in inbox.scores)
    assert restarts.counted == [True]


class Fragile(GatedScorer):
    """Dies over "die" and says nothing of it, as where a file is not there yet."""

    async def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        if any(request.response == "die" for request in requests):
            self.batches.append([request.response for request in requests])
            raise WorkerDiedError
        return await super().score(requests)

    def begun(self) -> Begun | None:
        return None


async def test_where_nobody_can_be_blamed_each_is_tried_alone_and_that_is_one_death() -> None:
    scorer, inbox = Fragile(), Inbox()
    scorer.gate.set()
    restarts = Restarts(*[scorer] * (LIVES + 1))
    stage = make_stage([scorer], inbox, restart=restarts.restart)
    for request in make_requests("a", "die", "b", "c"):
        stage.submit(request)
    async with running(stage):
        scores = await inbox.wait(4)
    assert [scores[f"g0.{index}"].value for index in range(4)] == [1.0, None, 1.0, 1.0]
    assert scores["g0.1"].failure is DropReason.REWARD_FAILED
    assert scorer.batches == [["a", "die", "b", "c"], ["a"], *[["die"]] * LIVES, ["b"], ["c"]]
    assert restarts.counted == [True] + [False] * LIVES


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_names_no_response_that_it_is_done_with(tmp_path: Path, fails: bool) -> None:
    file = BegunFile(tmp_path / "begun", timeout_s=60.0)
    with suppress(KeyError), file.begin("g0.0"):
        assert read_begun(tmp_path / "begun") == Begun("g0.0")
        if fails:
            raise KeyError
    assert read_begun(tmp_path / "begun") is None
