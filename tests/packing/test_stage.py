"""Staging follows the buffer, and changes nothing of what a step gets."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.learner.packing.buffer import Buffer
from laminar_py.learner.packing.stage import Packing, StagedGroups
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
            stage.arrived(await buffer.put(f"g{index}", members(index), oldest_version=number))
        elif action == "shrink" and number < len(buffer) and buffer[number].members:
            group = buffer[number]
            dropped, group.members = group.members[:1], group.members[1:]
            stage.shrunk(number, dropped, gone=not group.members)
            if not group.members:
                buffer.take([group])
        elif action == "take" and len(buffer) >= SIZE:
            window = buffer.first(SIZE + 2)
            chosen = window[: SIZE - 1] + window[-1:]
            assert ids(stage.settle(chosen)) == sorted(t.id for group in chosen for t in group.members)
            buffer.take(chosen)
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
    assert ids(stage.settle(chosen)) == sorted(t.id for group in chosen for t in group.members)
