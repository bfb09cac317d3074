"""Between two versions only what changed travels, and every node ends with the same bytes."""

import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from laminar_py.relay.delta import Difference, pack
from laminar_py.relay.digests import delta_proof
from laminar_py.relay.messages import Announce, Chunk, Fetch, VersionComplete
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.version_store import SPARE
from tests.relay.tree import (
    CHUNK,
    ByHand,
    Events,
    HandParent,
    Learner,
    below_hand,
    chain,
    changed,
    fetch,
    folder_bytes,
    growing,
    make_node,
    publish,
    receive,
    running,
    tensors,
    until,
    write_version,
)

LARGE = 2**16  # bytes of a chunk beside which a small delta is small
BIG = 1_000_000  # bytes, beside which headers are small


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


def spy_on_rebuilding(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Version and way of each chunk that nodes make of deltas from now on: True for in place."""
    rebuild, seen = StoredVersion.rebuild, list[tuple[int, bool]]()

    def look(stored: StoredVersion, base: StoredVersion, file: int, index: int) -> bool:
        seen.append((stored.manifest.version, stored.is_in_place(file, index)))
        return rebuild(stored, base, file, index)

    monkeypatch.setattr(StoredVersion, "rebuild", look)
    return seen


async def test_twenty_versions_are_made_in_place_and_equal_also_at_a_late_joiner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the fourth delta on an older version's pages are brought up to date, until a version is skipped."""
    seen, events, weights = spy_on_rebuilding(monkeypatch), Events(), tensors(1, BIG)
    async with (
        growing(tmp_path, chain(2), emit=events, chunk_bytes=LARGE) as nodes,
        Learner(tmp_path, chunk_bytes=LARGE) as learner,
    ):
        late = make_node(tmp_path, "relay-2", nodes[1].endpoint, emit=events, chunk_bytes=LARGE)
        for version in range(1, 11):
            await publish(learner, version, weights := changed(weights, every=100, start=version))
            await complete(events, 2, version)
            assert_equal(tmp_path, 2, version)
        async with running(late):
            for version in range(11, 21):
                if version == 15:  # the root finds both at once
                    await publish(learner, 14, weights := changed(weights, every=100, start=version))
                if version != 14:
                    await publish(learner, version, weights := changed(weights, every=90, start=version))
                    await complete(events, 3, version)
                    assert_equal(tmp_path, 3, version)
    in_place = {version for version, there in seen if there}
    assert {version for version, there in seen if not there} & {*range(6, 14)} <= {11, 12, 13}, "by relay-2"
    assert in_place >= {*range(5, 14), 20}


async def test_a_bit_that_flips_in_reused_pages_costs_one_chunk(tmp_path: Path) -> None:
    events, weights = Events(), tensors(1, BIG)
    async with (
        growing(tmp_path, chain(2), emit=events, chunk_bytes=LARGE),
        Learner(tmp_path, chunk_bytes=LARGE) as learner,
    ):
        for version in range(1, 7):
            await publish(learner, version, weights := changed(weights, every=100, start=version))
            (event,) = await complete(events, 2, version)
            if version == 5:
                await until((tmp_path / "relay-1" / SPARE).exists)
                (spare,) = (tmp_path / "relay-1" / SPARE).glob("*.safetensors")
                with spare.open("r+b") as pages:
                    pages.seek(200_001)
                    byte = pages.read(1)[0]
                    pages.seek(200_001)
                    pages.write(bytes([byte ^ 4]))
        assert LARGE < event.wire_bytes < LARGE + 0.1 * event.num_bytes
        assert_equal(tmp_path, 2, 6)


async def test_a_reused_file_that_somebody_reads_is_left_to_him(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, events, weights = spy_on_rebuilding(monkeypatch), Events(), tensors(1, BIG)
    async with (
        growing(tmp_path, chain(2), emit=events, chunk_bytes=LARGE),
        Learner(tmp_path, chunk_bytes=LARGE) as learner,
    ):
        for version in range(1, 7):
            if version == 6:
                await until((tmp_path / "relay-1" / SPARE).exists)
                (spare,) = (tmp_path / "relay-1" / SPARE).glob("*.safetensors")
                reader = spare.open("rb")
                before = reader.read()
            await publish(learner, version, weights := changed(weights, every=100, start=version))
            await complete(events, 2, version)
        assert {there for version, there in seen if version == 6} == {False}
        with reader:
            assert os.pread(reader.fileno(), len(before), 0) == before
        assert_equal(tmp_path, 2, 6)


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


async def test_a_delta_that_is_damaged_or_makes_something_else_is_asked_for_again(tmp_path: Path) -> None:
    """Its own checksum shows damage at once; what it makes is compared with the chunk's checksum at the end."""
    base = write_version(tmp_path / "origin", 1, 2 * CHUNK)
    manifest = msgspec.structs.replace(base.manifest, version=2)
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(object)
        parent.send(Announce(base.manifest))
        parent.send_all(base)
        await events.first(VersionComplete, version=1)
        parent.send(Announce(manifest, base=1))
        while (await parent.receive(Fetch)).base is None:
            pass
        right, wrong = base.read_chunk(0, 0), pack(Difference(np.array([5]), np.array([1], "<u4"), b""), CHUNK)
        for data, base_of_it, other in ((b"", 1, b"x"), (b"", 7, b"")):
            parent.send(delta_of(right, base_of_it, data, proof=delta_proof(base.manifest.digest, other)))
        assert {await refetched(parent) for _ in range(2)} == {(0, None)}
        parent.send(delta_of(base.read_chunk(0, 1), 1, wrong, proof=delta_proof(base.manifest.digest, wrong)))
        parent.send(msgspec.structs.replace(right, version=2))
        assert await refetched(parent) == (1, None)
        parent.send(msgspec.structs.replace(base.read_chunk(0, 1), version=2))
        complete_there = await events.first(VersionComplete, version=2)
        assert complete_there.wire_bytes == 2 * CHUNK + len(wrong)
    assert folder_bytes(tmp_path / "relay-1" / "v2") == folder_bytes(base.folder)


async def test_a_delta_for_another_content_of_the_base_is_refused(tmp_path: Path) -> None:
    base, other = (write_version(tmp_path / name, 1, CHUNK) for name in ("origin", "other"))
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(object)
        parent.send(Announce(base.manifest))
        parent.send_all(base)
        await events.first(VersionComplete, version=1)
        parent.send(Announce(msgspec.structs.replace(base.manifest, version=2), base=1))
        while (await parent.receive(Fetch)).base is None:
            pass
        chunk = base.read_chunk(0, 0)
        parent.send(delta_of(chunk, 1, b"", proof=delta_proof(other.manifest.digest, b"")))
        assert await refetched(parent) == (0, None)


def delta_of(chunk: Chunk, base: int, payload: bytes, *, proof: bytes) -> Chunk:
    """A delta that makes `chunk` of a version 2, or says so."""
    return msgspec.structs.replace(chunk, version=2, base=base, data=memoryview(payload), proof=proof)


async def refetched(parent: HandParent) -> tuple[int, int | None]:
    """Chunk and base of the next request."""
    fetch = await parent.receive(Fetch)
    return fetch.first_chunk, fetch.base


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
