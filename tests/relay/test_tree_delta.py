"""Between two versions only what changed travels, and every node ends with the same bytes."""

from pathlib import Path

import msgspec
import torch

from laminar_py.relay.messages import Announce, Chunk, Fetch, VersionComplete
from tests.relay.tree import (
    CHUNK,
    ByHand,
    Events,
    Learner,
    chain,
    fetch,
    folder_bytes,
    growing,
    make_node,
    receive,
    running,
    tensors,
    write_version,
)

BIG = 1_000_000  # bytes, beside which headers are small


def changed(given: list[tuple[str, torch.Tensor]], every: int) -> list[tuple[str, torch.Tensor]]:
    """One in so many elements moves by one unit in the last place."""
    moved = []
    for name, tensor in given:
        bits = tensor.clone().view(torch.int16).reshape(-1)
        bits[::every] += 1
        moved.append((name, bits.view(torch.bfloat16).reshape(tensor.shape)))
    return moved


async def publish(learner: Learner, version: int, given: list[tuple[str, torch.Tensor]]) -> None:
    learner.publisher.publish(version, given)
    learner.publisher.completed(version)


async def complete(events: Events, nodes: int, version: int) -> list[VersionComplete]:
    return [await events.first(VersionComplete, node=f"relay-{n}", version=version) for n in range(1, nodes)]


def assert_equal(folder: Path, nodes: int, version: int) -> None:
    origin = folder_bytes(folder / "relay-0" / f"v{version}")
    assert origin
    for node in range(1, nodes):
        assert folder_bytes(folder / f"relay-{node}" / f"v{version}") == origin


async def test_what_did_not_change_does_not_travel(tmp_path: Path) -> None:
    events, first = Events(), tensors(1, BIG)
    async with (
        growing(tmp_path, chain(3), emit=events),
        Learner(tmp_path) as learner,
    ):
        await publish(learner, 1, first)
        full = await complete(events, 3, 1)
        await publish(learner, 2, changed(first, every=100))
        delta = await complete(events, 3, 2)
        assert all(event.wire_bytes >= event.num_bytes for event in full)
        assert all(event.wire_bytes < 0.1 * event.num_bytes for event in delta)
        assert len({event.wire_bytes for event in delta}) == 1, "passed on as it came"
        assert_equal(tmp_path, 3, 2)


async def test_weights_that_changed_everywhere_travel_as_they_are(tmp_path: Path) -> None:
    events = Events()
    async with (
        growing(tmp_path, chain(2), emit=events),
        Learner(tmp_path) as learner,
    ):
        for version in (1, 2):
            await publish(learner, version, tensors(version, BIG))
            (event,) = await complete(events, 2, version)
        assert BIG <= event.wire_bytes <= event.num_bytes
        assert_equal(tmp_path, 2, 2)


async def test_a_node_without_the_base_gets_all_of_it_from_a_parent_that_got_a_delta(tmp_path: Path) -> None:
    events, first = Events(), tensors(1, BIG)
    async with (
        growing(tmp_path, chain(2), emit=events) as nodes,
        Learner(tmp_path) as learner,
    ):
        await publish(learner, 1, first)
        await complete(events, 2, 1)
        await publish(learner, 2, changed(first, every=100))
        await complete(events, 2, 2)
        late = make_node(tmp_path, "relay-2", nodes[1].endpoint, emit=events)
        async with running(late):
            (*_, event) = await complete(events, 3, 2)
        assert event.wire_bytes == event.num_bytes
        assert_equal(tmp_path, 3, 2)


async def test_a_node_that_skips_a_version_gets_the_next_one_in_full_and_then_deltas_again(tmp_path: Path) -> None:
    events, weights = Events(), [tensors(1, BIG)]
    for _ in range(3):
        weights.append(changed(weights[-1], every=100))
    async with (
        growing(tmp_path, chain(2), emit=events),
        Learner(tmp_path) as learner,
    ):
        await publish(learner, 1, weights[0])
        await complete(events, 2, 1)
        await publish(learner, 2, weights[1])  # the test holds the loop, so the root finds both at once
        await publish(learner, 3, weights[2])
        (skipping,) = await complete(events, 2, 3)
        await publish(learner, 4, weights[3])
        (after,) = await complete(events, 2, 4)
        assert (skipping.base, skipping.wire_bytes) == (None, skipping.num_bytes), (
            "its base is 2, which it skipped"
        )
        assert after.base == 3
        assert after.wire_bytes < 0.1 * after.num_bytes
        assert_equal(tmp_path, 2, 4)


async def test_layouts_that_differ_make_no_delta(tmp_path: Path) -> None:
    events = Events()
    async with (
        growing(tmp_path, chain(2), emit=events),
        Learner(tmp_path) as learner,
    ):
        await publish(learner, 1, tensors(1, BIG))
        await complete(events, 2, 1)
        await publish(learner, 2, tensors(1, BIG + CHUNK))
        (event,) = await complete(events, 2, 2)
        assert event.wire_bytes == event.num_bytes
        assert_equal(tmp_path, 2, 2)


async def test_a_delta_that_makes_something_else_is_asked_for_again(tmp_path: Path) -> None:
    base = write_version(tmp_path / "origin", 1, 2 * CHUNK)
    manifest = msgspec.structs.replace(base.manifest, version=2)
    async with ByHand() as hand:
        parent = hand.parent()
        async with running(make_node(tmp_path, "relay-1", parent.endpoint, emit=(events := Events()))):
            await parent.receive(object)
            parent.send(Announce(base.manifest))
            parent.send_all(base)
            await events.first(VersionComplete, version=1)
            parent.send(Announce(manifest, base=1))
            while (await parent.receive(Fetch)).base is None:
                pass
            right = base.read_chunk(0, 0)
            for data, base_of_it in ((b"nonsense", 1), (b"", 7), (b"", 1)):
                parent.send(
                    Chunk(
                        version=2, file=0, index=0, checksum=right.checksum, base=base_of_it, data=memoryview(data)
                    )
                )
            parent.send(msgspec.structs.replace(base.read_chunk(0, 1), version=2))
            again = [await parent.receive(Fetch) for _ in range(2)]
            assert {(fetch.first_chunk, fetch.base) for fetch in again} == {(0, None)}
            assert (await events.first(VersionComplete, version=2)).wire_bytes == CHUNK


async def test_a_child_that_asks_for_no_delta_gets_none(tmp_path: Path) -> None:
    first = tensors(1, BIG)
    async with running(root := make_node(tmp_path, "relay-0")), ByHand() as hand:
        child = await hand.child(root.endpoint)
        async with Learner(tmp_path) as learner:
            await publish(learner, 1, first)
            assert (await receive(child, Announce)).manifest.version == 1
            await publish(learner, 2, changed(first, every=100))
            announce = await receive(child, Announce)
            assert (announce.manifest.version, announce.base) == (2, 1)
            assert (await fetch(child, announce.manifest, 1)).base is None
            child.send(Fetch(version=2, file=0, first_chunk=1, credits=1, base=1))
            assert (await receive(child, Chunk)).base == 1
