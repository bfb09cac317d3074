"""Plans keep their bounds for any fleet, and are what the paper and the prediction say for small ones."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_lab.bench.paper_planner import MARGIN, PaperPlanner
from laminar_py.config.rollout import PLANNERS
from laminar_py.records.replica import Survey, TrajectorySummary
from laminar_py.repack.planner import PlanningContext
from laminar_py.repack.predictive import PredictivePlanner
from laminar_py.repack.signals import EngineSpeed
from tests.depth import examples
from tests.repack.fleets import KV, PROMPT, SLOTS, SPEED, after, make_survey

LENGTHS = st.lists(st.integers(1, 16_000), max_size=SLOTS)
REPLICAS = st.lists(st.tuples(LENGTHS, st.integers(0, 30), st.booleans()), min_size=2, max_size=8)


def long(held):
    """Everything goes on for very long."""
    return np.full(len(held), 8000.0)


def context(**state):
    return PlanningContext(**{"speed": SPEED, "forecast": long, "max_stall_s": 5.0} | state)


def paper(previous=None):
    """By default all had full caches when they were last looked at; the roofline batch is 48 of 64 slots."""
    speed = msgspec.structs.replace(SPEED, step_s_per_sequence=SPEED.step_s * MARGIN / 47.5)
    return PaperPlanner(context(speed=speed, previous_kv=dict.fromkeys(range(9), KV + 1) | (previous or {})))


def predictive(to_come=long, max_stall_s=5.0, **state):
    return PredictivePlanner(context(forecast=to_come, max_stall_s=max_stall_s, **state))


def with_turns(survey, *, observed, turns, away=0):
    """The same replica: each response has so many tokens of its environment; the first ones wait for it."""
    running = tuple(
        msgspec.structs.replace(item, observed=observed, turns=turns, is_away=place < away)
        for place, item in enumerate(survey.running)
    )
    return msgspec.structs.replace(survey, running=running)


def make_fleet(shapes):
    """Replicas that hold no more than their caches can."""
    group = []
    for index, (lengths, waiting, settled) in enumerate(shapes):
        fitting = np.cumsum([PROMPT + n for n in lengths]) <= KV
        group.append(
            make_survey(index, [n for n, fits in zip(lengths, fitting, strict=True) if fits], waiting=waiting)
            if settled
            else make_survey(index, [], can_move=False)
        )
    return group


@settings(max_examples=examples(150), deadline=None)
@given(REPLICAS, st.sampled_from([paper(), predictive()]))
def test_a_plan_moves_each_once_within_cache_and_slots(shapes, planner):
    group = make_fleet(shapes)
    moves = planner.plan(group)
    held = {item.trajectory_id: s.replica for s in group for item in s.running + s.waiting}
    assert len({move.trajectory_id for move in moves}) == len(moves)
    for move in moves:
        assert held[move.trajectory_id] == move.source != move.destination
    for used, count in after(group, moves).values():
        assert used <= KV
        assert count <= SLOTS


@settings(max_examples=examples(150), deadline=None)
@given(REPLICAS)
def test_no_destination_stands_longer_than_the_stall_limit(shapes):
    group = make_fleet(shapes)
    prefill = Counter()
    for move in predictive(max_stall_s=0.7).plan(group):
        prefill[move.destination] += move.prefill
    assert max(prefill.values(), default=0) <= 0.7 * SPEED.prefill_tokens_per_s


@settings(max_examples=examples(100), deadline=None)
@given(REPLICAS, st.sampled_from([paper(), predictive()]))
def test_what_gives_with_a_cache_does_not_receive_and_the_unsettled_are_left_alone(shapes, planner):
    group = make_fleet(shapes)
    moves = planner.plan(group)
    sources = {move.source for move in moves if move.prefill}
    assert not sources & {move.destination for move in moves}
    unsettled = {survey.replica for survey in group if not survey.can_move}
    assert not unsettled & ({move.source for move in moves} | {move.destination for move in moves})


def test_the_paper_moves_the_emptiest_whole_to_the_fullest_that_has_room():
    group = [
        make_survey(0, [2000]),
        make_survey(1, [9000] * 5),
        make_survey(2, [9000] * 3),
        make_survey(3, [9500] * 12),
    ]
    [move] = paper({2: 1}).plan(group)
    assert (move.source, move.destination, move.prefill) == (0, 1, 2400)


def test_the_paper_leaves_a_replica_whose_cache_still_fills():
    group = [make_survey(0, [2000]), make_survey(1, [9000] * 5)]
    grows = {0: group[0].kv_used - 1, 1: group[1].kv_used + 1}
    assert paper(grows).plan(group) == []


def test_the_paper_keeps_a_destination_below_the_roofline_batch():
    assert paper().plan([make_survey(0, [1000] * 20), make_survey(1, [1000] * 29)]) == []
    assert len(paper().plan([make_survey(0, [1000] * 20), make_survey(1, [1000] * 28)])) == 20


def test_the_paper_keeps_a_destination_within_its_slots_where_a_larger_batch_costs_no_time():
    planner = PaperPlanner(context(previous_kv={0: KV + 1, 1: KV + 1}))
    assert planner.plan([make_survey(0, [1000] * 20), make_survey(1, [1000] * 45)]) == []
    assert len(planner.plan([make_survey(0, [1000] * 20), make_survey(1, [1000] * 44)])) == 20


def test_a_source_that_fits_no_single_destination_is_split():
    group = [make_survey(0, [4000] * 4), make_survey(1, [11_600] * 9), make_survey(2, [11_600] * 9)]
    assert paper().plan(group) == []
    moves = predictive().plan(group)
    assert Counter(move.destination for move in moves) == {1: 2, 2: 2}


def test_a_source_that_all_together_have_no_room_for_stays():
    group = [make_survey(0, [9000] * 4), make_survey(1, [11_600] * 9), make_survey(2, [11_600] * 9)]
    assert predictive().plan(group) == []


def test_a_source_with_one_that_nobody_can_take_is_not_stripped_of_the_others():
    tight = predictive(max_stall_s=0.4)  # 10,000 tokens
    others = [make_survey(1, [12_000] * 5), make_survey(2, [12_000] * 5)]
    assert tight.plan([make_survey(0, [12_000, 2000]), *others]) == []
    assert len(tight.plan([make_survey(0, [9000, 2000]), *others])) == 2


def test_one_that_nobody_can_take_keeps_no_other_source_where_it_is():
    tight = predictive(max_stall_s=0.7)  # 17,500 tokens
    lone, source = make_survey(0, [19_000]), make_survey(1, [2600] * 10)
    others = [make_survey(replica, [2000] * 14) for replica in range(2, 6)]
    moves = tight.plan([lone, source, *others])
    assert {1} <= {move.source for move in moves} <= {1, 2}
    assert sum(move.source == 1 for move in moves) == 10


def test_nothing_is_emptied_where_a_larger_batch_costs_as_much_as_it_gives():
    compute_bound = EngineSpeed(
        step_s=0.0006,
        step_s_per_sequence=0.001,
        step_s_per_token=0.0,
        prefill_tokens_per_s=25_000.0,
    )
    group = [make_survey(0, [3000] * 10), make_survey(1, [3000] * 20)]
    assert predictive(max_stall_s=9.0, speed=compute_bound).plan(group) == []
    assert predictive(max_stall_s=9.0).plan(group)


def test_nothing_is_emptied_where_the_freed_would_get_nothing():
    group = [make_survey(0, [9000] * 4), make_survey(1, [9000] * 6), make_survey(2, [9000] * 12, waiting=4)]
    assert {move.prefill for move in predictive(has_demand=False).plan(group)} <= {0}


def test_a_source_about_to_end_by_itself_stays():
    group = [make_survey(0, [9000] * 4), make_survey(1, [9000] * 6)]
    assert predictive(lambda held: np.full(len(held), 10.0)).plan(group) == []
    assert predictive().plan(group)


def test_tokens_that_environments_write_are_no_time_that_emptying_gains():
    group = [make_survey(0, [9000] * 4), make_survey(1, [9000] * 6)]
    assert predictive().plan(group)
    assert predictive().plan([with_turns(survey, observed=0, turns=1) for survey in group])
    assert predictive().plan([with_turns(survey, observed=8990, turns=1) for survey in group]) == []


def test_nothing_is_emptied_where_each_turn_to_come_would_compute_an_evicted_cache_again():
    group = [make_survey(0, [9000] * 4), make_survey(1, [9000] * 6)]
    assert predictive().plan([with_turns(survey, observed=8000, turns=3) for survey in group])
    assert predictive().plan([with_turns(survey, observed=8000, turns=60) for survey in group]) == []


def test_waits_for_environments_are_time_that_emptying_gains():
    group = [make_survey(0, [9000] * 4), make_survey(1, [9000] * 6)]
    few = [with_turns(survey, observed=8700, turns=12) for survey in group]
    away = [with_turns(survey, observed=8700, turns=12, away=9) for survey in group]
    assert predictive().plan(few) == []
    assert {move.source for move in predictive().plan(away)} == {0}


def test_a_destination_whose_cache_is_full_of_responses_that_are_away_receives_last():
    held = msgspec.structs.replace(make_survey(0, [9000] * 2), held_s=12.0, kv_used=0)
    away = msgspec.structs.replace(
        with_turns(make_survey(1, [9000] * 13), observed=90, turns=1, away=13), kv_used=0
    )
    half = with_turns(make_survey(2, [9000] * 6), observed=90, turns=1)
    moves = predictive(lambda held: np.full(len(held), 10.0), hold_s=10.0).plan([held, away, half])
    assert {(move.source, move.destination) for move in moves} == {(0, 2)}


def test_no_waiting_trajectory_goes_where_the_caches_of_others_would_make_room_for_it():
    queue = make_survey(0, [2000] * 40, waiting=4)
    away = msgspec.structs.replace(
        with_turns(make_survey(1, [9000] * 13), observed=90, turns=1, away=13), kv_used=0
    )
    planner = predictive(lambda held: np.full(len(held), 10.0))
    assert planner.plan([queue, away]) == []
    assert len(planner.plan([queue, make_survey(1, [9000] * 3)])) == 4


def test_a_replica_that_held_its_version_for_environments_alone_for_too_long_is_emptied():
    held = msgspec.structs.replace(make_survey(0, [9000] * 4), held_s=12.0, kv_used=0)
    group = [held, make_survey(1, [9000] * 6)]

    def soon(held):
        return np.full(len(held), 10.0)

    assert predictive(soon).plan(group) == [], "without a limit it waits: each is about to end"
    assert predictive(soon, hold_s=20.0).plan(group) == []
    assert {move.source for move in predictive(soon, hold_s=10.0).plan(group)} == {0}


def test_waiting_ones_go_where_there_is_room_from_the_longest_queue_and_without_prefill():
    group = [
        make_survey(0, [2000] * 40, waiting=50),
        make_survey(1, [2000] * 45, waiting=4),
        make_survey(2, [100]),
    ]
    moves = predictive(lambda held: np.full(len(held), 2000.0)).plan(group)
    assert Counter((move.source, move.destination, move.prefill) for move in moves) == {
        (0, 2, 0): 50,
        (1, 2, 0): 4,
    }


def test_what_waits_with_a_cache_to_compute_anew_is_not_shared():
    group = [make_survey(0, [11_600] * 9, continued=[5000]), make_survey(1, [100])]
    assert predictive().plan(group) == []


def test_a_source_stays_until_the_others_can_take_all_of_it_within_the_stall_limit():
    group = [make_survey(0, [9000] * 3), make_survey(1, [9000] * 5)]
    assert predictive(max_stall_s=0.7).plan(group) == []
    assert len(predictive(max_stall_s=2.0).plan(group)) == 3


def test_what_a_source_has_is_spread_so_that_caches_are_as_full_as_each_other():
    group = [make_survey(0, [1000] * 20), make_survey(1, [2000] * 20), make_survey(2, [2000] * 24)]
    used = after(group, predictive().plan(group))
    assert used[0] == [0, 0]
    assert abs(used[1][0] - used[2][0]) <= PROMPT + 1000


def test_as_many_are_emptied_in_a_round_as_the_others_have_room_for():
    group = [make_survey(index, [1000] * 8) for index in range(8)]
    used = after(group, predictive(max_stall_s=9.0).plan(group))
    assert sorted(count for _, count in used.values()) == [0] * 7 + [64]
    used = after(group, predictive(max_stall_s=0.5).plan(group))  # 12,500 tokens
    assert sorted(count for _, count in used.values()) == [0] * 4 + [16] * 4


def test_no_destination_is_filled_until_reading_caches_takes_much_longer_than_reading_weights():
    wide = EngineSpeed(
        step_s=0.02,
        step_s_per_sequence=0.0,
        step_s_per_token=0.02 / 30_000,
        prefill_tokens_per_s=25_000.0,
    )
    group = [make_survey(0, [9000] * 2), make_survey(1, [9000] * 6)]
    assert predictive(speed=wide).plan(group) == [], "30,000 tokens are read in as long as the weights"
    assert len(predictive(speed=wide).plan([group[0], make_survey(1, [9000] * 5)])) == 2


def test_one_that_is_about_to_end_by_itself_keeps_no_other_from_being_emptied():
    ends = make_survey(0, [100])

    def to_come(held):
        return np.array([8000.0 if item.length > 100 else 1.0 for item in held])

    moves = predictive(to_come).plan([ends, make_survey(1, [9000] * 2), make_survey(2, [9000] * 5)])
    assert {(move.source, move.destination) for move in moves} == {(1, 2)}


@pytest.mark.parametrize("planner", [paper(), predictive()])
def test_a_replica_without_work_or_alone_is_no_destination(planner):
    empty = Survey(replica=1, version=7, slots=SLOTS, kv_used=0, kv_capacity=KV, running=())
    assert planner.plan([make_survey(0, [5000])]) == []
    assert planner.plan([make_survey(0, [5000]), empty]) == []


def test_the_forecast_is_asked_for_what_runs():
    asked = []

    def to_come(held):
        asked.extend(held)
        return long(held)

    predictive(to_come).plan([make_survey(0, [7]), make_survey(1, [9000])])
    assert set(asked) == {
        TrajectorySummary(trajectory_id="r0.0", context=407, length=7),
        TrajectorySummary(trajectory_id="r1.0", context=9400, length=9000),
    }


@pytest.mark.parametrize(("name", "kind"), [("paper", PaperPlanner), ("predictive", PredictivePlanner)])
def test_the_registry_has_a_planner_by_name(name, kind):
    planner = PLANNERS.get(name)(context())
    assert isinstance(planner, kind)
    assert planner.plan([]) == []
