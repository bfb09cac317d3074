"""Version folders, pins and digests on disk."""

import os
import stat
from pathlib import Path

import pytest
from blake3 import blake3

from laminar_py.config.section import ConfigError
from laminar_py.relay.digests import version_digest
from laminar_py.relay.messages import Manifest
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.version_store import SPARE, VersionStore
from tests.relay.tree import CHUNK, digest, put_chunk, write_version


def make_store(path: Path, keep_versions: int = 2) -> VersionStore:
    store = VersionStore(path, keep_versions=keep_versions)
    store.open()
    return store


def test_open_throws_away_what_was_unfinished_and_keeps_the_rest(tmp_path: Path) -> None:
    write_version(tmp_path, 3, CHUNK)
    for name in ("v4.part", "v2.abc.old", "v5.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model-0.safetensors").write_bytes(b"half")
    assert sorted(make_store(tmp_path).complete) == [3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3", "v5.new"]  # that is the publisher's


def test_folders_are_private(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, CHUNK)
    store = make_store(tmp_path / "run" / "store")
    arriving = store.begin(version.manifest)
    put_chunk(arriving, version.read_chunk(0, 0))
    store.commit(arriving)
    for folder in (tmp_path / "run", tmp_path / "run" / "store", tmp_path / "run" / "store" / "v1"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_version_has_its_name_only_after_commit(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, CHUNK + 1)
    store = make_store(tmp_path / "store")
    arriving = store.begin(version.manifest)
    for index in (1, 0):
        assert list(arriving.missing_chunks()) == [(0, number) for number in range(index + 1)]
        put_chunk(arriving, version.read_chunk(0, index))
        assert not (tmp_path / "store" / "v1").exists()
    assert arriving.is_whole
    store.commit(arriving)
    assert (tmp_path / "store" / "v1" / "model-0.safetensors").read_bytes() == version.file_path(0).read_bytes()
    assert make_store(tmp_path / "store").complete[1].manifest == version.manifest


def test_digests_are_blake3_of_chunks_of_these_and_of_sorted_names_and_digests(tmp_path: Path) -> None:
    manifest: Manifest = write_version(tmp_path, 1, CHUNK, 3 * CHUNK - 1).manifest
    content = [(tmp_path / "v1" / entry.name).read_bytes() for entry in manifest.files]
    chunks = [[data[start : start + CHUNK] for start in range(0, len(data), CHUNK)] for data in content]
    digests = [blake3(b"".join(blake3(chunk).digest() for chunk in file)) for file in chunks]
    assert [entry.digest for entry in manifest.files] == [digest.hexdigest() for digest in digests]
    joined = b"".join(
        entry.name.encode() + b"\0" + digest.digest()
        for entry, digest in zip(manifest.files, digests, strict=True)
    )
    assert manifest.digest == blake3(joined).hexdigest() == version_digest(manifest.files[::-1])


def test_what_is_newest_pinned_or_held_stays(tmp_path: Path) -> None:
    for version in range(1, 7):
        write_version(tmp_path, version, CHUNK)
    store = make_store(tmp_path, keep_versions=2)
    store.pin("replica-0", 1)
    store.pin("replica-1", 2)
    store.pin("replica-1", 3)
    assert [stored.manifest.version for stored in store.surplus({4})] == [2]
    assert [stored.manifest.version for stored in make_store(tmp_path).surplus(set())] == [2, 4]


def test_what_is_retired_is_gone_at_once_and_may_come_again(tmp_path: Path) -> None:
    version = write_version(tmp_path, 1, CHUNK)
    store = make_store(tmp_path)
    assert store.retire(store.complete[1]) is None
    assert not store.complete
    assert [path.name for path in tmp_path.iterdir()] == [SPARE]
    again: StoredVersion = store.begin(version.manifest)
    assert [path.name for path in tmp_path.iterdir()] == ["v1.part"]
    assert not again.has_chunk(0, 0)


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file that this process has read."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    begins = [number for number, line in enumerate(lines) if line.endswith(str(path))]
    return sum(1024 * int(lines[begin + 4].split()[1]) for begin in begins)


def test_files_that_were_read_are_written_over(tmp_path: Path) -> None:
    version = write_version(tmp_path, 1, CHUNK)
    store = make_store(tmp_path)
    one = store.complete[1]
    inode = one.file_path(0).stat().st_ino
    before = bytes(one.chunk_data(0, 0))
    assert resident_bytes(one.file_path(0)) >= CHUNK
    one.release_pages()
    assert resident_bytes(one.file_path(0)) == 0
    assert one.chunk_data(0, 0) == before
    store.retire(one)
    assert store.begin(version.manifest).file_path(0).stat().st_ino == inode


def test_of_two_that_are_retired_one_is_kept_to_be_written_over(tmp_path: Path) -> None:
    for version in (1, 2):
        write_version(tmp_path, version, CHUNK)
    store = make_store(tmp_path)
    assert store.retire(store.complete[1]) is None
    doomed = store.retire(store.complete[2])
    assert doomed is not None
    assert doomed.is_dir()
    store.delete(doomed)
    assert [path.name for path in tmp_path.iterdir()] == [SPARE]


def test_a_store_that_is_opened_again_knows_the_checksums_without_reading_the_files(tmp_path: Path) -> None:
    version = write_version(tmp_path, 1, 2 * CHUNK + 5)
    version.file_path(0).write_bytes(bytes(2 * CHUNK + 5))
    stored = make_store(tmp_path).complete[1]
    assert [stored.read_chunk(0, index).checksum for index in range(3)] == [
        version.read_chunk(0, index).checksum for index in range(3)
    ]
    assert stored.file_digest(0) == version.manifest.files[0].digest


def test_a_checksum_travels_with_its_chunk(tmp_path: Path) -> None:
    version = write_version(tmp_path / "origin", 1, CHUNK)
    arriving = make_store(tmp_path / "store").begin(version.manifest)
    chunk = version.read_chunk(0, 0)
    put_chunk(arriving, chunk)
    arriving.file_path(0).write_bytes(os.urandom(CHUNK))  # the disk forgets
    assert arriving.read_chunk(0, 0).checksum == chunk.checksum
    assert digest(arriving.file_path(0)) != version.manifest.files[0].digest


@pytest.mark.parametrize("data", [b"{}", b'{"vers', b'{"version": "\xff"}'])
def test_a_manifest_that_cannot_be_read_is_one_line(tmp_path: Path, data: bytes) -> None:
    (write_version(tmp_path, 1, CHUNK).folder / "manifest.json").write_bytes(data)
    with pytest.raises(
        ConfigError, match=rf"^version={tmp_path}/v1: manifest\.json cannot .*; delete this folder$"
    ):
        make_store(tmp_path)


def test_room_that_an_abandoned_version_gives_back_counts_with_all_its_pages(tmp_path: Path) -> None:
    """Also pages that hold what was there before: a version that is to arrive is written over them."""
    full = write_version(tmp_path / "origin", 1, 40 * CHUNK)
    arriving = make_store(tmp_path / "store").begin(full.manifest)
    for index in range(40):
        put_chunk(arriving, full.read_chunk(0, index))
    arriving.forget_file(0)
    assert arriving.allocated_bytes >= 40 * CHUNK
    assert not arriving.has_chunk(0, 0)


def test_a_replaced_spare_of_changes_is_freed_only_by_delete(tmp_path: Path) -> None:
    """To free its pages takes 0.1 s for a gigabyte, and pins move on the event loop."""
    store, versions = make_store(tmp_path), [write_version(tmp_path, number, CHUNK) for number in (1, 2)]
    store.discover()
    for stored in versions:
        number = stored.manifest.version
        (tmp_path / f"changes-{number}.safetensors").write_bytes(b"x" * CHUNK)
        store.add_changes(store.complete[number], number - 1)

    def num_kept() -> int:
        links = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return sum(link.is_symlink() and "spare-changes (deleted)" in os.readlink(link) for link in links)

    for number in (1, 2):
        store.retire(store.complete[number])
    assert num_kept() == 1
    store.delete(None)
    assert num_kept() == 0
    assert (tmp_path / "spare-changes").stat().st_size == CHUNK
