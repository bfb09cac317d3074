"""A rank that keeps others waiting is found after the limit of its activity, which is longer where it computes."""

import pytest

from laminar_py.learner.distributed import COMPUTES_S, STANDS_S
from laminar_py.records.metrics import RankPosition
from laminar_py.runtime.workers.hangs import HangWatch

EVERY_S = 5.0  # between two looks


def seen_until(end_s, *positions):
    """The first finding of a watch that sees ranks stand in these positions, and its time."""
    watch, now = HangWatch(len(positions)), 1000.0
    while now < 1000.0 + end_s:
        for rank, position in enumerate(positions):
            watch.note(rank, position, now=now)
        if (found := watch.find_hung(now)) is not None:
            return now - 1000.0, found, watch.last_activity(found[0])
        now += EVERY_S
    return None


def at(collectives, activity="copy of lm_head.weight of version 7", limit_s=STANDS_S):
    return RankPosition(activity, limit_s, 3, collectives)


def computing(collectives):
    return at(collectives, "microbatch 3 of 8 of step 12", COMPUTES_S)


def test_a_rank_that_does_not_enter_a_collective_is_named_within_a_minute():
    after_s, (rank, reason), activity = seen_until(60, computing(1205), at(1205), at(1204))
    assert (rank, after_s) == (2, 50.0)
    assert reason == "hangs: it has stood still for 50 s, and 2 other ranks wait for it in collective 1,205"
    assert activity == "copy of lm_head.weight of version 7"


def test_a_rank_that_computes_is_waited_for_ten_minutes():
    positions = (computing(1205), computing(1204), computing(1205))
    assert seen_until(595, *positions) is None
    assert seen_until(620, *positions)[1][0] == 1


def test_with_groups_of_ranks_the_rank_that_has_entered_the_fewest_is_to_blame():
    """Rank 1 waits for rank 0 within their group, and rank 2 in a later collective of its own group."""
    assert seen_until(60, at(100), computing(101), computing(103))[1][0] == 0


def test_ranks_that_all_stand_in_one_collective_are_noticed_after_the_longest_limit():
    assert seen_until(595, computing(9), at(9)) is None
    _, (_, reason), _ = seen_until(700, computing(9), at(9))
    assert reason == "hangs: it has stood still for 605 s, like all ranks, after collective 9"


@pytest.mark.parametrize("moves", [at(1204, "copy of model.norm.weight of version 7"), at(1205)])
def test_a_rank_that_begins_an_activity_or_enters_a_collective_is_not_hung(moves):
    watch = HangWatch(2)
    for now in range(0, 600, 5):
        other = moves if now // 40 % 2 else at(1204)
        watch.note(0, at(1206), now=now)
        watch.note(1, other, now=now)
        assert watch.find_hung(now) is None


def test_a_pause_between_two_calls_does_not_count():
    watch = HangWatch(2)
    for rank, collectives in enumerate((8, 7)):
        watch.note(rank, at(collectives, "idle"), now=0.0)
    watch.restart(900.0)
    assert watch.find_hung(940.0) is None
    assert watch.find_hung(946.0) is not None


def test_nobody_waits_for_a_rank_that_is_alone():
    assert seen_until(2000, computing(5)) is None
