"""Look-ahead: what it may pass over, and what it gains."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.learner.packing.window import choose

WINDOWS = st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=30)


def test_a_pair_that_fits_is_taken_for_one_that_does_not():
    assert choose([60, 50, 35], due=[False] * 3, count=2, unit=100) == [0, 2]


@settings(deadline=None)
@given(WINDOWS, st.integers(1, 30))
def test_as_many_as_asked_for_and_no_due_group_is_left_out_for_a_later_one(window, count):
    tokens, due = zip(*window, strict=True)
    count = min(count, len(window))
    chosen = choose(tokens, due=due, count=count, unit=100)
    assert len(chosen) == len(set(chosen)) == count
    assert chosen == sorted(chosen)
    passed = set(range(chosen[-1])) - set(chosen)
    assert not any(due[place] for place in passed)


@settings(deadline=None)
@given(WINDOWS)
def test_without_a_window_staleness_order_stands(window):
    tokens, due = zip(*window, strict=True)
    assert choose(tokens, due=due, count=len(tokens), unit=100) == list(range(len(tokens)))


def test_equal_groups_stay_in_order():
    assert choose([50] * 10, due=[False] * 10, count=4, unit=100) == [0, 1, 2, 3]


def test_steps_of_few_microbatches_are_fuller_with_a_window():
    rng = np.random.default_rng(0)
    groups = np.clip(2048 * np.exp(0.99 * rng.standard_normal((400, 8))), 1, 16384).sum(1).astype(int).tolist()
    unit = 8 * 16384

    def num_units(window):
        ready, used = list(groups), 0
        while len(ready) >= 8 + window:
            chosen = choose(ready[: 8 + window], due=[False] * (8 + window), count=8, unit=unit)
            used += -(-sum(ready[place] for place in chosen) // unit)
            ready = [size for place, size in enumerate(ready) if place not in chosen]
        return used / (len(groups) - len(ready))

    assert num_units(8) < 0.95 * num_units(0)
