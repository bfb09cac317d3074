"""Replicas that fail: as the seed says, and at the cost of what no journal had."""

import numpy as np
import pytest

from laminar_lab.emulation.responses import Responses
from laminar_lab.simulate.fleet import CountedTokens
from laminar_py.ledger.database import reading
from laminar_py.ledger.segments.salvage import RecordedProgress
from laminar_py.records.pieces import Piece
from laminar_py.records.spans import Span
from tests.simulate.small import FAILING, run, run_recorded


@pytest.mark.slow
def test_failures_come_as_the_seed_says_and_cost_time():
    failing, again, other = run(*FAILING), run(*FAILING), run(*FAILING, "seed=1")
    assert failing.failed_s == again.failed_s
    assert failing.rows == again.rows
    assert failing.failed_s != other.failed_s
    assert failing.figures.failures > 0
    assert failing.figures.trained_tokens_per_s < run().figures.trained_tokens_per_s


def test_none_fails_where_none_is_to():
    assert run().failed_s == ()


def test_what_a_dead_replica_had_goes_on_where_its_journal_ends_and_none_is_lost(tmp_path):
    done, folder = run_recorded(tmp_path, *FAILING, "rollout.partial_interval_s=1")
    with reading(folder) as connection:
        interrupted = dict(
            connection.execute(
                "SELECT subject, json_extract(body, '$.length') FROM event WHERE kind = 'interrupted'"
                " AND json_extract(body, '$.reason') = 'replica_crashed'"
            )
        )
        rows = connection.execute("SELECT id, status, epoch, length, drop_reason FROM trajectory").fetchall()
    assert len(done.failed_s) > 3
    assert sum(length > 0 for length in interrupted.values()) > 10, "journals had some"
    fates = {id: (status, epoch, length, reason) for id, status, epoch, length, reason in rows}
    for id, length in interrupted.items():
        status, epoch, now, reason = fates[id]
        assert now >= length, f"{id} has lost what was told"
        assert status != "dropped" or reason == "version_lost"
        assert epoch > 1 or status != "consumed", f"{id} was consumed without another replica"


def test_a_journal_gives_back_what_was_not_told_and_nothing_of_another_epoch():
    def piece(id, start, end, epoch=1):
        ids = np.zeros(end - start, np.int32).tobytes()
        return Piece(
            trajectory_id=id, epoch=epoch, start=start, spans=(Span(0, start, end),), ids=ids, logprobs=ids
        )

    store = CountedTokens(Responses(8, max_len=64, median=16, sigma=0.0))
    store.journal([piece("a", 0, 5), piece("b", 0, 4), piece("c", 0, 4, epoch=2), piece("d", 0, 4)])
    store.journal([piece("a", 5, 9)])
    store.forget("d")
    found = store.salvage(
        {
            "a": RecordedProgress(1, 0),
            "b": RecordedProgress(1, 2),
            "c": RecordedProgress(1, 0),
            "d": RecordedProgress(1, 0),
        }
    )
    assert [(one.trajectory_id, one.tokens.start, one.tokens.end) for one in found] == [("a", 0, 9)]
    assert found[0].spans == (Span(0, 0, 9),)


@pytest.mark.parametrize("settings", [("schedule=sync",), ("schedule=one_step",)])
def test_schedules_that_wait_for_a_batch_wait_for_what_failed_as_well(settings):
    done = run(*FAILING, *settings, "repack.planner=none", "rollout.engine.start_spread_s=0")
    assert [row.trajectories for row in done.rows] == [384] * 6
    assert done.figures.failures > 0
