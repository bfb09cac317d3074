"""Which versions a node fetches, in what order, and what it says to its parent meanwhile."""

import asyncio
import errno
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.relay.delta import Difference
from laminar_py.relay.digests import delta_proof
from laminar_py.relay.downloads import BrokenVersionError, ChunkOutcome, Decision, Download, decide
from laminar_py.relay.frames import ChunkBody, LaneError, Sealer
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.messages import (
    Announce,
    Attach,
    Chunk,
    Done,
    Fetch,
    Lost,
    VersionComplete,
    VersionFailed,
    VersionPulled,
    Want,
)
from laminar_py.relay.requests import MISSED_REMINDERS, PARENT, Requests
from laminar_py.relay.stored_version import NoRoomError, StoredVersion
from laminar_py.relay.version_store import VersionStore
from tests.depth import examples
from tests.relay.tree import (
    CHUNK,
    ByHand,
    Events,
    HandParent,
    Learner,
    below_hand,
    make_node,
    put_chunk,
    receive,
    running,
    subscriber,
    tensors,
    until,
    write_version,
)


@pytest.mark.parametrize(
    ("base", "arriving", "waiting", "overtook", "wanted", "reply"),
    [
        (None, set(), None, None, False, Decision.START),
        (6, set(), None, None, False, Decision.START),
        (None, {6}, None, None, False, Decision.START),  # it overtakes 6
        (6, {6}, None, None, False, Decision.LATER),  # 6 is nearly nothing, as a delta, and 7 builds on it
        (6, {5}, 6, None, False, Decision.LATER),  # 6 waits for 5, on which it builds
        (None, {6}, None, 6, False, Decision.LATER),  # 6 overtook another
        (6, {6}, None, 6, True, Decision.START),  # somebody asked for 7 by number
        (None, {7}, None, None, False, Decision.RESUME),
        (None, {8}, None, None, False, Decision.DECLINE),
        (None, {8}, None, None, True, Decision.START),
    ],
)
def test_what_becomes_of_an_announced_version(
    tmp_path: Path,
    base: int | None,
    arriving: set[int],
    waiting: int | None,
    overtook: int | None,
    wanted: bool,
    reply: Decision,
) -> None:
    announce = Announce(write_version(tmp_path, 7, CHUNK).manifest, base)
    known = {"waiting": waiting, "wanted": wanted, "overtook": overtook}
    assert decide(announce, complete={4}, arriving=arriving, **known) is reply
    assert decide(announce, complete={4, 7}, arriving=arriving - {7}, **known) is Decision.DECLINE


def as_version(stored: StoredVersion, number: int) -> Announce:
    """The same content under the next number, which builds on this one."""
    return Announce(msgspec.structs.replace(stored.manifest, version=number), base=number - 1)


def nothing_changed(base: StoredVersion, number: int) -> dict[str, object]:
    """Fields of a chunk of the version after `number`, which has the content of `base`."""
    return {"base": number, "data": memoryview(b""), "proof": delta_proof(base.manifest.digest, b"")}


async def give(parent: HandParent, stored: StoredVersion, number: int) -> int:
    """Answer requests for that version until it is there; how many bytes went for it."""
    sent, done = 0, False
    while not done:
        match await parent.receive(object):
            case Fetch(version=version, file=file, first_chunk=first, credits=count, base=base) if (
                version == number
            ):
                for index in range(first, first + count):
                    chunk = msgspec.structs.replace(stored.read_chunk(file, index), version=number)
                    if base == number - 1:  # nothing has changed
                        chunk = msgspec.structs.replace(chunk, **nothing_changed(stored, base))
                    sent += len(chunk.data)
                    parent.send(chunk)
            case Done(version):
                done = version == number
    return sent


async def test_a_version_that_the_next_one_builds_on_is_brought_to_its_end(tmp_path: Path) -> None:
    origin = write_version(tmp_path / "origin", 1, 20 * CHUNK)
    events = Events()
    async with below_hand(tmp_path, emit=events) as (parent, _):
        await parent.receive(Attach)
        parent.send(Announce(origin.manifest))
        await give(parent, origin, 1)
        parent.send(as_version(origin, 2))
        fetch = await parent.receive(Fetch)
        parent.send(as_version(origin, 3))
        assert await parent.receive(Want) == Want(2, arriving=True)
        for index in range(fetch.first_chunk, fetch.first_chunk + fetch.credits):
            chunk = msgspec.structs.replace(origin.read_chunk(0, index), version=2, **nothing_changed(origin, 1))
            parent.send(chunk)
        assert await give(parent, origin, 2) == 0
        assert await give(parent, origin, 3) == 0
    complete = [event for event in events.seen if isinstance(event, VersionComplete)]
    assert [(event.version, event.base, event.wire_bytes) for event in complete] == [
        (1, None, 20 * CHUNK),
        (2, 1, 0),
        (3, 2, 0),
    ]


async def test_holding_what_arrives_brings_no_announcement_and_nothing_twice(tmp_path: Path) -> None:
    versions = {number: write_version(tmp_path / "origin", number, 20 * CHUNK) for number in (1, 2)}
    asked: list[tuple[int, int]] = []
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint)
        async with running(node):
            child = await hand.child(node.endpoint)
            await parent.receive(Attach)
            for version in versions.values():
                parent.send(Announce(version.manifest))
                await receive(child, Announce)
            child.send(Want(2, arriving=True))
            child.send(Fetch(version=2, file=0, first_chunk=0, credits=1))
            done = False
            while not done:
                match await parent.receive(object):
                    case Fetch(version=2, file=file, first_chunk=first, credits=count):
                        asked += [(file, index) for index in range(first, first + count)]
                        for index in range(first, first + count):
                            parent.send_chunk(versions[2], index)
                    case Want(version, arriving):
                        assert (version, arriving) == (2, True)
                    case Done(version):
                        done = version == 2
            assert isinstance(await child.receive(5.0), Chunk)
    assert sorted(asked) == [(0, index) for index in range(20)]


async def test_what_was_lost_on_the_way_is_asked_for_again(tmp_path: Path) -> None:
    """Neither an announcement nor a chunk that went astray keeps a node from the newest version."""
    version = write_version(tmp_path / "origin", 1, 2 * CHUNK)
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, parent_timeout_s=0.2, emit=(events := Events()))
        async with running(node):
            assert await parent.receive(Attach) == Attach(-1)
            assert await parent.receive(Attach) == Attach(-1)  # again: the announcement may be lost
            parent.send(Announce(version.manifest))
            await parent.receive(Fetch)
            parent.send_chunk(version, 1)
            assert await parent.receive(Fetch) == Fetch(
                version=1, file=0, first_chunk=0, credits=1
            )  # the other chunk is lost
            parent.send_chunk(version, 0)
            await events.first(VersionComplete, version=1)


async def test_a_fetch_of_what_is_not_there_is_answered(tmp_path: Path) -> None:
    write_version(tmp_path / "relay-0", 2, CHUNK)
    async with running(node := make_node(tmp_path, "relay-0")), ByHand() as hand:
        child = await hand.child(node.endpoint)
        child.send(Fetch(version=1, file=0, first_chunk=0, credits=1))
        assert await receive(child, Lost) == Lost(1)


async def test_the_root_finds_a_version_of_which_no_word_came(tmp_path: Path) -> None:
    node = make_node(tmp_path, "relay-0", parent_timeout_s=0.1)
    async with running(node), running(replica := subscriber(node, "replica")):
        write_version(tmp_path / "relay-0", 1, CHUNK)
        assert await replica.wait_newer(-1) == 1


async def test_what_a_subscriber_has_done_with_is_held_no_longer(tmp_path: Path) -> None:
    for version in (1, 2):
        write_version(tmp_path / "relay-0", version, CHUNK)
    node = make_node(tmp_path, "relay-0", keep_versions=2, emit=(events := Events()))
    async with running(node), running(replica := subscriber(node, "replica")):
        await replica.pull(1)
        assert (await events.first(VersionPulled, version=1)).subscriber == "replica"
        write_version(tmp_path / "relay-0", 3, CHUNK)
        while await replica.wait_newer(2) != 3:
            pass
        assert (tmp_path / "relay-0" / "v1").exists()
        replica.release()
        while (tmp_path / "relay-0" / "v1").exists():  # noqa: ASYNC110 (a file tells nobody)
            await asyncio.sleep(0.01)
    assert not list((tmp_path / "relay-0").glob("pin-*"))


async def test_a_version_that_was_given_up_is_begun_again_ever_more_rarely(tmp_path: Path) -> None:
    broken, good = (write_version(tmp_path / "origin", version, CHUNK) for version in (1, 2))
    manifest = msgspec.structs.replace(broken.manifest, digest="00" * 32)
    async with ByHand() as hand:
        parent = hand.parent()
        node = make_node(tmp_path, "relay-1", parent.endpoint, parent_timeout_s=0.1, emit=(events := Events()))
        async with running(node):
            for _ in range(12):  # the greeting and reminders, of which few let it be announced
                if (await parent.receive(Attach)).newest < 1:
                    parent.send(Announce(manifest))
            parent.send(Announce(good.manifest))
            parent.send_all(good)
            await events.first(VersionComplete, version=2)
    assert 2 <= len([event for event in events.seen if isinstance(event, VersionFailed)]) <= 5


async def test_a_root_that_encodes_too_slowly_keeps_no_more_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, going = StoredVersion.compare, threading.Event()

    def wait(*chunk: object) -> Difference | None:
        going.wait(20.0)
        return compare(*chunk)

    monkeypatch.setattr(StoredVersion, "compare", wait)
    weights = [tensors(1), tensors(2)]
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(32))  # those that wait take one each
    async with (
        running(root := make_node(tmp_path, "relay-0")),
        ByHand() as hand,
        Learner(tmp_path) as learner,
    ):
        child = await hand.child(root.endpoint)
        try:
            for version in range(1, 9):
                await asyncio.to_thread(learner.publisher.publish, version, weights[version % 2])
                while (await receive(child, Announce)).manifest.version != version:
                    pass
            await until(
                lambda: sorted(path.name for path in (tmp_path / "relay-0").glob("v*[0-9]")) == ["v7", "v8"]
            )
        finally:
            going.set()


WINDOW = 4  # what a version of such large chunks gets


def download_of(origin: StoredVersion, folder: Path, *, window: int) -> Download:
    store = VersionStore(folder / "store", keep_versions=1)
    store.open()
    return Download(store.begin(origin.manifest), window=window, now=lambda: 0.0)


@settings(deadline=None, max_examples=examples(40))
@given(st.data(), st.lists(st.integers(1, 9 * CHUNK), min_size=1, max_size=3))
def test_every_chunk_is_asked_for_once_and_never_more_than_the_window(
    data: st.DataObject, sizes: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        origin = write_version(Path(folder) / "origin", 1, *sizes)
        download = download_of(origin, Path(folder), window=WINDOW)
        wanted: list[tuple[int, int]] = []
        asked = 0
        while True:
            for _, fetch in download.requests.fill():
                wanted += [(fetch.file, fetch.first_chunk + number) for number in range(fetch.credits)]
                asked += fetch.credits
            assert len(wanted) <= WINDOW
            if not wanted:
                break
            chunk = origin.read_chunk(*wanted.pop(data.draw(st.integers(0, len(wanted) - 1))))
            assert download.accept(chunk) is ChunkOutcome.WRITTEN
            assert download.accept(chunk) is ChunkOutcome.USELESS
        assert asked == sum(origin.manifest.num_chunks(file) for file in range(len(sizes)))
        assert all(
            download.stored.file_path(file).read_bytes() == origin.file_path(file).read_bytes()
            for file in range(len(sizes))
        )


def test_deltas_widen_the_window_to_as_many_bytes(tmp_path: Path) -> None:
    base = write_version(tmp_path / "origin", 1, 100 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    stored = store.begin(as_version(base, 2).manifest, base)
    download = Download(stored, window=WINDOW, now=lambda: 0.0, base=base)
    in_flight = num_asked(download)
    assert in_flight == WINDOW
    for index in range(60):
        fields = {**nothing_changed(base, 1), "version": 2}
        download.accept(msgspec.structs.replace(base.read_chunk(0, index), **fields))
        more = num_asked(download)
        assert more <= 2 + in_flight, "restarts could fill the parent's queue"
        in_flight += more - 1
    assert in_flight > 100 - 61, "all others are on their way"


def num_asked(download: Download) -> int:
    return sum(fetch.credits for _, fetch in download.requests.fill())


def test_the_wide_window_of_deltas_is_for_deltas(tmp_path: Path) -> None:
    base = write_version(tmp_path / "origin", 1, 900 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    download = Download(store.begin(as_version(base, 2).manifest, base), window=WINDOW, now=lambda: 0.0, base=base)
    in_flight = num_asked(download)
    for index in range(300):
        fields = {**nothing_changed(base, 1), "version": 2}
        download.accept(msgspec.structs.replace(base.read_chunk(0, index), **fields))
        in_flight += num_asked(download) - 1
    assert 64 < in_flight <= 128
    for index in range(300, 300 + in_flight - WINDOW // 2 - 1):
        download.accept(msgspec.structs.replace(base.read_chunk(0, index), version=2))
        assert not num_asked(download), "full chunks come while many are on their way"


@pytest.mark.parametrize("restart", [Requests.trust_parent_only, lambda requests: requests.restart(PARENT)])
def test_requests_that_a_restart_repeats_fit_into_the_parents_queue(
    tmp_path: Path, restart: Callable[[Requests], None]
) -> None:
    base = write_version(tmp_path / "origin", 1, 900 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    download = Download(store.begin(as_version(base, 2).manifest, base), window=WINDOW, now=lambda: 0.0, base=base)
    queue, most = list[int](), 0
    for step in range(2000):
        if step == 300:
            restart(download.requests)
        for _, fetch in download.requests.fill():
            queue += range(fetch.first_chunk, fetch.first_chunk + fetch.credits)
        most = max(most, len(queue))
        if queue:
            fields = {**nothing_changed(base, 1), "version": 2}
            download.accept(msgspec.structs.replace(base.read_chunk(0, queue.pop(0)), **fields))
    assert not download.stored.num_missing
    assert 64 < most <= 128 + 2 * WINDOW


def test_a_chunk_whose_delta_was_damaged_is_asked_for_in_full_until_it_is_here(tmp_path: Path) -> None:
    base = write_version(tmp_path / "origin", 1, 5 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    requests = Requests(store.begin(as_version(base, 2).manifest, base), window=8)
    asked = {"version": 2, "file": 0}
    assert requests.fill() == [(PARENT, Fetch(**asked, first_chunk=0, credits=5, base=1))]
    full = PARENT, Fetch(**asked, first_chunk=2, credits=1)
    assert requests.ask_again((0, 2), PARENT) == full
    repeated = [fetch for _ in range(MISSED_REMINDERS) for fetch in requests.repeat_overdue()]
    assert full in repeated
    assert sorted((fetch.first_chunk, fetch.credits) for _, fetch in repeated if fetch.base == 1) == [
        (0, 2),
        (3, 2),
    ]
    requests.restart(PARENT)
    assert full in requests.fill()


def test_chunks_of_a_source_that_was_left_change_nothing(tmp_path: Path) -> None:
    """Also of one that sends another content with its right checksum, which only the digest shows."""
    origin, forged = (write_version(tmp_path / name, 1, 20 * CHUNK) for name in ("origin", "forged"))
    download = download_of(origin, tmp_path, window=WINDOW)
    download.requests.lend("thief", ((0, 0, 20),))
    download.requests.lend("other", ((0, 0, 20),))
    for index in range(18):
        download.accept(origin.read_chunk(0, index))
    wrong, late = forged.read_chunk(0, 18), forged.read_chunk(0, 19)
    written = download.write(late, ChunkBody(late.data), "thief")  # as in a lane's thread
    assert download.accept(origin.read_chunk(0, 18), "other") is ChunkOutcome.WRITTEN
    download.requests.drop("thief")
    assert download.record(late, written, "thief") is ChunkOutcome.USELESS
    assert download.accept(forged.read_chunk(0, 19), "other") is ChunkOutcome.WRITTEN
    download.verify_file(0)
    assert download.requests.parent_only
    for chunk in (wrong, late):
        assert download.accept(chunk, "other") is ChunkOutcome.USELESS
    for index in range(20):
        assert download.accept(origin.read_chunk(0, index)) is ChunkOutcome.WRITTEN
    download.verify_file(0)
    assert download.arrived


def test_a_chunk_that_is_damaged_short_or_foreign_is_not_written(tmp_path: Path) -> None:
    origin = write_version(tmp_path / "origin", 1, 2 * CHUNK)
    download = download_of(origin, tmp_path, window=WINDOW)
    chunk = origin.read_chunk(0, 0)
    assert download.accept(msgspec.structs.replace(chunk, checksum=b"0" * 32)) is ChunkOutcome.DAMAGED
    assert download.accept(msgspec.structs.replace(chunk, data=chunk.data[1:])) is ChunkOutcome.DAMAGED
    assert download.accept(msgspec.structs.replace(chunk, index=2)) is ChunkOutcome.USELESS
    assert download.accept(msgspec.structs.replace(chunk, file=1)) is ChunkOutcome.USELESS
    assert not download.stored.has_chunk(0, 0)


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, BrokenVersionError), (errno.EDQUOT, NoRoomError)])
def test_a_chunk_whose_write_failed_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    origin = write_version(tmp_path / "origin", 1, CHUNK)
    download = download_of(origin, tmp_path, window=WINDOW)
    chunk = origin.read_chunk(0, 0)

    def fail(*written: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(MappedFile, "write", fail)
        with pytest.raises(error, match="version 1"):
            download.write(chunk, ChunkBody(chunk.data))
    assert download.accept(chunk) is ChunkOutcome.WRITTEN


@pytest.mark.parametrize("tampered", [False, True])
def test_no_delta_builds_on_bytes_that_were_opened_into_pages_and_are_wrong(
    tmp_path: Path, tampered: bool
) -> None:
    """A lane opens bytes into the pages of a version before it can prove them."""
    base = write_version(tmp_path / "origin", 1, 2 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    arriving = store.begin(base.manifest)
    arriving.pages[0].keep_mapped()
    arriving.build_on(1, [], {0})
    arriving.keep_delta(msgspec.structs.replace(base.read_chunk(0, 1), **nothing_changed(base, 1)))
    assert arriving.is_in_place(0, 1)
    chunk, forged = base.read_chunk(0, 0), os.urandom(CHUNK)
    lane = Sealer(key := os.urandom(32))
    frame = memoryview(bytearray(CHUNK + lane.tag_bytes))
    Sealer(key).close(forged, b"", frame)
    frame[0] ^= tampered
    body = ChunkBody(frame, lane)
    with pytest.raises(LaneError) if tampered else nullcontext():
        assert not arriving.write_chunk(chunk, body)
    assert arriving.is_missing(0, 0)
    assert not arriving.is_in_place(0, 1)
    put_chunk(arriving, chunk)
    assert arriving.rebuild(base, 0, 1)
    assert arriving.file_path(0).read_bytes() == base.file_path(0).read_bytes()


def test_after_a_restart_only_missing_chunks_are_asked_for(tmp_path: Path) -> None:
    origin = write_version(tmp_path / "origin", 1, 5 * CHUNK)
    download = download_of(origin, tmp_path, window=5)
    download.requests.fill()
    download.accept(origin.read_chunk(0, 1))
    assert not download.requests.fill()  # the window is more than half full
    download.requests.restart(PARENT)
    assert [(fetch.first_chunk, fetch.credits) for _, fetch in download.requests.fill()] == [(0, 1), (2, 3)]


def test_lanes_and_rebuilding_threads_never_write_the_same_chunk(tmp_path: Path) -> None:
    """A second writer of a chunk is turned away until the event loop has noted the first one's result."""
    base = write_version(tmp_path / "origin", 1, 3 * CHUNK)
    store = VersionStore(tmp_path / "store", keep_versions=1)
    store.open()
    stored = store.begin(as_version(base, 2).manifest, base)
    download = Download(stored, window=WINDOW, now=lambda: 0.0, base=base)
    full = [msgspec.structs.replace(base.read_chunk(0, index), version=2) for index in range(3)]
    deltas = [msgspec.structs.replace(chunk, **nothing_changed(base, 1)) for chunk in full]

    assert download.write(full[0], ChunkBody(full[0].data)) is ChunkOutcome.WRITTEN  # as in a lane's thread
    assert download.accept(deltas[0]) is ChunkOutcome.USELESS
    assert download.write(full[0], ChunkBody(full[0].data)) is ChunkOutcome.USELESS
    download.record(full[0], ChunkOutcome.WRITTEN)

    assert download.accept(deltas[1]) is ChunkOutcome.WRITTEN
    assert download.write(full[1], ChunkBody(full[1].data)) is ChunkOutcome.USELESS
    assert download.rebuild(0, 1)
    assert download.rebuild(0, 1) is None
    stored.forget_file(0)
    assert download.write(full[1], ChunkBody(full[1].data)) is ChunkOutcome.USELESS, (
        "a thread may still write the chunk"
    )
    assert download.rebuilt(0, 1, right=True) is None
    assert not stored.has_chunk(0, 1), "the file was forgotten meanwhile"
    assert download.accept(full[1]) is ChunkOutcome.WRITTEN

    assert download.accept(deltas[2]) is ChunkOutcome.WRITTEN
    download.stop()
    assert download.rebuild(0, 2) is None
    assert download.write(full[0], ChunkBody(full[0].data)) is ChunkOutcome.USELESS
    assert stored.file_path(0).read_bytes()[: 2 * CHUNK] == base.file_path(0).read_bytes()[: 2 * CHUNK]


async def test_an_error_after_a_version_is_complete_is_no_failure_of_the_version(tmp_path: Path) -> None:
    version, seen = write_version(tmp_path / "origin", 1, CHUNK), list[object]()

    def emit(event: object) -> None:
        seen.append(event)
        if isinstance(event, VersionComplete):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.RaisesGroup(pytest.RaisesExc(OSError, match="error"), flatten_subgroups=True):
        async with below_hand(tmp_path, emit=emit) as (parent, _):
            await parent.receive(object)
            parent.send(Announce(version.manifest))
            parent.send_all(version)
            await asyncio.Event().wait()
    assert not [event for event in seen if isinstance(event, VersionFailed)]
    assert (tmp_path / "relay-1" / "v1").is_dir()
