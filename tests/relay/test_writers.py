"""Publishers of several ranks: one version of all shares, and after an error of any rank nothing."""

import errno
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from laminar_py.records.weights import StoredTensor, TensorSource
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.stored_version import NoRoomError
from laminar_py.relay.version_layout import HEADER_BYTES
from laminar_py.relay.version_store import SPARE, folder_name
from laminar_py.relay.writers import MAX_DESCRIPTORS, SOCKET
from tests.learner.ranks import prepared
from tests.relay.faults import small_disk
from tests.relay.tree import CHUNK, PATIENCE_S

ROWS, COLUMNS = 301, 7


def weights(version: int, *, count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{number}": torch.randn(ROWS + number, COLUMNS, generator=generator) for number in range(count)}


def shares(given: dict[str, torch.Tensor], rank: int, ranks: int) -> list[TensorSource]:
    """Rows of one rank, to be cast to bf16."""

    def source(name: str, tensor: torch.Tensor) -> TensorSource:
        rows = tensor.tensor_split(ranks)[rank]
        first = sum(len(one) for one in tensor.tensor_split(ranks)[:rank]) * COLUMNS
        return TensorSource(
            (StoredTensor(name, torch.bfloat16, tuple(tensor.shape)),), lambda: [(name, first, rows)]
        )

    return [source(*item) for item in given.items()]


class Ranks:
    """Publishers of ranks in one process, each called on a thread of its own."""

    def __init__(self, store: Path, *, ranks: int, shard_bytes: int = 2 * HEADER_BYTES) -> None:
        self.store = store
        self.publishers = [
            Publisher(store, chunk_bytes=CHUNK, shard_bytes=shard_bytes, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        self._threads = ThreadPoolExecutor(ranks)

    def begin(self, version: int, sources: Sequence[Sequence[TensorSource]]) -> list[Future[float]]:
        return [
            self._threads.submit(publisher.publish_sources, version, its)
            for publisher, its in zip(self.publishers, sources, strict=True)
        ]

    def publish(self, version: int, given: dict[str, torch.Tensor]) -> str:
        ranks = len(self.publishers)
        for one in self.begin(version, [shares(given, rank, ranks) for rank in range(ranks)]):
            one.result(PATIENCE_S)
        return self.publishers[0].completed(version).digest

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()
        self._threads.shutdown()


@contextmanager
def ranks_of(store: Path, *, ranks: int = 2, shard_bytes: int = 2 * HEADER_BYTES) -> Iterator[Ranks]:
    with ExitStack() as stack:
        made = Ranks(store, ranks=ranks, shard_bytes=shard_bytes)
        stack.callback(made.close)
        yield made


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in folder.glob("*.safetensors") for name, one in load_file(path).items()}


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_version_has_all_shares_cast(tmp_path: Path, ranks: int) -> None:
    with ranks_of(tmp_path / "several", ranks=ranks) as several, ranks_of(tmp_path / "alone", ranks=1) as alone:
        for version in range(4):
            given = weights(version)
            assert several.publish(version, given) == alone.publish(version, given)
            found = loaded(several.store / folder_name(version))
            assert all(found[name].equal(tensor.bfloat16()) for name, tensor in given.items())
            if not (several.store / SPARE).exists() and version:
                (several.store / folder_name(version - 1)).rename(several.store / SPARE)
    assert not (tmp_path / "several" / SOCKET).exists()


def test_more_files_than_a_message_has_descriptors_are_shared(tmp_path: Path) -> None:
    given = weights(1, count=MAX_DESCRIPTORS + 20)
    with ranks_of(tmp_path, shard_bytes=1) as ranks:
        ranks.publish(1, given)
    found = loaded(tmp_path / "v1")
    assert len(list((tmp_path / "v1").glob("*.safetensors"))) == len(given)
    assert all(found[name].equal(tensor.bfloat16()) for name, tensor in given.items())


def test_pages_that_a_reader_maps_are_left_to_it_and_others_are_reused(tmp_path: Path) -> None:
    with ranks_of(tmp_path) as ranks:
        for version in range(3):
            ranks.publish(version, weights(version))
        path = next((tmp_path / "v0").glob("*.safetensors"))
        inode = path.stat().st_ino
        (tmp_path / "v0").rename(tmp_path / SPARE)
        ranks.publish(3, weights(3))
        assert (tmp_path / "v3" / path.name).stat().st_ino == inode
        with safe_open(tmp_path / "v1" / path.name, "pt") as mapped:
            (tmp_path / "v1").rename(tmp_path / SPARE)
            ranks.publish(4, weights(4))
            assert mapped.get_tensor("t0").equal(weights(1)["t0"].bfloat16())
        found = loaded(tmp_path / "v4")
        assert all(found[name].equal(tensor.bfloat16()) for name, tensor in weights(4).items())


def test_a_store_with_a_long_path_has_a_socket(tmp_path: Path) -> None:
    with ranks_of(tmp_path / ("long" * 40)) as ranks:
        assert ranks.publish(1, weights(1))


def test_a_write_without_room_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for rank in (0, 1, 2):
        with ranks_of(tmp_path / f"{rank}", ranks=3) as ranks:
            ranks.publish(1, weights(1))
            with monkeypatch.context() as patched:
                patched.setattr(ranks.publishers[rank]._copier, "copy", full)
                for one in ranks.begin(2, [shares(weights(2), one, 3) for one in range(3)]):
                    with pytest.raises(NoRoomError, match=r"relay\.shm=.*: version 2 needs at least \d+ bytes"):
                        one.result(PATIENCE_S)
            assert [path.name for path in ranks.store.iterdir()] == ["v1"]
            ranks.publish(2, weights(2))  # with the same publishers


def test_a_file_system_that_is_full_refuses_a_version_on_all_ranks(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 2 * 2**20) as mounted:
        if not mounted:
            pytest.skip("mounting a file system needs root on Linux")
        with ranks_of(tmp_path / "small") as ranks:
            large = {"large": torch.zeros(300_000, COLUMNS)}
            for one in ranks.begin(1, [shares(large, rank, 2) for rank in range(2)]):
                with pytest.raises(NoRoomError, match="version 1 needs at least 4331072 bytes"):
                    one.result(PATIENCE_S)
            assert not list((tmp_path / "small").iterdir())
            assert ranks.publish(1, weights(1))


def test_an_error_of_one_rank_names_it_on_the_others(tmp_path: Path) -> None:
    def broken() -> list[tuple[str, int, torch.Tensor]]:
        raise ZeroDivisionError("no such shard")

    with ranks_of(tmp_path) as ranks:
        sources = [shares(weights(1), rank, 2) for rank in range(2)]
        sources[1][2] = TensorSource(sources[1][2].stored, broken)
        first, second = ranks.begin(1, sources)
        with pytest.raises(RuntimeError, match=r"rank 1 of the learner: ZeroDivisionError\('no such shard'\)"):
            first.result(PATIENCE_S)
        with pytest.raises(ZeroDivisionError):
            second.result(PATIENCE_S)
        assert not list(tmp_path.iterdir())


# ---- processes that end


def rank_main(store: Path, rank: int, version: int, *, dies: bool, ready: Callable[[], object]) -> None:
    """Publish a version; a rank that `dies` is killed when its copy is made and no checksum is."""
    torch.set_num_threads(1)
    if rank:
        ready()
    publisher = Publisher(store, chunk_bytes=CHUNK, rank=rank, ranks=2)
    if not rank:
        ready()
    if dies:
        publisher._hash_share = lambda _: os.kill(os.getpid(), 9)  # type: ignore[method-assign, return-value, assignment]
    publisher.publish_sources(version, shares(weights(version), rank, 2))
    if rank == 0:
        publisher.completed(version)
    publisher.close()


def run(store: Path, version: int, *, victim: int | None) -> list[int | None]:
    """Exit codes of two ranks that publish a version."""
    prepared()
    context = multiprocessing.get_context("forkserver")
    exists = context.Event()
    processes = [
        context.Process(
            target=rank_main,
            args=(store, rank, version),
            kwargs={"dies": rank == victim, "ready": exists.wait if rank else exists.set},
        )
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_between_copy_and_rename_leaves_no_version_and_the_next_ranks_publish(
    tmp_path: Path, victim: int
) -> None:
    store = tmp_path / "store"
    assert run(store, 1, victim=None) == [0, 0]
    codes = run(store, 2, victim=victim)
    assert codes[victim] == -9
    if victim:
        assert codes[0] == 1, "rank 0 raises the end of rank 1"
        assert [path.name for path in store.iterdir()] == ["v1"]
    else:
        assert {path.name for path in store.iterdir()} == {"v1", "v2.new"}
    assert run(store, 2, victim=None) == [0, 0]
    assert {path.name for path in store.iterdir()} == {"v1", "v2"}
    assert all(loaded(store / "v2")[name].equal(one.bfloat16()) for name, one in weights(2).items())
    shutil.rmtree(store)
