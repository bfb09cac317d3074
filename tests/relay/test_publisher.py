"""What the learner writes: safetensors, one tensor at a time, whether or not a root is there."""

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from laminar_py.relay.publisher import HEADER_BYTES, Publisher
from laminar_py.relay.store import MANIFEST, SPARE, Store
from laminar_py.types import Published
from tests.relay.tree import KEYS, folder_bytes, tensors

NOBODY = "tcp://127.0.0.1:9"  # the discard port: no root there


def publish(publisher: Publisher, version: int, given: Iterable[tuple[str, torch.Tensor]]) -> Published:
    publisher.publish(version, given)
    return publisher.sealed(version)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path, NOBODY, KEYS, shard_bytes=2 * HEADER_BYTES)
    yield publisher
    publisher.close(linger_s=0)


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in folder.glob("*")
        if path.suffix == ".safetensors"
        for name, tensor in load_file(path).items()
    }


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


def test_a_published_version_is_complete_and_found_by_a_store(publisher: Publisher, tmp_path: Path) -> None:
    published = publish(publisher, 3, tensors(3))
    store = Store(tmp_path, keep_versions=1)
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
    publisher = Publisher(tmp_path, NOBODY, KEYS)
    given = {f"{'n' * 100}.{number}": torch.tensor([number]) for number in range(1500)}
    publish(publisher, 1, given.items())
    publisher.close(linger_s=0)
    assert len(folder_bytes(tmp_path / "v1")) == 2
    assert loaded(tmp_path / "v1") == given


def test_no_more_than_one_tensor_is_held_at_a_time(publisher: Publisher, tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def one_by_one() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(5):
            assert sum(ref() is not None for ref in alive) <= 1
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            yield f"t{number}", tensor

    publish(publisher, 1, one_by_one())
    assert len(loaded(tmp_path / "v1")) == 5


def test_a_version_number_is_used_once(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 5, tensors(1))
    for version in (5, 4):
        with pytest.raises(ValueError, match=f"version {version} is not above 5"):
            publisher.publish(version, tensors(1))
    revived = Publisher(tmp_path, NOBODY, KEYS)
    with pytest.raises(ValueError, match="version 5 is not above 5"):
        revived.publish(5, tensors(1))
    revived.close(linger_s=0)


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
    publisher = Publisher(tmp_path, NOBODY, KEYS)
    publish(publisher, 1, tensors(1))
    publisher.close(linger_s=0)
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]


def test_pages_of_a_retired_version_are_written_over_if_nobody_uses_them(
    publisher: Publisher, tmp_path: Path
) -> None:
    publish(publisher, 1, tensors(1, 400_000))
    old = next((tmp_path / "v1").glob("*.safetensors"))
    inode, name = old.stat().st_ino, old.name
    (tmp_path / "v1").rename(tmp_path / SPARE)
    published = publish(publisher, 2, tensors(2, 200_000))
    assert (tmp_path / "v2" / name).stat().st_ino == inode
    assert published.digest == publish(publisher, 3, tensors(2, 200_000)).digest
    assert loaded(tmp_path / "v2").keys() == loaded(tmp_path / "v3").keys()


def test_pages_that_a_process_still_maps_are_left_to_it(publisher: Publisher, tmp_path: Path) -> None:
    publish(publisher, 1, tensors(1))
    with safe_open(next((tmp_path / "v1").glob("*.safetensors")), "pt") as mapped:
        (tmp_path / "v1").rename(tmp_path / SPARE)
        publish(publisher, 2, tensors(2))
        given = dict(tensors(1))
        assert all(mapped.get_tensor(name).equal(given[name]) for name in mapped.keys())  # noqa: SIM118
    assert sorted(path.name for path in (tmp_path / "v2").iterdir())[0] == MANIFEST


def test_files_that_the_new_version_lacks_do_not_stay_in_it(publisher: Publisher, tmp_path: Path) -> None:
    several = [(f"t{number}", torch.zeros(60_000, dtype=torch.uint8)) for number in range(4)]
    publish(publisher, 1, several)
    (tmp_path / "v1").rename(tmp_path / SPARE)
    publish(publisher, 2, several[:1])
    assert loaded(tmp_path / "v2").keys() == {"t0"}
