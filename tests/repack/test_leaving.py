"""What of a leaving replica moves, and where to."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from laminar_py.records.replica import Held, Survey
from laminar_py.repack.leaving import plan_leaving

SLOTS = 4


def survey(*, running=(), waiting=()):
    held = [Held(f"r{place}", context, context) for place, context in enumerate(running)]
    queued = [Held(f"w{place}", context, 0) for place, context in enumerate(waiting)]
    return Survey(
        replica=9, version=3, slots=SLOTS, kv_used=0, kv_capacity=1, running=tuple(held), waiting=tuple(queued)
    )


def test_what_has_not_begun_goes_first_then_what_costs_least_and_the_rest_stays():
    moves = plan_leaving(survey(running=(50, 10, 30), waiting=(7,)), in_flight={1: 3, 2: 2})
    assert [(move.trajectory_id, move.destination, move.prefill) for move in moves] == [
        ("w0", 2, 0),
        ("r1", 1, 10),
        ("r2", 2, 30),
    ]


def test_without_others_of_its_version_all_stays():
    assert plan_leaving(survey(running=(1, 2)), in_flight={}) == []


@given(st.lists(st.integers(1, 99), max_size=9), st.dictionaries(st.integers(0, 5), st.integers(0, 9), max_size=5))
def test_nobody_gets_more_than_it_has_slots_for_and_nothing_goes_twice(running, in_flight):
    moves = plan_leaving(survey(running=running), in_flight=in_flight)
    come = Counter(move.destination for move in moves)
    assert all(in_flight[replica] + count <= SLOTS for replica, count in come.items())
    assert len({move.trajectory_id for move in moves}) == len(moves)
    room = sum(max(0, SLOTS - count) for count in in_flight.values())
    assert len(moves) == min(room, len(running))
