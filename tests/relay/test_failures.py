"""The tree heals: dead parents, dead nodes, damaged chunks, full file systems."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from laminar_py.relay.digests import version_digest
from laminar_py.relay.messages import (
    Announce,
    Attach,
    Chunk,
    Failed,
    Fetch,
    FileEntry,
    Manifest,
    ParentLost,
    VersionComplete,
    VersionFailed,
)
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.subscriber import RelayError, Subscriber
from laminar_py.relay.tree import versions_at_peak
from laminar_py.relay.version_layout import HEADER_BYTES
from tests.relay.faults import small_disk
from tests.relay.node_process import NodeProcess
from tests.relay.tree import (
    CHUNK,
    KEYS,
    ByHand,
    Events,
    Learner,
    below_hand,
    chain,
    fetch,
    folder_bytes,
    growing,
    make_node,
    receive,
    running,
    subscriber,
    write_version,
)

TOO_MUCH = 2**60  # bytes


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def damaged(version: StoredVersion, index: int) -> Chunk:
    """The chunk with its first byte changed on the way."""
    chunk = version.read_chunk(0, index)
    data = bytes([chunk.data[0] ^ 1]) + bytes(chunk.data[1:])
    return msgspec.structs.replace(chunk, data=memoryview(data))


def manifest_of(version: int, size: int) -> Manifest:
    """Of one file that exists nowhere."""
    files = (FileEntry("model-0.safetensors", size, "00" * 32),)
    return Manifest(version, version_digest(files), CHUNK, files)


async def test_children_find_a_parent_revived_on_its_port(tmp_path: Path) -> None:
    events = Events()
    root = make_node(tmp_path, "relay-0")
    async with running(root):
        child = make_node(tmp_path, "relay-1", root.endpoint, parent_timeout_s=20.0, emit=events)
        async with running(child), Learner(tmp_path) as learner:
            await learner.publish(1)
            await events.first(VersionComplete, version=1)
            await root.close()
            await learner.publish(2)  # nobody is there to hear of it
            async with running(make_node(tmp_path, "relay-0", port=port_of(root.endpoint))):
                await events.first(VersionComplete, version=2)
                await learner.publish(3)
                await events.first(VersionComplete, version=3)
    assert not [event for event in events.seen if isinstance(event, ParentLost)]


async def test_a_node_whose_parent_is_gone_for_good_turns_to_the_next_ancestor(tmp_path: Path) -> None:
    events = Events()
    async with (
        growing(tmp_path, chain(4), parent_timeout_s=0.3, emit=events) as nodes,
        Learner(tmp_path) as learner,
    ):
        await learner.publish(1)
        await events.first(VersionComplete, node="relay-3", version=1)
        await nodes[1].close()
        await events.first(ParentLost, node="relay-2", old=nodes[1].endpoint, new=nodes[0].endpoint)
        await learner.publish(2)
        await events.first(VersionComplete, node="relay-3", version=2)
    assert folder_bytes(tmp_path / "relay-3" / "v2") == folder_bytes(tmp_path / "relay-0" / "v2")


async def test_a_node_returns_to_its_parent_when_that_is_back(tmp_path: Path) -> None:
    events = Events()
    async with running(root := make_node(tmp_path, "relay-0")), Learner(tmp_path) as learner:
        parent = make_node(tmp_path, "relay-1", root.endpoint)
        await parent.start()
        endpoint = parent.endpoint
        await parent.close()
        leaf = make_node(
            tmp_path, "relay-2", endpoint, root.endpoint, emit=events, visit_s=0.2, parent_timeout_s=0.3
        )
        async with running(leaf):
            await events.first(ParentLost, node="relay-2", new=root.endpoint)
            await learner.publish(1)
            await events.first(VersionComplete, version=1)
            port = int(endpoint.rpartition(":")[2])
            async with running(make_node(tmp_path, "relay-1", root.endpoint, port=port)):
                events.seen.clear()
                await events.first(ParentLost, node="relay-2", old=root.endpoint, new=endpoint)
                await learner.publish(2)
                await events.first(VersionComplete, version=2)


async def test_a_new_parent_is_asked_from_the_first_missing_chunk(tmp_path: Path) -> None:
    version, events = write_version(tmp_path / "origin", 1, 6 * CHUNK), Events()
    async with ByHand() as hand:
        first, second = hand.parent(), hand.parent()
        node = make_node(tmp_path, "relay-1", first.endpoint, second.endpoint, emit=events)
        async with running(node):
            await first.receive(Attach)
            first.send(Announce(version.manifest))
            await first.receive(Fetch)
            first.send_chunk(version, 0)
            first.send_chunk(version, 1)
            first.send(Failed(1, "it has no room for the rest"))
            await second.receive(Attach)
            second.send(Announce(version.manifest))
            assert await second.receive(Fetch) == Fetch(version=1, file=0, first_chunk=2, credits=4)
            second.send_all(version)
            await events.first(VersionComplete, version=1)
    assert folder_bytes(tmp_path / "relay-1" / "v1") == folder_bytes(version.folder)


async def test_a_node_killed_in_the_middle_starts_over_and_ends_right(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, 6 * CHUNK)
    async with ByHand() as hand:
        parent = hand.parent()
        process = NodeProcess(tmp_path / "relay-1", parent.endpoint, KEYS)
        endpoint = await asyncio.to_thread(process.start)
        replica = Subscriber(endpoint, "replica", KEYS, heartbeat_s=1.0)
        async with running(replica), asyncio.TaskGroup() as group:
            pull = group.create_task(replica.pull())
            await parent.receive(Attach)
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            parent.send_chunk(version, 0)
            parent.send(damaged(version, 1))
            await parent.receive(Fetch)  # chunk 1 again, so chunk 0 is on disk
            await asyncio.to_thread(process.kill)
            assert (tmp_path / "relay-1" / "v1.part").is_dir()
            assert await asyncio.to_thread(process.start, port_of(endpoint)) == endpoint
            await parent.receive(Attach)
            parent.send(Announce(version.manifest))
            assert await parent.receive(Fetch) == Fetch(version=1, file=0, first_chunk=0, credits=6)
            parent.send_all(version)
            assert (await pull).digest == version.manifest.digest
        await asyncio.to_thread(process.kill)
    assert folder_bytes(tmp_path / "relay-1" / "v1") == folder_bytes(version.folder)


async def test_a_root_that_comes_back_at_another_port_finds_what_is_published_and_is_followed(
    tmp_path: Path,
) -> None:
    """It looks around too seldom to find it so."""
    events = Events()
    async with Learner(tmp_path) as learner, running(first := make_node(tmp_path, "relay-0")):
        child = make_node(tmp_path, "relay-1", first.endpoint, emit=events)
        async with running(child):
            await learner.publish(1)
            await events.first(VersionComplete, node="relay-1", version=1)
            await first.close()
            moved = make_node(tmp_path, "relay-0", parent_timeout_s=300.0)
            async with running(moved):
                child.set_parents([moved.endpoint])
                await learner.publish(2)
                await events.first(VersionComplete, node="relay-1", version=2)
    assert ParentLost("relay-1", first.endpoint, moved.endpoint) in events.seen


async def test_a_damaged_chunk_is_asked_for_again(tmp_path: Path) -> None:
    version, events = write_version(tmp_path / "origin", 1, 3 * CHUNK), Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(version.manifest))
        await parent.receive(Fetch)
        for chunk in (version.read_chunk(0, 0), damaged(version, 1), version.read_chunk(0, 2)):
            parent.send(chunk)
        assert await parent.receive(Fetch) == Fetch(version=1, file=0, first_chunk=1, credits=1)
        parent.send_chunk(version, 1)
        await events.first(VersionComplete, version=1)
    assert folder_bytes(tmp_path / "relay-1" / "v1") == folder_bytes(version.folder)


async def test_a_file_with_a_wrong_digest_is_fetched_anew_before_it_is_served(tmp_path: Path) -> None:
    version, events = write_version(tmp_path / "origin", 1, 2 * CHUNK), Events()
    wrong = write_version(tmp_path / "wrong", 1, 2 * CHUNK)
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(version.manifest))
        await parent.receive(Fetch)
        parent.send_all(wrong)  # whose chunks have right checksums
        assert await parent.receive(Fetch) == Fetch(version=1, file=0, first_chunk=0, credits=2)
        assert not events.seen
        parent.send_all(version)
        await events.first(VersionComplete, version=1)
    assert folder_bytes(tmp_path / "relay-1" / "v1") == folder_bytes(version.folder)


async def test_a_version_that_keeps_coming_damaged_is_given_up_and_the_next_one_taken(tmp_path: Path) -> None:
    version, events = write_version(tmp_path / "origin", 1, 2 * CHUNK), Events()
    successor = write_version(tmp_path / "origin", 2, CHUNK)
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(version.manifest))
        await parent.receive(Fetch)
        for _ in range(3):
            parent.send(damaged(version, 1))
        assert "chunk 1 of model-0" in (await events.first(VersionFailed, version=1)).reason
        parent.send(Announce(successor.manifest))
        parent.send_all(successor)
        await events.first(VersionComplete, version=2)


async def test_a_manifest_whose_digest_is_not_that_of_its_files_is_refused(tmp_path: Path) -> None:
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(msgspec.structs.replace(manifest_of(1, CHUNK), digest="11" * 32)))
        await events.first(VersionFailed, version=1)


async def test_a_version_without_room_is_refused_by_name_and_the_next_one_taken(tmp_path: Path) -> None:
    version, events = write_version(tmp_path / "origin", 2, CHUNK), Events()
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, emit=events)
        async with running(node), running(replica := subscriber(node, "replica")):
            await parent.receive(Attach)
            parent.send(Announce(manifest_of(1, TOO_MUCH)))
            reason = (await events.first(VersionFailed, version=1)).reason
            assert f"relay.shm={tmp_path / 'relay-1'}" in reason
            assert str(TOO_MUCH) in reason
            for question in (replica.wait_newer(-1), replica.pull()):
                with pytest.raises(RelayError, match=r"relay\.shm="):
                    await question
            parent.send(Announce(version.manifest))
            parent.send_all(version)
            await events.first(VersionComplete, version=2)
            assert (await replica.pull()).version == 2


async def test_below_a_node_without_room_children_turn_to_the_next_parent(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-0", 1, 3 * CHUNK)
    events = Events()
    async with ByHand() as hand, running(root := make_node(tmp_path, "relay-0")):
        full = hand.parent()
        child = make_node(tmp_path, "relay-2", full.endpoint, root.endpoint, emit=events)
        async with running(child):
            await full.receive(Attach)
            full.send(Failed(1, "relay.shm=/dev/shm: too small"))
            await events.first(VersionComplete, node="relay-2", version=1)
    assert ParentLost("relay-2", full.endpoint, root.endpoint) in events.seen


async def test_chunks_above_the_configured_size_are_refused_by_name(tmp_path: Path) -> None:
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(msgspec.structs.replace(manifest_of(1, CHUNK), chunk_bytes=2 * CHUNK)))
        assert "above the 4096 of this node" in (await events.first(VersionFailed, version=1)).reason


async def test_a_foreign_address_is_refused_by_name(tmp_path: Path) -> None:
    node = make_node(tmp_path, "relay-0", host="192.0.2.1")
    with pytest.raises(ValueError, match=r"relay\.host=192\.0\.2\.1"):
        await node.start()
    await node.close()


async def test_a_version_whose_file_somebody_deletes_is_given_up_and_the_next_one_taken(tmp_path: Path) -> None:
    old, new = (write_version(tmp_path / "origin", number, 3 * CHUNK) for number in (1, 2))
    async with ByHand() as hand:
        parent = hand.parent()
        async with running(node := make_node(tmp_path, "relay-1", parent.endpoint, emit=(events := Events()))):
            child = await hand.child(node.endpoint)
            await parent.receive(Attach)
            parent.send(Announce(old.manifest))
            await parent.receive(Fetch)
            parent.send_chunk(old, 0)
            await fetch(child, (await receive(child, Announce)).manifest, 0)
            (tmp_path / "relay-1" / "v1.part" / "model-0.safetensors").unlink()
            for index in (1, 2):
                parent.send_chunk(old, index)
            assert "deleted" in (await events.first(VersionFailed, version=1)).reason
            parent.send(Announce(new.manifest))
            parent.send_all(new)
            await events.first(VersionComplete, version=2)


async def test_the_planned_memory_holds_all_that_is_there_at_the_peak(tmp_path: Path) -> None:
    """Versions overtake each other, a subscriber holds old ones, and a file system of just that size has room."""
    size = 2**20
    no_slow_child = versions_at_peak(keep_versions=2, num_replicas=1) - 1
    planned = no_slow_child * (size + HEADER_BYTES)
    with small_disk(tmp_path / "relay-1", planned + 24 * 4096) as mounted:  # manifests, checksums, a pin
        if not mounted:
            pytest.skip("mounting needs root on Linux")
        async with (
            growing(tmp_path, chain(2), keep_versions=2, emit=(events := Events())) as nodes,
            Learner(tmp_path) as learner,
            running(replica := subscriber(nodes[1], "replica")),
        ):
            for version in range(1, 13):
                await learner.publish(version, size)
                if version % 3 == 0:
                    await replica.pull()
            assert await replica.wait_newer(11) == 12
    assert not [event for event in events.seen if isinstance(event, VersionFailed)]
