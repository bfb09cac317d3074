"""Change files: what differs between two versions, read back by the library that engines use."""

import asyncio
import errno
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from laminar_py.records.weights import UNUSED, PulledVersion
from laminar_py.relay.changes import ChangesFile
from laminar_py.relay.digests import digest_of, version_digest
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.messages import FileEntry, Manifest, VersionComplete, VersionFailed
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.stored_version import StoredVersion, describe_version
from laminar_py.relay.subscriber import Subscriber
from tests.relay.faults import small_disk
from tests.relay.tree import (
    CHUNK,
    Events,
    Learner,
    Tensors,
    apply_changes,
    chain,
    changed,
    folder_bytes,
    growing,
    make_node,
    publish,
    read_checksums,
    read_tensors,
    running,
    subscriber,
    tensors,
    until,
)

BF16, F32 = torch.bfloat16, torch.float32


def stored(store: Path, version: int, *files: Tensors, width: int = 2) -> StoredVersion:
    """A complete version with these files, as the library of safetensors writes them."""
    folder = store / f"v{version}"
    folder.mkdir(parents=True)
    paths = [folder / f"model-{number}.safetensors" for number in range(len(files))]
    for path, content in zip(paths, files, strict=True):
        save_file(dict(content), path)
    checksums = [read_checksums(path, chunk_bytes=CHUNK) for path in paths]
    entries = tuple(
        FileEntry(path.name, path.stat().st_size, digest_of(sums), width)
        for path, sums in zip(paths, checksums, strict=True)
    )
    describe_version(folder, Manifest(version, version_digest(entries), CHUNK, entries), checksums)
    return StoredVersion.load(folder)


def changes_of(folder: Path, new: StoredVersion, base: StoredVersion, *, seed: int = 0) -> Path | None:
    """The change file between two versions, whose chunks come in any order, from four threads."""
    written = ChangesFile.begin(folder / "changes.safetensors", base, new.manifest)
    if written is None:
        return None
    chunks = [(file, i) for file in range(len(new.manifest.files)) for i in range(new.manifest.num_chunks(file))]
    random.Random(seed).shuffle(chunks)

    def add(chunk: tuple[int, int]) -> bool:
        difference = new.compare(base, *chunk)
        return difference is not None and written.add(*chunk, difference)

    with ThreadPoolExecutor(4) as threads:
        if all(threads.map(add, chunks)):
            return written.finish()
    written.drop()
    return None


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)) for name in left
    )


def some(num: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed)).to(dtype)


BORDERS = [(f"layer.{number}.weight", some(size, BF16)) for number, size in enumerate([1, 2047, 3, 4096, 5001, 0])]
WORDS = [("b.bias", some(333, F32)), ("a.weight", some(3000, F32))]
MIXED = [("router", some(1501, F32)), *BORDERS, ("norm", some(7, F32))]


@pytest.mark.parametrize(
    ("content", "width"),
    [(BORDERS, 2), (WORDS, 4), (MIXED, 2), (MIXED, 4), (BORDERS, 4), (WORDS, 2)],
)
@pytest.mark.parametrize("every", [12, 40, 1000])
def test_the_file_names_each_element_that_differs_and_its_value(
    tmp_path: Path, content: Tensors, width: int, every: int
) -> None:
    second = [(f"second.{name}", tensor) for name, tensor in BORDERS]
    base = stored(tmp_path / "store", 4, content, second, width=width)
    new = stored(tmp_path / "store", 7, changed(content, every), changed(second, every + 1), width=width)
    path = changes_of(tmp_path, new, base, seed=every)
    assert path is not None
    served = read_tensors(base.folder)
    assert not same(served, read_tensors(new.folder))
    assert apply_changes(path, served) == (4, 7)
    assert same(served, read_tensors(new.folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changes.safetensors", "store"]


def test_an_equal_version_has_an_empty_file(tmp_path: Path) -> None:
    versions = [stored(tmp_path / "store", number, BORDERS) for number in (1, 2)]
    path = changes_of(tmp_path, versions[1], versions[0])
    assert path is not None
    with safe_open(path, framework="pt") as file:
        assert all(key.endswith(UNUSED) for key in file.keys())  # noqa: SIM118 (no mapping)


def test_only_what_a_file_of_changes_can_say_gets_one(tmp_path: Path) -> None:
    """A header, an element of eight bytes or of one, or most elements."""
    octets = [("bytes", torch.zeros(4000, dtype=torch.uint8)), ("longs", torch.zeros(4000, dtype=torch.int64))]
    base = [*BORDERS, *octets]
    cases: list[Tensors] = [
        [(name.replace("layer.3", "layer.7"), tensor) for name, tensor in base],
        [*BORDERS, ("bytes", torch.ones(1, dtype=torch.uint8).expand(4000).contiguous()), octets[1]],
        [*BORDERS, octets[0], ("longs", torch.arange(4000) // 3999)],
        [*[(name, tensor + 1) for name, tensor in BORDERS], *octets],
    ]
    before = stored(tmp_path / "store", 1, base)
    for version, content in enumerate(cases, 2):
        new = stored(tmp_path / "store", version, content)
        assert new.manifest.has_layout_of(before.manifest)
        assert changes_of(tmp_path, new, before) is None
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_file_of_changes_leaves_room_for_the_rest_of_its_version(tmp_path: Path) -> None:
    base = stored(tmp_path / "store", 1, BORDERS)
    new = stored(tmp_path / "store", 2, changed(BORDERS, every=10))
    size = new.manifest.num_bytes
    with small_disk(tmp_path / "disk", size + 2 * 4096) as mounted:
        if not mounted:
            pytest.skip("mounting needs root on Linux")
        for reserve, fits in ((0, True), (size, False)):
            changes = ChangesFile.begin(tmp_path / "disk" / "changes", base, new.manifest, reserve=reserve)
            assert changes is not None
            chunks = range(new.manifest.num_chunks(0))
            added = [changes.add(0, index, new.compare(base, 0, index)) for index in chunks]  # type: ignore[arg-type]
            assert all(added) == fits
            changes.drop()
            assert not list((tmp_path / "disk").iterdir())


def begin_over(spare: Path, new: StoredVersion, base: StoredVersion) -> ChangesFile:
    changes = ChangesFile.begin(spare.with_name("next.safetensors"), base, new.manifest, spare=spare)
    assert changes is not None
    return changes


def add_all(changes: ChangesFile, new: StoredVersion, base: StoredVersion) -> bool:
    differences = [(index, new.compare(base, 0, index)) for index in range(new.manifest.num_chunks(0))]
    return all(changes.add(0, index, found) for index, found in differences if found is not None)


def test_a_sparse_file_over_a_dense_one_gives_its_pages_back(tmp_path: Path) -> None:
    base = stored(tmp_path / "store", 1, large := [("weight", some(2_000_000, BF16)), ("norm", some(9, BF16))])
    dense, sparse = (stored(tmp_path / "store", i, changed(large, every)) for i, every in ((2, 8), (3, 1000)))
    spare = changes_of(tmp_path, dense, base)
    assert spare is not None
    before = spare.stat()
    assert before.st_blocks * 512 > 2_000_000
    changes = begin_over(spare, sparse, base)
    assert add_all(changes, sparse, base)
    path = changes.finish()
    assert path is not None
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_blocks * 512 < 100_000, "20,000 bytes of changes, as many spare, and a header"
    served = read_tensors(base.folder)
    apply_changes(path, served)
    assert same(served, read_tensors(sparse.folder))


def test_a_dropped_file_becomes_the_spare_one(tmp_path: Path) -> None:
    base, new = (stored(tmp_path / "store", number, BORDERS) for number in (1, 2))
    spare = tmp_path / "spare-changes"
    first = begin_over(spare, new, base)
    first.drop()
    inode = spare.stat().st_ino
    second = begin_over(spare, new, base)
    assert not spare.exists()
    spare.touch()  # another was retired meanwhile
    second.drop()
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [spare.name]
    assert spare.stat().st_ino != inode


def test_a_file_that_cannot_be_made_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = stored(tmp_path / "store", 1, BORDERS)

    def fail(pages: MappedFile, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(MappedFile, "set_size", fail)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        assert ChangesFile.begin(tmp_path / "changes.safetensors", base, base.manifest) is None
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_more_changes_than_fit_end_the_file_and_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, new = (
        stored(tmp_path / "store", i, content) for i, content in ((1, BORDERS), (2, changed(BORDERS, 12)))
    )
    monkeypatch.setattr("laminar_py.relay.changes.MIN_SPACING", 100)
    changes = ChangesFile.begin(tmp_path / "changes.safetensors", base, new.manifest)
    assert changes is not None
    assert not add_all(changes, new, base)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_base_that_is_no_safetensors_file_has_no_changes(tmp_path: Path) -> None:
    base = stored(tmp_path / "store", 1, BORDERS)
    for wrong in (b"", b"\xff" * 8, (2**60).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"nonsense."):
        base.file_path(0).write_bytes(wrong + b"\0")
        assert ChangesFile.begin(tmp_path / "changes.safetensors", base, base.manifest) is None


async def serve_changes(
    node_store: Path, pulled: PulledVersion, served: dict[str, torch.Tensor], base: int
) -> None:
    """Load a pulled version as an engine does, by its changes."""
    assert pulled.changes, f"{pulled} has no changes"
    for path in pulled.changes:
        before, after = apply_changes(path, served)
        assert before == base
        base = after
    assert base == pulled.version
    assert Path(pulled.path) == node_store / f"v{base}"


@asynccontextmanager
async def following(folder: Path, place: int, **settings: object) -> AsyncIterator[tuple[Subscriber, Learner]]:
    """A tree of two nodes, a subscriber of one of them, and a learner."""
    async with (
        growing(folder, chain(2), **settings) as nodes,
        Learner(folder) as learner,
        running(replica := subscriber(nodes[place], "replica")),
    ):
        yield replica, learner


@pytest.mark.parametrize("place", [0, 1])
async def test_an_engine_follows_by_changes_alone(tmp_path: Path, place: int) -> None:
    """At the root's host, and below it; the first pull with a base makes both begin."""
    weights = tensors(1)
    async with following(tmp_path, place) as (replica, learner):
        await publish(learner, 1, weights)
        served = read_tensors(Path((await replica.pull(await replica.wait_newer(-1))).path))
        for version in range(2, 22):
            weights = changed(weights, every=90 + version, start=version)
            await publish(learner, version, weights)
            pulled = await replica.pull(await replica.wait_newer(version - 1), base=version - 1)
            await serve_changes(tmp_path / f"relay-{place}", pulled, served, version - 1)
            assert same(served, dict(weights))
            whole = await replica.pull(version)
            assert not whole.changes
            assert folder_bytes(Path(whole.path)) == folder_bytes(tmp_path / "relay-0" / f"v{version}")


async def test_an_engine_that_is_behind_gets_all_files_since_its_version_or_the_folder(tmp_path: Path) -> None:
    weights, events = tensors(1), Events()
    async with following(tmp_path, 1, keep_versions=3, emit=events) as (replica, learner):
        for version in range(1, 6):
            await publish(learner, version, weights)
            await events.first(VersionComplete, node="relay-1", version=version)
            if version == 2:
                assert len((await replica.pull(base=1)).changes) == 1
            if version == 3:
                served = dict(weights)
            weights = changed(weights, every=100)
        pulled = await replica.pull(base=3)
        assert [Path(path).name for path in pulled.changes] == [f"changes-{n}.safetensors" for n in (4, 5)]
        await serve_changes(tmp_path / "relay-1", pulled, served, 3)
        assert same(served, read_tensors(tmp_path / "relay-1" / "v5"))
        await until(lambda: "changes-2.safetensors" not in changes_in(tmp_path))
        assert not (await replica.pull(base=1)).changes


async def test_lanes_unpack_deltas_and_write_over_a_retired_file_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, threads, inodes = ChangesFile.add, set[int](), dict[int, int]()

    def look(changes: ChangesFile, *chunk: Any) -> bool:
        threads.add(threading.get_ident())
        return add(changes, *chunk)

    monkeypatch.setattr(ChangesFile, "add", look)
    weights = tensors(1)
    async with following(tmp_path, 1) as (replica, learner):
        for version in range(1, 13):
            await publish(learner, version, weights := changed(weights, every=100, start=version))
            pulled = await replica.pull(await replica.wait_newer(version - 1), base=version - 1)
            if version > 1:
                (path,) = map(Path, pulled.changes)
                inodes[version] = path.stat().st_ino
            await replica.pull(version)
            if version == 8:
                reader = path.open("rb")
                before = reader.read()
        with reader:
            assert os.pread(reader.fileno(), len(before), 0) == before
    assert threading.get_ident() not in threads
    assert len({inodes[version] for version in range(2, 9)}) < 5, inodes
    assert inodes[8] not in [inodes[version] for version in range(9, 13)]


def hold_rebuilding(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no node make a chunk of its delta until the event is set."""
    rebuild, going = StoredVersion.rebuild, threading.Event()

    def wait(*chunk: object) -> memoryview | None:
        going.wait(20.0)
        return rebuild(*chunk)

    monkeypatch.setattr(StoredVersion, "rebuild", wait)
    return going


async def test_changes_are_served_before_the_folder_is_proven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, events = tensors(1), Events()
    async with growing(tmp_path, chain(2), emit=events) as nodes, Learner(tmp_path) as learner:
        quick, slow = (subscriber(nodes[1], name) for name in ("quick", "slow"))
        async with running(quick, slow), asyncio.TaskGroup() as group:
            await publish(learner, 1, weights)
            served = read_tensors(Path((await quick.pull(await quick.wait_newer(-1))).path))
            await publish(learner, 2, weights)
            await quick.pull(await quick.wait_newer(1), base=1)
            going = hold_rebuilding(monkeypatch)
            weights = changed(weights, every=100)
            await publish(learner, 3, weights)
            assert await slow.wait_newer(2) == 3
            whole = group.create_task(slow.pull())
            pulled = await quick.pull(base=2)
            await serve_changes(tmp_path / "relay-1", pulled, served, 2)
            assert same(served, dict(weights))
            assert not (tmp_path / "relay-1" / "v3").exists()
            assert not whole.done()
            going.set()
            assert folder_bytes(Path((await whole).path)) == folder_bytes(tmp_path / "relay-0" / "v3")


async def test_a_node_that_dies_before_the_proof_starts_the_version_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, events = tensors(1), Events()
    root, node = make_node(tmp_path, "relay-0"), None
    async with running(root), Learner(tmp_path) as learner:
        async with running(node := make_node(tmp_path, "relay-1", root.endpoint, emit=events)):
            for version in range(1, 5):  # so that there is a spare to be patched in place
                await publish(learner, version, weights := changed(weights, every=100))
                await events.first(VersionComplete, version=version)
            async with running(replica := subscriber(node, "replica")):
                await replica.pull(base=3)
                going = hold_rebuilding(monkeypatch)
                await publish(learner, 5, weights := changed(weights, every=100))
                assert (await replica.pull(await replica.wait_newer(4), base=4)).changes
            closing = asyncio.create_task(node.close())
            await asyncio.sleep(0.1)
            going.set()
            await closing
        assert (tmp_path / "relay-1" / "v5.part").exists()
        async with running(revived := make_node(tmp_path, "relay-1", root.endpoint, emit=(events := Events()))):
            await events.first(VersionComplete, version=5)
            assert not list((tmp_path / "relay-1").glob("*.part"))
            async with running(replica := subscriber(revived, "replica")):  # which compares both folders
                served = read_tensors(tmp_path / "relay-1" / "v4")
                await serve_changes(tmp_path / "relay-1", await replica.pull(base=4), served, 4)
                assert same(served, dict(weights))
        assert folder_bytes(tmp_path / "relay-1" / "v5") == folder_bytes(tmp_path / "relay-0" / "v5")


def remove_part(store: Path) -> None:
    shutil.rmtree(store / "v3.part")


def remove_store(store: Path) -> None:
    shutil.rmtree(store)


def occupy_the_name(store: Path) -> None:
    (store / "v3").mkdir()
    (store / "v3" / "other").touch()


@pytest.mark.parametrize("harm", [remove_part, remove_store, occupy_the_name])
async def test_a_file_system_that_fails_at_the_proof_costs_the_version_and_not_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None]
) -> None:
    store, weights, events = tmp_path / "relay-1", tensors(1), Events()
    async with growing(tmp_path, chain(2), emit=events) as nodes, Learner(tmp_path) as learner:
        for version in (1, 2):
            await publish(learner, version, weights := changed(weights, every=100))
            await events.first(VersionComplete, node="relay-1", version=version)
        going = hold_rebuilding(monkeypatch)
        await publish(learner, 3, weights := changed(weights, every=100))
        while not (store / "v3.part").exists():  # noqa: ASYNC110 - a node reports only complete versions
            await asyncio.sleep(0.01)
        harm(store)
        going.set()
        failed = await events.first(VersionFailed, node="relay-1", version=3)
        assert "version 3" in failed.reason
        await publish(learner, 4, changed(weights, every=100))
        if harm is remove_store:
            assert f"relay.shm={store}" in (await events.first(VersionFailed, node="relay-1", version=4)).reason
            async with running(replica := subscriber(nodes[1], "replica")):
                with pytest.raises(RuntimeError, match="No such file"):
                    await replica.pull(2)
        else:
            await events.first(VersionComplete, node="relay-1", version=4)
            assert folder_bytes(store / "v4") == folder_bytes(tmp_path / "relay-0" / "v4")


def changes_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "relay-1").glob("changes-*"))


async def test_files_of_changes_go_with_their_versions_unless_they_are_being_read(tmp_path: Path) -> None:
    weights, events = tensors(1), Events()
    async with following(tmp_path, 1, emit=events) as (replica, learner):
        for version in range(1, 8):
            await publish(learner, version, weights := changed(weights, every=100))
            await events.first(VersionComplete, node="relay-1", version=version)
            if version in {2, 4}:
                await replica.pull(base=version - 2 or 1)
        await until(lambda: changes_in(tmp_path) == [f"changes-{n}.safetensors" for n in (3, 4, 6, 7)])
        await replica.pull(base=6)
        await until(lambda: changes_in(tmp_path) == [f"changes-{n}.safetensors" for n in (6, 7)])


async def test_a_root_finds_out_at_once_that_everything_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare, compared = StoredVersion.compare, list[tuple[object, ...]]()
    monkeypatch.setattr(StoredVersion, "compare", lambda *chunk: compared.append(chunk) or compare(*chunk))
    async with (
        running(root := make_node(tmp_path, "relay-0")),
        running(replica := subscriber(root, "replica")),
        Learner(tmp_path) as learner,
    ):
        for version in range(1, 4):
            await learner.publish(version, 3_000_000)
            assert not (await replica.pull(await replica.wait_newer(version - 1), base=version - 1)).changes
    # 128 KiB of header are equal, and 700 chunks follow
    assert 0 < len(compared) < 2 * 45


async def test_a_pull_gets_the_folder_where_the_file_of_changes_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tensors(1)
    async with (
        growing(tmp_path, chain(1)) as (root,),
        Learner(tmp_path) as learner,
        running(replica := subscriber(root, "replica")),
    ):
        await publish(learner, 1, weights)
        await replica.pull(await replica.wait_newer(-1))
        await publish(learner, 2, weights := changed(weights, every=100))
        assert (await replica.pull(await replica.wait_newer(1), base=1)).changes

        def fill_up(changes: ChangesFile) -> bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(ChangesFile, "_make_header", fill_up)
        await publish(learner, 3, changed(weights, every=90))
        async with asyncio.timeout(10.0):
            pulled = await replica.pull(await replica.wait_newer(2), base=2)
        assert (pulled.version, pulled.changes) == (3, ())


async def test_an_adapter_gets_changes_where_few_of_its_elements_change(tmp_path: Path) -> None:
    weights = [
        (f"base_model.model.{name}.lora_A.weight", some(5001, F32, seed)) for seed, name in enumerate("abc")
    ]
    config = b'{"peft_type": "LORA"}'
    async with growing(tmp_path, chain(2)) as nodes, running(replica := subscriber(nodes[1], "replica")):
        learner = Publisher(tmp_path / "relay-0", chunk_bytes=CHUNK, adapter_config=config)
        for version in range(1, 4):
            await asyncio.to_thread(learner.publish, version, weights := changed(weights, every=100))
            pulled = await replica.pull(await replica.wait_newer(version - 1), base=version - 1)
            if version == 2:
                served = read_tensors(tmp_path / "relay-0" / "v2")
        await serve_changes(tmp_path / "relay-1", pulled, served, 2)
        assert same(served, dict(weights))
        learner.close()
