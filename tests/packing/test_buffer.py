"""The buffer, staging, look-ahead and the reference queue: a step gets exactly the groups that were chosen."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.learner.packing.buffer import (
    LOOSE_BINS,
    Buffer,
    Packing,
    PackQueue,
    StagedGroups,
    StreamPacker,
    choose_groups,
)
from tests.builders import make_finished
from tests.depth import examples

SIZE = 3
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "put", "put", "shrink", "take"]), st.integers(0, 5)), max_size=40
)


def members(index):
    return [make_finished(f"g{index}.{k}", response=1 + (index + k) % 7) for k in range(index % 4)]


def ids(bins):
    return sorted(entry.trajectory.id for packed in bins for entry in packed.entries)


async def play(actions):
    buffer = Buffer()
    stage = StagedGroups(buffer, Packing(groups=SIZE, max_tokens=16))
    for index, (action, number) in enumerate(actions):
        if action == "put":
            stage.group_arrived(await buffer.add_group(f"g{index}", members(index), oldest_version=number))
        elif action == "shrink" and number < len(buffer) and buffer[number].members:
            group = buffer[number]
            dropped, group.members = group.members[:1], group.members[1:]
            stage.group_shrunk(number, dropped, gone=not group.members)
            if not group.members:
                buffer.remove_groups([group])
        elif action == "take" and len(buffer) >= SIZE:
            window = buffer.first(SIZE + 2)
            chosen = window[: SIZE - 1] + window[-1:]
            assert ids(stage.pack_groups(chosen)) == sorted(t.id for group in chosen for t in group.members)
            buffer.remove_groups(chosen)
        assert stage.num_staged <= min(SIZE, len(buffer))
    return buffer, stage


@settings(max_examples=examples(150), deadline=None)
@given(ACTIONS)
def test_a_step_gets_exactly_the_groups_that_were_chosen_whatever_was_staged(actions):
    asyncio.run(play(actions))


async def test_a_step_is_staged_before_it_is_asked_for():
    _, stage = await play([("put", 0)] * SIZE)
    assert stage.num_staged == SIZE


async def test_an_older_group_takes_the_place_of_the_youngest_that_is_staged():
    buffer, stage = await play([("put", 5), ("put", 4), ("put", 3), ("put", 2)])
    assert stage.num_staged == SIZE
    assert [group.oldest_version for group in buffer.first(SIZE)] == [2, 3, 4]
    chosen = buffer.first(SIZE)
    assert ids(stage.pack_groups(chosen)) == sorted(t.id for group in chosen for t in group.members)


CAP = 16  # so that a few hundred sequences fill many bins
CHANGES = st.lists(st.tuples(st.booleans(), st.integers(2, CAP)), max_size=400)


def sequence(index, num_tokens):
    return make_finished(f"g{index}.0", prompt=1, response=num_tokens - 1)


def held(packer):
    return sorted(entry.trajectory.id for packed in packer.bins() for entry in packed.entries)


@settings(max_examples=examples(50), deadline=None)
@given(CHANGES)
def test_bins_hold_exactly_what_was_added_and_not_removed(changes):
    packer, here = StreamPacker(max_tokens=CAP), {}
    for index, (removes, number) in enumerate(changes):
        if removes and here:
            packer.remove(here.pop(list(here)[number % len(here)]))
        else:
            here[index] = f"g{index}.0"
            packer.add(sequence(index, number))
    assert held(packer) == sorted(here.values())
    assert len(packer) == len(here)
    assert all(packed.num_tokens <= CAP for packed in packer.bins())


def test_full_bins_are_kept_while_more_comes_in():
    packer = StreamPacker(max_tokens=CAP)
    for index in range(4 * LOOSE_BINS):
        packer.add(sequence(index, CAP // 2))
    before = {id(packed) for packed in packer.bins()}
    packer.add(sequence(4 * LOOSE_BINS, CAP // 2))
    assert len(before & {id(packed) for packed in packer.bins()}) == 2 * LOOSE_BINS


def test_a_stream_fills_as_well_as_a_batch():
    rng = np.random.default_rng(1)
    lengths = np.clip(64 * np.exp(0.99 * rng.standard_normal(1500)), 2, 512).astype(int).tolist()
    packer = StreamPacker(max_tokens=512)
    for index, length in enumerate(lengths):
        packer.add(sequence(index, length))
    assert len(packer.bins()) <= np.ceil(1.005 * sum(lengths) / 512)


def test_a_sequence_above_the_cap_is_refused_by_name():
    with pytest.raises(ValueError, match=r"g7\.0 has 17 tokens, packer\.max_tokens=16"):
        StreamPacker(max_tokens=CAP).add(sequence(7, 17))


def test_a_sequence_is_packed_once():
    packer = StreamPacker(max_tokens=CAP)
    packer.add(sequence(7, 4))
    with pytest.raises(AssertionError, match="twice"):
        packer.add(sequence(7, 4))


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
