"""Look-ahead, and the queue of the reference stage."""

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.learner.packing.buffer import PackQueue, choose_groups
from tests.builders import make_finished

WINDOWS = st.lists(st.tuples(st.integers(0, 100), st.booleans()), min_size=1, max_size=30)


def test_a_pair_that_fits_is_taken_for_one_that_does_not():
    assert choose_groups([60, 50, 35], due=[False] * 3, count=2, unit=100) == [0, 2]


@settings(deadline=None)
@given(WINDOWS, st.integers(1, 30))
def test_as_many_as_asked_for_and_no_due_group_is_left_out_for_a_later_one(window, count):
    tokens, due = zip(*window, strict=True)
    count = min(count, len(window))
    chosen = choose_groups(tokens, due=due, count=count, unit=100)
    assert len(chosen) == len(set(chosen)) == count
    assert chosen == sorted(chosen)
    passed = set(range(chosen[-1])) - set(chosen)
    assert not any(due[place] for place in passed)


@settings(deadline=None)
@given(WINDOWS)
def test_without_a_window_staleness_order_stands(window):
    tokens, due = zip(*window, strict=True)
    assert choose_groups(tokens, due=due, count=len(tokens), unit=100) == list(range(len(tokens)))


def test_equal_groups_stay_in_order():
    assert choose_groups([50] * 10, due=[False] * 10, count=4, unit=100) == [0, 1, 2, 3]


def test_steps_of_few_microbatches_are_fuller_with_a_window():
    rng = np.random.default_rng(0)
    groups = np.clip(2048 * np.exp(0.99 * rng.standard_normal((400, 8))), 1, 16384).sum(1).astype(int).tolist()
    unit = 8 * 16384

    def num_units(window):
        ready, used = list(groups), 0
        while len(ready) >= 8 + window:
            chosen = choose_groups(ready[: 8 + window], due=[False] * (8 + window), count=8, unit=unit)
            used += -(-sum(ready[place] for place in chosen) // unit)
            ready = [size for place, size in enumerate(ready) if place not in chosen]
        return used / (len(groups) - len(ready))

    assert num_units(8) < 0.95 * num_units(0)


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def filled(lengths, *, max_tokens=64):
    queue = PackQueue(max_tokens=max_tokens)
    for index, length in enumerate(lengths):
        queue.add_trajectory(make_finished(f"g{index}.0", prompt=3, response=length))
    return queue


async def taken(queue, *, wanted=lambda id: True):
    out = []
    while len(queue):
        out.append(await asyncio.wait_for(queue.next_batch(wanted=wanted), 10))
    return out


@settings(deadline=None)
@given(LENGTHS)
def test_all_go_once_in_order_and_together_as_far_as_they_fit(lengths):
    bundles = asyncio.run(taken(filled(lengths)))
    assert [item.id for bundle in bundles for item in bundle] == [f"g{index}.0" for index in range(len(lengths))]
    sizes = [sum(item.num_tokens for item in bundle) for bundle in bundles]
    assert all(size <= 64 for size in sizes)
    assert all(size + after[0].num_tokens > 64 for size, after in zip(sizes, bundles[1:], strict=False))


async def test_one_that_is_longer_than_a_pass_goes_alone():
    bundles = await taken(filled([5, 200, 5]))
    assert [len(bundle) for bundle in bundles] == [1, 1, 1]


async def test_what_nobody_wants_any_more_is_left_out():
    queue = filled([5, 5, 5])
    [bundle] = await taken(queue, wanted=lambda id: id != "g1.0")
    assert [item.id for item in bundle] == ["g0.0", "g2.0"]


async def test_a_taker_waits_for_the_first_that_is_wanted():
    queue = filled([5])
    taker = asyncio.create_task(queue.next_batch(wanted=lambda id: id == "g7.0"))
    await asyncio.sleep(0)
    queue.add_trajectory(make_finished("g7.0"))
    [item] = await asyncio.wait_for(taker, 10)
    assert item.id == "g7.0"
