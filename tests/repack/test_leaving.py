"""What of leaving replicas moves, and where to."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.replica import Survey, TrajectorySummary
from laminar_py.repack.planner import plan_leaving


def survey(*, replica=9, running=(), waiting=()):
    held = [TrajectorySummary(f"{replica}r{place}", context, context) for place, context in enumerate(running)]
    queued = [TrajectorySummary(f"{replica}w{place}", context, 0) for place, context in enumerate(waiting)]
    return Survey(
        replica=replica, version=3, slots=4, kv_used=0, kv_capacity=1, running=tuple(held), waiting=tuple(queued)
    )


def plan(*surveys, room, moving=()):
    return plan_leaving(surveys, room=room, is_moving=set(moving).__contains__)


def test_what_has_not_begun_goes_first_then_what_costs_least_and_the_rest_stays():
    moves = plan(survey(running=(50, 10, 30), waiting=(7,)), room={1: 1, 2: 2})
    assert [(move.trajectory_id, move.destination, move.prefill) for move in moves] == [
        ("9w0", 2, 0),
        ("9r1", 1, 10),
        ("9r2", 2, 30),
    ]


def test_without_others_of_its_version_all_stays():
    assert plan(survey(running=(1, 2)), room={}) == []


def test_what_is_on_its_way_takes_no_room_of_others():
    (move,) = plan(survey(running=(1, 2)), room={1: 1}, moving=["9r0"])
    assert move.trajectory_id == "9r1"


@given(
    st.lists(st.lists(st.integers(1, 99), max_size=5), max_size=4),
    st.dictionaries(st.integers(0, 5), st.integers(-2, 9), max_size=5),
)
def test_nobody_gets_more_than_it_has_room_for_by_all_that_leave_and_nothing_goes_twice(leaving, room):
    moves = plan(
        *(survey(replica=10 + place, running=running) for place, running in enumerate(leaving)), room=room
    )
    come = Counter(move.destination for move in moves)
    assert all(count <= room[replica] for replica, count in come.items())
    assert len({move.trajectory_id for move in moves}) == len(moves)
    assert len(moves) == min(sum(max(0, free) for free in room.values()), sum(map(len, leaving)))
