"""The tree delivers: every node ends with the same bytes, chunk by chunk, the newest first."""

from pathlib import Path

from safetensors.torch import load_file

from laminar_py.relay.messages import Announce, Chunk, Fetch, VersionComplete
from laminar_py.relay.version_store import SPARE
from tests.relay.tree import (
    ByHand,
    Events,
    Learner,
    below_hand,
    binary,
    chain,
    fetch,
    folder_bytes,
    growing,
    make_node,
    receive,
    running,
    subscriber,
    tensors,
    write_version,
)


async def test_every_subscriber_of_a_tree_gets_the_published_bytes(tmp_path: Path) -> None:
    async with growing(tmp_path, binary(7)) as nodes:
        subscribers = [subscriber(node, f"replica-{number}") for number, node in enumerate(nodes)]
        async with running(*subscribers):
            async with Learner(tmp_path, shard_bytes=400_000) as learner:
                published = await learner.publish(1, 900_000)
            pulled = [await one.pull() for one in subscribers]
    wanted = folder_bytes(tmp_path / "relay-0" / "v1")
    assert len(wanted) == 2
    for number, version in enumerate(pulled):
        assert version.digest == published.digest
        assert Path(version.path) == tmp_path / f"relay-{number}" / "v1"
        assert folder_bytes(Path(version.path)) == wanted


async def test_each_node_says_from_which_parent_it_got_a_version(tmp_path: Path) -> None:
    events = Events()
    async with growing(tmp_path, chain(3), emit=events) as nodes, Learner(tmp_path) as learner:
        await learner.publish(1)
        for node, parent in ((0, ""), (1, nodes[0].endpoint), (2, nodes[1].endpoint)):
            assert (await events.first(VersionComplete, node=f"relay-{node}", version=1)).parent == parent


async def test_a_delivered_version_loads_as_the_tensors_that_were_published(tmp_path: Path) -> None:
    async with growing(tmp_path, chain(3)) as nodes, running(replica := subscriber(nodes[2], "replica")):
        async with Learner(tmp_path) as learner:
            await learner.publish(4)
        pulled = await replica.pull()
    loaded = load_file(Path(pulled.path) / "model-00001.safetensors")
    assert all(loaded[name].equal(tensor) for name, tensor in tensors(4))


async def test_a_child_gets_a_chunk_while_its_parent_lacks_the_last_one(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, 2 * 4096 + 100)
    async with ByHand() as hand:
        parent = hand.parent()
        async with running(node := make_node(tmp_path, "relay-1", parent.endpoint, emit=(events := Events()))):
            grandchild = await hand.child(node.endpoint)
            await parent.receive(object)
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            parent.send_chunk(version, 0)
            await receive(grandchild, Announce)
            assert await fetch(grandchild, version.manifest, 0) == version.read_chunk(0, 0)
            assert not events.seen
            grandchild.send(Fetch(version=1, file=0, first_chunk=1, credits=2))
            parent.send_chunk(version, 1)
            parent.send_chunk(version, 2)
            assert [(await receive(grandchild, Chunk)).index for _ in range(2)] == [1, 2]
            await events.first(VersionComplete, version=1)


async def test_an_overtaken_version_is_abandoned(tmp_path: Path) -> None:
    old, new = (write_version(tmp_path / "origin", number, 50_000) for number in (1, 2))
    async with ByHand() as hand:
        parent = hand.parent()
        async with running(node := make_node(tmp_path, "relay-1", parent.endpoint, emit=(events := Events()))):
            grandchild = await hand.child(node.endpoint)
            await parent.receive(object)
            parent.send(Announce(old.manifest))
            await parent.receive(Fetch)
            parent.send_chunk(old, 0)
            assert (await receive(grandchild, Announce)).manifest.version == 1
            parent.send(Announce(new.manifest))
            parent.send_all(new)
            assert (await receive(grandchild, Announce)).manifest.version == 2
            await events.first(VersionComplete, version=2)
    assert [event.version for event in events.seen if isinstance(event, VersionComplete)] == [2]
    assert sorted(path.name for path in (tmp_path / "relay-1").glob("v*")) == ["v2"]


async def test_a_late_joiner_gets_the_newest_version(tmp_path: Path) -> None:
    for number in (1, 2):
        write_version(tmp_path / "relay-0", number, 10_000)
    async with running(root := make_node(tmp_path, "relay-0")):
        late = make_node(tmp_path, "relay-1", root.endpoint)
        async with running(late), running(replica := subscriber(late, "replica")):
            assert (await replica.pull()).version == 2
    assert not (tmp_path / "relay-1" / "v1").exists()


async def test_a_node_keeps_the_newest_versions(tmp_path: Path) -> None:
    events = Events()
    async with (
        growing(tmp_path, chain(2), emit=events, keep_versions=2),
        Learner(tmp_path) as learner,
    ):
        for number in (1, 2, 3):
            await learner.publish(number)
            await events.first(VersionComplete, node="relay-1", version=number)
    for name in ("relay-0", "relay-1"):
        assert sorted(path.name for path in (tmp_path / name).iterdir() if path.is_dir()) == [SPARE, "v2", "v3"]


async def test_credits_bound_what_a_parent_sends(tmp_path: Path) -> None:
    version = write_version(tmp_path / "relay-0", 1, 20 * 4096)
    async with running(root := make_node(tmp_path, "relay-0")), ByHand() as hand:
        slow, quick = await hand.child(root.endpoint), await hand.child(root.endpoint)
        slow.send(Fetch(version=1, file=0, first_chunk=0, credits=3))
        quick.send(Fetch(version=1, file=0, first_chunk=0, credits=20))
        assert [(await receive(quick, Chunk)).index for _ in range(20)] == list(range(20))
        assert [(await receive(slow, Chunk)).index for _ in range(3)] == [0, 1, 2]
        # Were there more for the slow one, it would come before the answer to this.
        assert (await fetch(slow, version.manifest, 19)).index == 19


async def test_however_fast_versions_come_one_of_two_is_completed(tmp_path: Path) -> None:
    """The second overtakes the first; then the third waits, and the fourth takes its place."""
    versions = {number: write_version(tmp_path / "origin", number, 50_000) for number in range(1, 5)}
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(object)
        for number in versions:
            parent.send(Announce(versions[number].manifest))
        asked = [await parent.receive(Fetch) for _ in range(2)]
        assert {fetch.version for fetch in asked} == {1, 2}
        parent.send_all(versions[2])
        await events.first(VersionComplete, version=2)
        parent.send_all(versions[4])
        await events.first(VersionComplete, version=4)
    assert [event.version for event in events.seen if isinstance(event, VersionComplete)] == [2, 4]
