"""A node that joins late takes one version from several nodes at once, and a source that fails costs little."""

import asyncio
import logging
import shutil
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.cluster import Seal
from laminar_py.relay.lanes import LaneWriter
from laminar_py.relay.messages import (
    Announce,
    AskHeld,
    Attach,
    Chunk,
    Downward,
    Fetch,
    Held,
    Lanes,
    Lost,
    OpenLanes,
    VersionComplete,
    VersionFailed,
)
from laminar_py.relay.node import BUSY_S, RelayNode
from laminar_py.relay.requests import MIN_WINDOW, PARENT, Requests
from laminar_py.relay.sources import MAX_SOURCES
from laminar_py.relay.stored_version import CHECKSUMS, StoredVersion
from laminar_py.relay.tree import grow_tree
from laminar_py.relay.version_store import VersionStore
from tests.depth import examples
from tests.relay.fleet import Member, Mischief
from tests.relay.test_lanes import ticket
from tests.relay.tree import (
    CHUNK,
    KEYS,
    ByHand,
    Events,
    folder_bytes,
    make_node,
    put_chunk,
    read_checksums,
    receive,
    running,
    write_version,
)

CHUNKS = 1500  # far above the window of 256
SEND_S = 5e-4  # of a chunk on a lane


@pytest.fixture
def slow_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane sends a chunk in half a millisecond or more, so that sources have time to join."""
    send = LaneWriter.send

    def sending(writer: LaneWriter, chunk: Chunk) -> None:
        time.sleep(SEND_S)
        send(writer, chunk)

    monkeypatch.setattr(LaneWriter, "send", sending)


def holders(folder: Path, count: int) -> tuple[StoredVersion, list[RelayNode]]:
    """A version, and nodes that have it complete."""
    version = write_version(folder / "origin", 1, CHUNKS * CHUNK - 5)
    for number in range(count):
        shutil.copytree(version.folder, folder / f"holder-{number}" / "v1")
    return version, [make_node(folder, f"holder-{number}") for number in range(count)]


def watch(node: RelayNode) -> list[tuple[int, int]]:
    """(version, chunk) of all that the node sends from now on."""
    sent: list[tuple[int, int]] = []
    send = node._downlink.send

    def sending(to: bytes, message: Downward) -> bool:
        if isinstance(message, Chunk):
            sent.append((message.version, message.index))
        return send(to, message)

    node._downlink.send = sending  # type: ignore[method-assign]
    return sent


def joiner(folder: Path, parent: str, *sources: str, **chosen: object) -> tuple[RelayNode, Events]:
    """A node that has nothing, and its events."""
    events = Events()
    return make_node(folder, "late", parent, sources=sources, emit=events, **chosen), events


async def complete(events: Events, version: int = 1) -> VersionComplete:
    """The joiner's report; it gave nothing up."""
    report = await events.first(VersionComplete, version=version)
    assert not [event for event in events.seen if isinstance(event, VersionFailed)]
    return report


async def test_a_late_node_takes_its_version_from_all_that_have_it(tmp_path: Path, slow_lanes: None) -> None:
    version, nodes = holders(tmp_path, 4)
    sent = [watch(node) for node in nodes]
    async with running(*nodes):
        node, events = joiner(tmp_path, *(holder.endpoint for holder in nodes), parent_timeout_s=10.0)
        async with running(node):
            report = await complete(events)
            shares = [len(chunks) / CHUNKS for chunks in sent]
            second = write_version(tmp_path / "second", 2, CHUNKS * CHUNK)
            for holder in range(4):
                shutil.copytree(second.folder, tmp_path / f"holder-{holder}" / "new")
                (tmp_path / f"holder-{holder}" / "new").rename(tmp_path / f"holder-{holder}" / "v2")
            again = await complete(events, 2)
    assert folder_bytes(tmp_path / "late" / "v1") == folder_bytes(version.folder)
    assert min(shares) > 0.1, f"one source sent little: {shares}"
    assert sum(shares) < 1.15, f"many chunks came twice: {shares}"
    assert report.parent == nodes[0].endpoint
    assert 0.5 < report.other_bytes / report.wire_bytes < 0.9
    assert again.other_bytes == 0, "a node with a version takes the next one from its parent"
    assert {number for chunks in sent[1:] for number, _ in chunks} == {1}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_killed_or_stopped_in_the_middle_costs_its_outstanding_chunks(
    tmp_path: Path, slow_lanes: None, number: signal.Signals
) -> None:
    version, nodes = holders(tmp_path, 2)
    shutil.copytree(version.folder, tmp_path / "doomed" / "v1")
    doomed = Member(tmp_path, "doomed", KEYS, chunk_bytes=CHUNK, seal=Seal.CURVE)
    await asyncio.to_thread(doomed.start)
    doomed.misbehave(Mischief(delay_s=SEND_S))
    sent = [watch(node) for node in nodes]
    try:
        async with running(*nodes):
            first, second = (holder.endpoint for holder in nodes)
            node, events = joiner(tmp_path, first, doomed.endpoint, second, parent_timeout_s=10.0)
            lent = _first_chunk_of(node, doomed.endpoint)
            async with running(node), asyncio.timeout(9.0):  # before anybody counts it as silent
                await lent.wait()
                doomed.signal(number)
                await complete(events)
    finally:
        doomed.kill()
    assert folder_bytes(tmp_path / "late" / "v1") == folder_bytes(version.folder)
    times = Counter(chunk for chunks in sent for chunk in chunks)
    assert max(times.values()) <= 2
    assert sum(times.values()) < 1.15 * CHUNKS, "more was asked for again than was outstanding"


def _first_chunk_of(node: RelayNode, source: str) -> asyncio.Event:
    """Set once a chunk of that source has come on its control connection."""
    came, handle_chunk = asyncio.Event(), node._versions.handle_chunk

    def handling(chunk: Chunk, sender: str = PARENT) -> None:
        handle_chunk(chunk, sender)
        if sender == source:
            came.set()

    node._versions.handle_chunk = handling  # type: ignore[method-assign]
    return came


@pytest.mark.parametrize("with_checksums", [False, True])
async def test_a_source_with_damaged_chunks_spoils_nothing(
    tmp_path: Path, slow_lanes: None, with_checksums: bool
) -> None:
    """Also where the checksums in its store were changed with the bytes: the file's digest then is wrong."""
    version, nodes = holders(tmp_path, 3)
    folder = tmp_path / "holder-1" / "v1"
    file = folder / version.manifest.files[0].name
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    if with_checksums:
        (folder / CHECKSUMS).write_bytes(read_checksums(file, chunk_bytes=CHUNK))
    sent = [watch(node) for node in nodes]
    async with running(*nodes):
        node, events = joiner(tmp_path, *(holder.endpoint for holder in nodes), parent_timeout_s=10.0)
        async with running(node):
            await complete(events)
    assert folder_bytes(tmp_path / "late" / "v1") == folder_bytes(version.folder)
    assert sent[1], "it was asked for nothing"
    assert set(sent[1]) <= {*sent[0], *sent[2]}, "each of its chunks came from another too"
    if not with_checksums:
        assert len(sent[1]) <= 128, "it was asked on although its chunks were damaged"


async def test_a_source_that_retired_the_version_says_so_and_is_left(tmp_path: Path, slow_lanes: None) -> None:
    version, nodes = holders(tmp_path, 2)
    async with ByHand() as hand, running(*nodes):
        source = hand.parent()
        nobody = "tcp://127.0.0.1:1"
        node, events = joiner(tmp_path, nodes[0].endpoint, source.endpoint, nobody, nodes[1].endpoint)
        async with running(node):
            asked = await source.receive(AskHeld)
            assert asked == AskHeld(1, version.manifest.digest)
            source.send(Held(1, ((0, 700, 300), (0, CHUNKS - 10, 2**40), (7, 0, 1))))
            fetch = await source.receive(Fetch)
            assert fetch.file == 0
            assert 700 <= fetch.first_chunk < fetch.first_chunk + fetch.credits <= 1000
            source.send(Lost(1))
            assert (await complete(events)).other_bytes
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await source.receive(Fetch)
    assert folder_bytes(tmp_path / "late" / "v1") == folder_bytes(version.folder)


async def test_a_source_of_a_file_with_a_wrong_digest_is_closed_before_the_file_is_here(tmp_path: Path) -> None:
    version, forged = (write_version(tmp_path / name, 1, 600 * CHUNK) for name in ("origin", "forged"))
    async with ByHand() as hand:
        parent, source = hand.parent(), hand.parent()
        node, events = joiner(tmp_path, parent.endpoint, source.endpoint, parent_timeout_s=10.0)
        async with running(node):
            await parent.receive(Attach)
            parent.send(Announce(version.manifest))
            await source.receive(AskHeld)
            source.send(Held(1, ((0, 0, 600),)))
            source.send_chunk(forged, (await source.receive(Fetch)).first_chunk)
            await asyncio.sleep(0.1)  # the wrong chunk comes first
            parent.send_all(version)
            while (await parent.receive(Fetch)).first_chunk or not node._versions._downloads[
                1
            ].requests.parent_only:
                pass
            assert not node._versions.sources._open
            parent.send_all(version)
            await complete(events)
    assert folder_bytes(tmp_path / "late" / "v1") == folder_bytes(version.folder)


async def test_a_source_that_was_the_parent_for_a_while_is_a_source_again(tmp_path: Path) -> None:
    """It answered, unlike a source that is left for its silence; and each source asks by itself, once a period."""
    node = make_node(tmp_path, "late", sources=["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"])
    sources, sent = node._versions.sources, list[object]()
    async with asyncio.TaskGroup() as tasks:
        sources.open(tasks, (), "")
        for source, _ in sources._open.values():
            source.resend_requests = lambda: sent.append(None)  # type: ignore[method-assign]
        sources.open(tasks, (), "tcp://127.0.0.1:1")
        assert list(sources._open) == ["tcp://127.0.0.1:2"]
        assert not sent
        sources._open["tcp://127.0.0.1:2"][0].left_parent("tcp://127.0.0.1:2", "tcp://127.0.0.1:2")
        sources.open(tasks, (), "")
        assert list(sources._open) == ["tcp://127.0.0.1:1"]
        sources.close()


async def test_a_node_lends_nothing_while_a_child_fetches_or_a_version_arrives(tmp_path: Path) -> None:
    version, arriving = write_version(tmp_path / "relay-1", 1, 3 * CHUNK), write_version(tmp_path / "o", 2, CHUNK)
    clock = [100.0]
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, now=lambda: clock[0])
        async with running(node):
            child = await hand.child(node.endpoint)
            stranger = hand._factory.connect(node.endpoint, max_frame_bytes=2**21)
            hand._sockets.append(stranger)
            await stranger.receive()

            async def survey(digest: str = version.manifest.digest) -> Held | Lost:
                stranger.send(AskHeld(1, digest))
                return await receive(stranger, Held | Lost)

            assert await survey() == Held(1, ((0, 0, 3),))
            assert await survey("00" * 32) == Lost(1)
            stranger.send(
                Fetch(version=1, file=0, first_chunk=0, credits=1)
            )  # a stranger's request counts nothing
            assert (await receive(stranger, Chunk)).index == 0
            assert await survey() == Held(1, ((0, 0, 3),))
            child.send(Fetch(version=1, file=0, first_chunk=0, credits=1))
            await receive(child, Chunk)
            assert await survey() == Held(1, ())
            clock[0] += BUSY_S
            assert await survey() == Held(1, ((0, 0, 3),))
            await parent.receive(Attach)
            parent.send(Announce(arriving.manifest))
            await parent.receive(Fetch)
            assert await survey() == Held(1, ())


@settings(deadline=None, max_examples=examples(60))
@given(st.data())
def test_sources_send_every_chunk_and_few_of_them_twice(data: st.DataObject) -> None:
    """Sources hold parts, differ in speed, break, come back, and lose or damage chunks."""
    draw = data.draw
    with tempfile.TemporaryDirectory() as folder:
        origin = write_version(
            Path(folder) / "origin", 1, *draw(st.lists(st.integers(1, 40 * CHUNK), min_size=1, max_size=2))
        )
        store = VersionStore(Path(folder) / "store", keep_versions=1)
        store.open()
        arriving = store.begin(origin.manifest)
        requests = Requests(arriving, window=8)
        counts = [origin.manifest.num_chunks(file) for file in range(len(origin.manifest.files))]
        queues: dict[str, list[tuple[int, int]]] = {PARENT: []}
        held: dict[str, set[tuple[int, int]]] = {}
        num_asked, num_lost = Counter[tuple[int, int]](), 0
        while arriving.num_missing:
            for source, fetch in requests.fill():
                chunks = [(fetch.file, fetch.first_chunk + number) for number in range(fetch.credits)]
                assert source == PARENT or held[source].issuperset(chunks), "it was asked for what it lacks"
                num_asked.update(chunks)
                queues[source] += chunks
            action = draw(st.sampled_from(["chunk"] * 12 + ["lend", "break", "damage"]))
            name = draw(st.sampled_from(sorted(queues)))
            if action == "lend":
                name = draw(st.sampled_from("abc"))
                runs = [
                    (file, draw(st.integers(0, count)), draw(st.integers(1, 50)))
                    for file, count in enumerate(counts)
                ]
                held[name] = {
                    (file, index) for file, first, count in runs for index in range(first, first + count)
                }
                queues.setdefault(name, [])
                requests.lend(name, tuple(runs))
            elif action == "break" and name != PARENT:
                num_lost += len(queues.pop(name))
                requests.drop(name)
            elif queues[name]:
                chunk = queues[name].pop(0)
                if not arriving.is_missing(*chunk):
                    continue
                if action == "damage":
                    if name != PARENT:
                        num_lost += 1 + len(queues.pop(name))
                    source, fetch = requests.ask_again(chunk, name)
                    num_asked[chunk] += 1
                    num_lost += 1
                    queues[source].append(chunk)
                    assert fetch.first_chunk == chunk[1]
                    continue
                put_chunk(arriving, origin.read_chunk(*chunk))
                requests.arrived(chunk)
        assert sum(num_asked.values()) <= sum(counts) + num_lost + 4 * MIN_WINDOW * 2


def test_a_silent_source_is_left_and_the_parent_is_asked_again(tmp_path: Path) -> None:
    origin = write_version(tmp_path / "origin", 1, 40 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    arriving = store.begin(origin.manifest)
    requests = Requests(arriving, window=8)
    requests.lend("a", ((0, 20, 20),))
    asked = {source: fetch.first_chunk for source, fetch in requests.fill()}
    assert asked == {PARENT: 0, "a": 20}
    assert [requests.repeat_overdue() for _ in range(2)] == [[], []]
    (again,) = requests.repeat_overdue()
    assert again == (PARENT, Fetch(version=1, file=0, first_chunk=0, credits=4))
    waiting = list(range(4))
    order = []
    while waiting:
        order += waiting
        for index in waiting:
            put_chunk(arriving, origin.read_chunk(0, index))
            requests.arrived((0, index))
        fetches = requests.fill()
        assert {source for source, _ in fetches} <= {PARENT}
        waiting = [fetch.first_chunk + number for _, fetch in fetches for number in range(fetch.credits)]
    assert order == list(range(40)), "its chunks are requested in their place, not at the end"


@pytest.mark.parametrize("fanout", [1, 2, 8])
def test_sources_of_a_node_are_other_nodes_than_root_and_parent(fanout: int) -> None:
    for size in range(1, 40):
        tree = grow_tree(size, fanout=fanout)
        for node in range(size):
            found = tree.sources(node, count=MAX_SOURCES)
            assert len(found) == len(set(found)) <= MAX_SOURCES
            assert not {0, node, tree.parents[node]} & set(found)
            assert set(found) <= set(range(size))
            if size >= 8:
                assert found


async def test_a_firewall_that_admits_no_lane_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    version = write_version(tmp_path / "origin", 1, 6 * CHUNK)
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, parent_timeout_s=0.1, emit=(events := Events()))
        with caplog.at_level(logging.WARNING):
            async with running(node):
                for _ in range(4):
                    await parent.receive(OpenLanes)
                    parent.send(Lanes(port=1, sealed=True, tickets=(ticket(),)))
                parent.send(Announce(version.manifest))
                await parent.receive(Fetch)
                parent.send_all(version)
                await events.first(VersionComplete, version=1)
    (line,) = [record.getMessage() for record in caplog.records if "lane" in record.getMessage()]
    assert line.startswith("no lane to 127.0.0.1:1 (")
    assert "relay.seal=curve" in line
