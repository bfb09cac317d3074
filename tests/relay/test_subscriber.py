"""What a replica sees: newest versions, holds that survive crashes, and honest refusals."""

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from laminar_py.records.weights import VersionLostError
from laminar_py.relay.messages import (
    Announce,
    Attach,
    Done,
    Fetch,
    Granted,
    Lost,
    Pull,
    Release,
    VersionComplete,
    Want,
)
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.subscriber import RelayError, Subscriber
from tests.relay.tree import (
    CHUNK,
    KEYS,
    ByHand,
    Events,
    Learner,
    below_hand,
    chain,
    folder_bytes,
    growing,
    make_node,
    receive,
    running,
    subscriber,
    until,
    write_version,
)


def versions_in(store: Path) -> list[str]:
    return sorted(path.name for path in store.glob("v*"))


async def test_latest_waits_for_the_first_version_and_wait_newer_for_a_newer_one(tmp_path: Path) -> None:
    async with (
        running(root := make_node(tmp_path, "relay-0")),
        running(replica := subscriber(root, "replica")),
        Learner(tmp_path) as learner,
        asyncio.TaskGroup() as group,
    ):
        latest, newer = group.create_task(replica.wait_newer(-1)), group.create_task(replica.wait_newer(1))
        await learner.publish(1)
        assert await latest == 1
        assert not newer.done()
        await learner.publish(2)
        assert await newer == 2


async def test_a_pulled_version_is_held_until_the_next_pull(tmp_path: Path) -> None:
    events = Events()
    root = make_node(tmp_path, "relay-0", keep_versions=1, emit=events)
    async with running(root), running(replica := subscriber(root, "replica")):
        async with Learner(tmp_path) as learner:
            for version in (1, 2, 3):
                await learner.publish(version)
                await events.first(VersionComplete, version=version)
                if version == 1:
                    held = await replica.pull()
        assert len(folder_bytes(Path(held.path))) == 1
        assert (await replica.pull()).version == 3
    assert versions_in(tmp_path / "relay-0") == ["v3"]


async def test_a_hold_survives_the_crash_of_node_and_subscriber(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        write_version(tmp_path / "relay-0", version, CHUNK)
    async with (
        running(node := make_node(tmp_path, "relay-0", keep_versions=3)),
        running(replica := subscriber(node, "replica")),
    ):
        await replica.pull(1)
    assert (tmp_path / "relay-0" / "pin-replica").read_text() == "1"
    async with (
        running(node := make_node(tmp_path, "relay-0", keep_versions=1)),
        running(revived := subscriber(node, "replica")),
    ):
        assert (await revived.pull(1)).version == 1
    assert versions_in(tmp_path / "relay-0") == ["v1", "v3"]


async def test_a_version_that_is_pulled_while_a_thread_unmaps_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going = threading.Event(), threading.Event()

    def wait(stored: StoredVersion) -> None:
        begun.set()
        going.wait(20.0)

    monkeypatch.setattr(StoredVersion, "release_pages", wait)
    for version in (1, 2):
        write_version(tmp_path / "relay-0", version, CHUNK)
    async with (
        running(root := make_node(tmp_path, "relay-0", keep_versions=1)),
        running(replica := subscriber(root, "replica")),
    ):
        try:
            await until(begun.is_set)
            assert (await replica.pull(1)).version == 1
        finally:
            going.set()
        await asyncio.sleep(0.1)
        assert versions_in(tmp_path / "relay-0") == ["v1", "v2"]
        assert (await replica.pull(2)).version == 2  # the pin moves, so 1 may go
        await until(lambda: "v1" not in versions_in(tmp_path / "relay-0"))


async def test_a_version_that_no_ancestor_has_is_lost(tmp_path: Path) -> None:
    for version in (1, 2):
        write_version(tmp_path / "relay-0", version, CHUNK)
    async with (
        growing(tmp_path, chain(3), keep_versions=1) as nodes,
        running(replica := subscriber(nodes[2], "replica")),
    ):
        await until(lambda: not (tmp_path / "relay-0" / "v1").exists())  # the root keeps one version
        with pytest.raises(VersionLostError, match="version 1 "):
            await replica.pull(1)
        assert (await replica.pull()).version == 2


async def test_an_old_version_is_fetched_from_an_ancestor_and_kept_on_the_way_no_longer(tmp_path: Path) -> None:
    for version in (2, 3):
        write_version(tmp_path / "relay-0", version, 5 * CHUNK)
    (tmp_path / "relay-0" / "pin-other").write_text("2")
    async with (
        growing(tmp_path, chain(3), keep_versions=1) as nodes,
        running(replica := subscriber(nodes[2], "replica")),
    ):
        pulled = await replica.pull(2)
        assert folder_bytes(Path(pulled.path)) == folder_bytes(tmp_path / "relay-0" / "v2")
        assert await replica.wait_newer(2) == 3
        with pytest.raises(VersionLostError):
            await replica.pull(1)  # answered by way of relay-1, after that has let go of 2
    assert versions_in(tmp_path / "relay-1") == ["v3"]
    assert versions_in(tmp_path / "relay-2") == ["v2", "v3"]


async def test_a_node_declines_a_version_that_nobody_there_needs(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-1", 2, CHUNK)
    async with below_hand(tmp_path) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(write_version(tmp_path / "origin", 1, CHUNK).manifest))
        assert await parent.receive(object) == Done(1)


async def test_a_version_that_was_asked_for_is_fetched_even_when_overtaken(tmp_path: Path) -> None:
    old, new = (write_version(tmp_path / "origin", version, 3 * CHUNK) for version in (1, 2))
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint)
        async with running(node), running(replica := subscriber(node, "replica")), asyncio.TaskGroup() as group:
            await parent.receive(object)
            parent.send(Announce(old.manifest))
            await parent.receive(Fetch)
            pull = group.create_task(replica.pull(1))
            assert await parent.receive(Want) == Want(1, arriving=True)
            parent.send(Announce(new.manifest))
            parent.send_all(new)
            assert await replica.wait_newer(-1) == 2
            assert not pull.done()
            parent.send_all(old)
            assert (await pull).version == 1


async def test_a_pull_outlives_the_node_it_was_put_to(tmp_path: Path) -> None:
    async with running(node := make_node(tmp_path, "relay-0")):
        replica = subscriber(node, "replica")
    async with running(replica), asyncio.TaskGroup() as group:
        pull = group.create_task(replica.pull())
        write_version(tmp_path / "relay-0", 1, CHUNK)
        async with running(make_node(tmp_path, "relay-0", port=int(node.endpoint.rpartition(":")[2]))):
            assert (await pull).version == 1


async def test_a_subscriber_that_is_told_of_another_port_puts_its_question_there(tmp_path: Path) -> None:
    async with running(node := make_node(tmp_path, "relay-0")), running(silent := make_node(tmp_path, "silent")):
        replica = subscriber(silent, "replica")
        write_version(tmp_path / "relay-0", 1, CHUNK)
        async with running(replica), asyncio.TaskGroup() as group:
            pull = group.create_task(replica.pull())
            replica.attach(node.endpoint)
            assert (await pull).version == 1


async def test_a_revived_subscriber_replaces_the_question_of_its_old_self(tmp_path: Path) -> None:
    old, new = (write_version(tmp_path / "origin", version, CHUNK) for version in (1, 2))
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, emit=(events := Events()))
        async with running(node), asyncio.TaskGroup() as group:
            await parent.receive(object)
            parent.send(Announce(new.manifest))
            parent.send_all(new)
            async with running(replica := subscriber(node, "replica")):
                await replica.wait_newer(-1)
                question = group.create_task(replica.pull(1))
                await parent.receive(Want)
                parent.send(Announce(old.manifest))
                assert (await parent.receive(Fetch)).version == 1
                question.cancel()
            async with running(revived := subscriber(node, "replica")):
                assert (await revived.pull()).version == 2
            parent.send_all(old)
            await events.first(VersionComplete, version=1)
            while (await parent.receive(Done)).version != 1:
                pass
    assert (tmp_path / "relay-1" / "pin-replica").read_text() == "2"


async def test_closing_wakes_whoever_waits(tmp_path: Path) -> None:
    async with running(node := make_node(tmp_path, "relay-0")):
        async with running(replica := subscriber(node, "replica")):
            questions = [asyncio.create_task(question) for question in (replica.wait_newer(-1), replica.pull())]
        for question in questions:
            with pytest.raises(RelayError, match="closed"):
                await question


async def test_a_late_word_of_a_broken_connection_moves_no_hold(tmp_path: Path) -> None:
    """A pull that was put again over a new connection may also come over the old one, after the next pull."""
    for version in (1, 2):
        write_version(tmp_path / "relay-0", version, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0")), ByHand() as hand:
        old, new = await hand.child(node.endpoint), await hand.child(node.endpoint)
        for link, pull, answered in (
            (old, Pull(id=1, session=7, name="replica", version=1), True),
            (new, Pull(id=2, session=7, name="replica", version=2), True),
            (old, Pull(id=1, session=7, name="replica", version=1), False),
            (new, Pull(id=1, session=8, name="replica", version=2), True),  # its next life
            (old, Pull(id=3, session=7, name="replica", version=1), False),
        ):
            link.send(pull)
            link.send(Want(9))  # answered after it
            reply = await receive(link, Granted | Lost)
            assert isinstance(reply, Granted) is answered
            if answered:
                await receive(link, Lost)
        assert (tmp_path / "relay-0" / "pin-replica").read_text() == "2"


async def test_a_pull_that_is_put_again_gets_the_same_answer_and_moves_no_hold(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-0", 1, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0", parent_timeout_s=0.1)), ByHand() as hand:
        link = await hand.child(node.endpoint)
        link.send(Pull(id=1, session=7, name="replica", version=None))
        assert (await receive(link, Granted)).version == 1
        write_version(tmp_path / "relay-0", 2, CHUNK)
        while (await receive(link, Announce)).manifest.version != 2:
            pass
        link.send(Pull(id=1, session=7, name="replica", version=None))
        assert (await receive(link, Granted)).version == 1
        assert (tmp_path / "relay-0" / "pin-replica").read_text() == "1"


async def test_a_release_that_comes_late_ends_no_later_hold(tmp_path: Path) -> None:
    for version in (1, 2):
        write_version(tmp_path / "relay-0", version, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0")), ByHand() as hand:
        link = await hand.child(node.endpoint)
        for pull in (
            Pull(id=1, session=7, name="replica", version=1),
            Pull(id=2, session=7, name="replica", version=2),
        ):
            link.send(pull)
            await receive(link, Granted)
        for release, held in (((1, 7), True), ((2, 6), True), ((2, 7), False)):
            link.send(Release(*release, "replica"))
            link.send(Want(9))  # answered after it
            await receive(link, Lost)
            assert (tmp_path / "relay-0" / "pin-replica").exists() is held


async def test_a_node_that_is_down_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replica = Subscriber("tcp://127.0.0.1:1", "replica", KEYS, heartbeat_s=0.05)
    with caplog.at_level(logging.WARNING):
        async with running(replica):
            await asyncio.sleep(0.5)
    (line,) = [record.getMessage() for record in caplog.records if "node" in record.getMessage()]
    assert line == "replica cannot reach its node at tcp://127.0.0.1:1; it keeps trying"
