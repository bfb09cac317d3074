"""The queue of the reference stage."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.learner.packing.buffer import PackQueue
from tests.builders import make_finished

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
