"""The window of credits, whatever order chunks come in."""

import tempfile
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.relay.node.intake import ChunkOutcome, Intake
from laminar_py.relay.store.version import StoredVersion
from laminar_py.relay.store.versions import Store
from tests.depth import examples
from tests.relay.tree import CHUNK, write_version

WINDOW = 4  # what a version of such large chunks gets


def intake_of(origin: StoredVersion, folder: Path, *, window: int) -> Intake:
    store = Store(folder / "store", keep_versions=1)
    store.open()
    return Intake(store.begin(origin.manifest), window=window, now=lambda: 0.0)


@settings(deadline=None, max_examples=examples(40))
@given(st.data(), st.lists(st.integers(1, 9 * CHUNK), min_size=1, max_size=3))
def test_every_chunk_is_asked_for_once_and_never_more_than_the_window(
    data: st.DataObject, sizes: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        origin = write_version(Path(folder) / "origin", 1, *sizes)
        intake = intake_of(origin, Path(folder), window=WINDOW)
        wanted: list[tuple[int, int]] = []
        asked = 0
        while True:
            for fetch in intake.grant():
                wanted += [(fetch.file, fetch.first_chunk + number) for number in range(fetch.credits)]
                asked += fetch.credits
            assert len(wanted) <= WINDOW
            if not wanted:
                break
            chunk = origin.read(*wanted.pop(data.draw(st.integers(0, len(wanted) - 1))))
            assert intake.accept(chunk, keep_delta=True) is ChunkOutcome.WRITTEN
            assert intake.accept(chunk, keep_delta=True) is ChunkOutcome.USELESS
        assert asked == sum(origin.manifest.num_chunks(file) for file in range(len(sizes)))
        assert all(
            intake.stored.file_path(file).read_bytes() == origin.file_path(file).read_bytes()
            for file in range(len(sizes))
        )


def test_a_chunk_that_is_damaged_short_or_foreign_is_not_written(tmp_path: Path) -> None:
    origin = write_version(tmp_path / "origin", 1, 2 * CHUNK)
    intake = intake_of(origin, tmp_path, window=WINDOW)
    chunk = origin.read(0, 0)
    assert (
        intake.accept(msgspec.structs.replace(chunk, checksum=b"0" * 32), keep_delta=True) is ChunkOutcome.DAMAGED
    )
    assert (
        intake.accept(msgspec.structs.replace(chunk, data=chunk.data[1:]), keep_delta=True) is ChunkOutcome.DAMAGED
    )
    assert intake.accept(msgspec.structs.replace(chunk, index=2), keep_delta=True) is ChunkOutcome.USELESS
    assert intake.accept(msgspec.structs.replace(chunk, file=1), keep_delta=True) is ChunkOutcome.USELESS
    assert not intake.stored.has(0, 0)


def test_after_a_restart_only_missing_chunks_are_asked_for(tmp_path: Path) -> None:
    origin = write_version(tmp_path / "origin", 1, 5 * CHUNK)
    intake = intake_of(origin, tmp_path, window=5)
    intake.grant()
    intake.accept(origin.read(0, 1), keep_delta=True)
    assert not intake.grant()  # the window is more than half full
    intake.restart()
    assert [(fetch.first_chunk, fetch.credits) for fetch in intake.grant()] == [(0, 1), (2, 3)]
