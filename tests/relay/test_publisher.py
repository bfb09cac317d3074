"""What the learner writes: safetensors, one tensor at a time, whether or not a root is there."""

import mmap
import re
import resource
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from laminar_py.records.weights import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PREFIX,
    Published,
    StoredTensor,
    TensorSource,
)
from laminar_py.relay.digests import (
    TASK_BYTES,
    digest_of,
    version_digest,
)
from laminar_py.relay.mapped_file import MappedFile, allow_many_files
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.stored_version import CHECKSUMS, MANIFEST, NoRoomError
from laminar_py.relay.version_layout import HEADER_BYTES, SHARD_BYTES
from laminar_py.relay.version_store import SPARE, VersionStore, folder_name
from tests.relay.faults import small_disk
from tests.relay.tree import CHUNK, folder_bytes, read_checksums, tensors

RUN_BYTES = 2 * TASK_BYTES


def publish(publisher: Publisher, version: int, given: Iterable[tuple[str, torch.Tensor]]) -> Published:
    publisher.publish(version, given)
    return publisher.completed(version)


@contextmanager
def publishing(
    store: Path,
    *,
    chunk_bytes: int = CHUNK,
    shard_bytes: int = SHARD_BYTES,
    adapter_config: bytes | None = None,
) -> Iterator[Publisher]:
    publisher = Publisher(store, chunk_bytes=chunk_bytes, shard_bytes=shard_bytes, adapter_config=adapter_config)
    try:
        yield publisher
    finally:
        publisher.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    with publishing(tmp_path, shard_bytes=2 * HEADER_BYTES) as publisher:
        yield publisher


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*")
        if path.suffix == ".safetensors"
        for name, tensor in load_file(path).items()
    }


def bytes_of(size: int, value: int = 1) -> tuple[str, torch.Tensor]:
    """A tensor that makes a file of `size` bytes if it is alone in it."""
    return "weights", torch.full((size - HEADER_BYTES,), value, dtype=torch.uint8)


def held(store: Path) -> list[str]:
    """Files of a store that this process has open or mapped, in folders that are no versions."""
    names = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    names += Path("/proc/self/maps").read_text().splitlines()
    inside = [name for name in names if str(store) in name]
    return [name for name in inside if name.endswith("(deleted)") or not re.search(r"/v\d+/", name)]


def retire(store: Path, version: int) -> None:
    """As the root does."""
    (store / folder_name(version)).rename(store / SPARE)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A store of 8 MiB."""
    with small_disk(tmp_path / "small", 8 * 2**20) as mounted:
        if not mounted:
            pytest.skip("mounting a file system needs root on Linux")
        yield tmp_path / "small"


def test_safetensors_gives_back_every_dtype_and_shape(publisher: Publisher, tmp_path: Path) -> None:
    dtypes = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
    )
    given = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    given |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "view": torch.arange(12.0).reshape(3, 4).T}
    publish(publisher, 1, given.items())
    got = loaded(tmp_path / "v1")
    assert got.keys() == given.keys()
    for name, tensor in given.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert got[name].float().equal(tensor.float())


def test_adapters_are_two_files_of_just_their_size(tmp_path: Path) -> None:
    """However many tensors: a 70B model has more than the header of a plain file has room for."""
    config = b'{"peft_type": "LORA"}'
    name = PREFIX + "model.layers.{}.self_attn.q_proj.lora_A.weight"
    given = {name.format(i): torch.ones(1, 2) * i for i in range(2000)}
    with publishing(tmp_path, adapter_config=config) as publisher:
        published = publish(publisher, 1, given.items())
        assert publish(publisher, 2, given.items()).digest == published.digest
    weights, notes = (tmp_path / "v1" / name for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG))
    assert {path.name for path in (tmp_path / "v1").iterdir()} == {weights.name, notes.name, MANIFEST, CHECKSUMS}
    assert notes.read_bytes() == config
    got = load_file(weights)
    assert got.keys() == given.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in given.items())
    assert published.num_bytes == weights.stat().st_size + len(config)
    store = VersionStore(tmp_path, keep_versions=1)
    store.open()
    assert [entry.name for entry in store.complete[1].manifest.files] == [weights.name, notes.name]


def test_a_published_version_is_complete_and_found_by_a_store(publisher: Publisher, tmp_path: Path) -> None:
    published = publish(publisher, 3, tensors(3))
    store = VersionStore(tmp_path, keep_versions=1)
    store.open()
    manifest = store.complete[3].manifest
    assert (manifest.digest, manifest.num_bytes) == (published.digest, published.num_bytes)
    assert [entry.size for entry in manifest.files] == [
        (tmp_path / "v3" / entry.name).stat().st_size for entry in manifest.files
    ]
    assert published.stall_s > 0


def test_the_same_tensors_have_the_same_digest(publisher: Publisher) -> None:
    assert publish(publisher, 1, tensors(1)).digest == publish(publisher, 2, tensors(1)).digest
    assert publish(publisher, 3, tensors(2)).digest != publish(publisher, 4, tensors(1)).digest


def test_shards_keep_their_bound_but_for_a_tensor_that_alone_exceeds_it(
    publisher: Publisher, tmp_path: Path
) -> None:
    sizes = (40_000, 40_000, 60_000, 500_000, 10)
    publish(
        publisher, 1, ((f"t{number}", torch.zeros(size, dtype=torch.uint8)) for number, size in enumerate(sizes))
    )
    names = []
    for path in sorted((tmp_path / "v1").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names.append(sorted(file.keys()))
    assert names == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]


def test_a_shard_closes_when_its_header_is_full(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher:
        given = {f"{'n' * 100}.{number}": torch.tensor([number]) for number in range(1500)}
        publish(publisher, 1, given.items())
    assert len(folder_bytes(tmp_path / "v1")) == 2
    assert loaded(tmp_path / "v1") == given


def read_late(name: str, make: Callable[[], torch.Tensor], *, size: int) -> TensorSource:
    """The source of a tensor of bytes that is made when it is read."""
    return TensorSource((StoredTensor(name, torch.uint8, (size,)),), lambda: [(name, 0, make())])


def test_no_more_than_one_tensor_is_held_at_a_time(publisher: Publisher, tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def made() -> torch.Tensor:
        assert sum(ref() is not None for ref in alive) <= 1
        tensor = torch.full((1000,), len(alive), dtype=torch.uint8)
        alive.append(weakref.ref(tensor))
        return tensor

    publisher.publish_sources(1, [read_late(f"t{number}", made, size=1000) for number in range(5)])
    publisher.completed(1)
    assert {name: int(tensor[0]) for name, tensor in loaded(tmp_path / "v1").items()} == {
        f"t{number}": number for number in range(5)
    }


def test_the_learner_goes_on_once_its_tensors_are_copied(publisher: Publisher, tmp_path: Path) -> None:
    rest = threading.Event()
    publisher._finisher.submit(rest.wait)
    publisher.publish(1, tensors(1))
    assert not (tmp_path / "v1").exists()
    rest.set()
    assert publisher.completed(1).version == 1


def test_a_version_number_is_used_once(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 5, tensors(1))
    for version in (5, 4):
        with pytest.raises(ValueError, match=f"version {version} is not above 5"):
            publisher.publish(version, tensors(1))
    with publishing(tmp_path) as revived, pytest.raises(ValueError, match="version 5 is not above 5"):
        revived.publish(5, tensors(1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "version 1 has no tensors"),
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "tensor a comes twice"),
        ([("a", torch.zeros(1)), ("b", torch.zeros(1, dtype=torch.complex64))], "tensor b: dtype"),
    ],
)
def test_bad_tensors_are_refused_and_leave_nothing(
    publisher: Publisher, tmp_path: Path, given: list[tuple[str, torch.Tensor]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        publish(publisher, 1, given)
    assert not list(tmp_path.iterdir())
    assert publish(publisher, 1, tensors(1)).version == 1


def test_what_a_crashed_publisher_left_is_thrown_away(tmp_path: Path) -> None:
    (tmp_path / "v1.new").mkdir()
    with publishing(tmp_path) as publisher:
        publish(publisher, 1, tensors(1))
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_pages_of_a_retired_version_are_written_over_if_nobody_uses_them(
    publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 1, tensors(1, 400_000))
    old = next((tmp_path / "v1").glob("*.safetensors"))
    inode, name = old.stat().st_ino, old.name
    retire(tmp_path, 1)
    published = publish(publisher, 2, tensors(2, 200_000))
    assert (tmp_path / "v2" / name).stat().st_ino == inode
    assert published.digest == publish(publisher, 3, tensors(2, 200_000)).digest
    assert loaded(tmp_path / "v2").keys() == loaded(tmp_path / "v3").keys()


def test_pages_that_a_process_still_maps_are_left_to_it(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 1, tensors(1))
    with safe_open(next((tmp_path / "v1").glob("*.safetensors")), "pt") as mapped:
        retire(tmp_path, 1)
        publish(publisher, 2, tensors(2))
        given = dict(tensors(1))
        assert all(mapped.get_tensor(name).equal(given[name]) for name in mapped.keys())  # noqa: SIM118
    assert loaded(tmp_path / "v2").keys() == given.keys()


def test_pages_of_deleted_files_are_let_go_of_after_the_next_publish_and_not_in_it(
    publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing: list[str] = []
    unmap = MappedFile._unmap

    def noted(pages: MappedFile) -> None:
        closing.append(threading.current_thread().name)
        unmap(pages)

    for version in (1, 2):
        publish(publisher, version, tensors(version, 400_000))
    publish(publisher, 3, tensors(3))
    monkeypatch.setattr(MappedFile, "_unmap", noted)
    retire(tmp_path, 1)
    shutil.rmtree(tmp_path / "v2")
    with next((tmp_path / SPARE).glob("*.safetensors")).open("rb"):  # this one cannot be written over
        publisher.publish(4, tensors(4))
    publisher.publish(5, tensors(5))  # which waits for what came of version 4
    assert publisher.completed(5).version == 5
    assert not held(tmp_path)
    assert closing
    assert all(name.startswith("finish") for name in closing)


def test_files_that_the_new_version_lacks_do_not_stay_in_it(publisher: Publisher, tmp_path: Path) -> None:
    several = [(f"t{number}", torch.zeros(60_000, dtype=torch.uint8)) for number in range(4)]
    publish(publisher, 1, several)
    retire(tmp_path, 1)
    publish(publisher, 2, several[:1])
    assert loaded(tmp_path / "v2").keys() == {"t0"}
    publish(publisher, 3, several[:1])  # which waits until those are let go of
    assert not held(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [4096, 3 * 2**20, 2 * TASK_BYTES])
def test_checksums_are_those_of_the_content(tmp_path: Path, chunk_bytes: int) -> None:
    with publishing(tmp_path, chunk_bytes=chunk_bytes, shard_bytes=2 * RUN_BYTES) as publisher:
        sizes = (2 * RUN_BYTES, 2 * RUN_BYTES, RUN_BYTES + TASK_BYTES + 5, 3 * RUN_BYTES + 4096, HEADER_BYTES + 1)
        for version, size in enumerate(sizes):  # fresh, warm, shrunk, grown, of one part
            published = publish(publisher, version, [bytes_of(size, version), ("last", torch.randn(TASK_BYTES))])
            folder = tmp_path / folder_name(version)
            store = VersionStore(tmp_path, keep_versions=1)
            store.open()
            files = store.complete[version].manifest.files
            checksums = [read_checksums(folder / entry.name, chunk_bytes=chunk_bytes) for entry in files]
            assert [entry.digest for entry in files] == [digest_of(made) for made in checksums]
            assert (folder / CHECKSUMS).read_bytes() == b"".join(checksums)
            assert published.digest == version_digest(files)
            retire(tmp_path, version)


@pytest.mark.parametrize("warm", [False, True])
def test_a_publish_that_fails_leaves_no_folder_and_no_file_open_or_mapped(tmp_path: Path, warm: bool) -> None:
    with publishing(tmp_path, shard_bytes=2 * RUN_BYTES) as publisher:
        given = [
            (f"t{number}", torch.randint(256, (RUN_BYTES + TASK_BYTES,), dtype=torch.uint8)) for number in range(2)
        ]

        def failing() -> torch.Tensor:
            raise ZeroDivisionError

        sources = [TensorSource.whole(*item) for item in given] + [read_late("last", failing, size=1)]
        if warm:
            publish(publisher, 1, given)
            retire(tmp_path, 1)
        with pytest.raises(ZeroDivisionError):
            publisher.publish_sources(2, sources)
        assert not list(tmp_path.iterdir())
        assert not held(tmp_path)
        publish(publisher, 2, given)
        assert all(loaded(tmp_path / "v2")[name].equal(tensor) for name, tensor in given)
    assert not held(tmp_path)


def test_a_version_that_finds_no_room_gives_back_what_it_took(small: Path) -> None:
    with publishing(small) as publisher:
        with pytest.raises(NoRoomError, match=r"version 1 needs at least \d+ bytes"):
            publisher.publish(1, [bytes_of(9 * 2**20)])
        assert not list(small.iterdir())
        assert not held(small)
        publish(publisher, 1, [bytes_of(7 * 2**20)])


def test_a_version_that_finds_no_room_for_its_manifest_fails_alone(small: Path) -> None:
    with publishing(small) as publisher:
        publisher.publish(1, [bytes_of(8 * 2**20)])
        publisher.publish(2, [bytes_of(7 * 2**20)])
        with pytest.raises(NoRoomError, match="version 1 needs at least 8388608 bytes and 0 are free"):
            publisher.completed(1)
        assert publisher.completed(2).version == 2
        assert [path.name for path in small.iterdir()] == ["v2"]
        assert not held(small)


def test_a_process_gets_all_the_open_files_that_it_may_have() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] - 1, before[1]))
    try:
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def address_space(spare_bytes: int) -> Iterator[None]:
    """This process gets no more of it than `spare_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + spare_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_version_is_complete_though_its_pages_cannot_be_mapped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing(tmp_path) as publisher:
        given = [bytes_of(3 * RUN_BYTES)]
        publish(publisher, 1, given)  # all threads are there
        with address_space(RUN_BYTES):
            publish(publisher, 2, given)
            publish(publisher, 3, given)
        assert f"cannot map {3 * RUN_BYTES} bytes" in caplog.text
        assert all(loaded(tmp_path / name)["weights"].equal(given[0][1]) for name in ("v2", "v3"))
