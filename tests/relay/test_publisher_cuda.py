"""Copies from a GPU: what arrives is what was there, however late. Order and bounds are tested on a CPU."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from laminar_py.relay import device_copy
from laminar_py.relay.device_copy import NUM_BUFFERS, DeviceCopier, TensorCopier
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.publisher import Publisher
from laminar_py.relay.version_store import SPARE

SIZES = (3, 40_000, 0, 16_384, 5, 16_385, 100_000)
PIECE = 2**14

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class LateEvent:
    """Of a device that is never done before one waits for it."""

    waiting = 0

    def record(self, stream: object) -> None:
        LateEvent.waiting += 1

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        LateEvent.waiting -= 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a slow device, which takes small pieces."""
    monkeypatch.setattr(torch.cpu, "Event", LateEvent)
    monkeypatch.setattr(device_copy, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(LateEvent, "waiting", 0)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[MappedFile]:
    pages = MappedFile(tmp_path / "file")
    yield pages
    pages.close()


@contextmanager
def publishing(store: Path) -> Iterator[Publisher]:
    publisher = Publisher(store)
    try:
        yield publisher
    finally:
        publisher.close()


def randoms() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def copy_all(copier: DeviceCopier | TensorCopier, pages: MappedFile, tensors: list[torch.Tensor]) -> None:
    """Copy tensors one after the other, and compare the file with them."""
    whole = torch.cat([tensor.cpu() for tensor in tensors]).numpy().tobytes()
    position = 0
    for tensor in tensors:
        if isinstance(copier, TensorCopier):
            copier.copy(tensor, pages, position, dtype=tensor.dtype)
        else:
            copier.copy(tensor, pages, position)
        position += tensor.nbytes
    copier.wait()
    assert bytes(pages.read(0, position)) == whole


@pytest.mark.parametrize("mapped", [0, 50_000, sum(SIZES)])
@pytest.mark.usefixtures("late")
def test_pieces_arrive_in_the_pages_or_through_buffers(pages: MappedFile, mapped: int) -> None:
    if mapped:
        pages.write(0, np.zeros(mapped, np.uint8))
        pages.keep_mapped()
        pages.set_page_locked(lambda: None)
    copy_all(DeviceCopier(), pages, randoms())
    assert LateEvent.waiting == 0


@pytest.mark.usefixtures("late")
def test_no_more_is_on_its_way_than_buffers_or_the_bound_on_tensors_allow(
    pages: MappedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    copier, position = DeviceCopier(), 0
    for tensor in randoms():
        copier.copy(tensor, pages, position)
        position += tensor.nbytes
        assert LateEvent.waiting <= NUM_BUFFERS
    copier.wait()
    pages.keep_mapped()
    pages.set_page_locked(lambda: None)
    monkeypatch.setattr(device_copy, "MAX_HELD_BYTES", 50_000)
    copier.copy(torch.zeros(40_000, dtype=torch.uint8), pages, 0)
    copier.copy(torch.zeros(10_000, dtype=torch.uint8), pages, 0)
    assert LateEvent.waiting == 4
    copier.copy(torch.zeros(1, dtype=torch.uint8), pages, 0)
    assert LateEvent.waiting == 2  # the first tensor is let go
    copier.wait()


@pytest.mark.usefixtures("late")
def test_a_copier_that_dropped_what_was_on_its_way_copies_on(pages: MappedFile) -> None:
    copier = DeviceCopier()
    for _ in range(NUM_BUFFERS + 1):
        copier.copy(torch.ones(PIECE, dtype=torch.uint8), pages, 0)
        copier.drop()
        assert LateEvent.waiting == 0
    copy_all(copier, pages, randoms())


def test_pages_are_unlocked_before_they_are_unmapped(tmp_path: Path) -> None:
    pages = MappedFile(tmp_path / "file")
    pages.write(0, np.zeros(5000, np.uint8))
    pages.keep_mapped()
    seen: list[bool] = []
    pages.set_page_locked(lambda: seen.append(pages.mapped_view(0, 5000) is not None))
    pages.set_size(10)
    assert not pages.is_page_locked
    pages.close()
    assert seen == [True]


class TestCuda:
    pytestmark = needs_gpu

    def made(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that are still being computed when they are handed over, and are gone right after."""
        generator = torch.Generator("cuda").manual_seed(seed)
        for number, size in enumerate((4096, 1, 3000, 17)):
            a = torch.randn(size, 4096, device="cuda", generator=generator)
            for _ in range(20):
                a = torch.sin(a @ torch.ones(4096, 4096, device="cuda"))
            yield f"t{number}", a.bfloat16()
            yield f"view{number}", a[:, ::2].T
            del a

    def test_versions_are_those_of_the_same_tensors_in_main_memory(self, tmp_path: Path) -> None:
        with publishing(tmp_path / "gpu") as gpu, publishing(tmp_path / "cpu") as cpu:
            for version in range(3):  # through buffers into fresh pages, then by itself into page-locked ones
                given = [(name, tensor.cpu()) for name, tensor in self.made(version)]
                cpu.publish(version, given)
                gpu.publish(version, self.made(version))
                assert gpu.completed(version).digest == cpu.completed(version).digest
                (tmp_path / "gpu" / f"v{version}").rename(tmp_path / "gpu" / SPARE)

    def test_weights_may_change_when_publish_returns(self, tmp_path: Path) -> None:
        weights = torch.zeros(200 * 2**20, dtype=torch.uint8, device="cuda")
        with publishing(tmp_path) as publisher:
            for version in range(1, 4):
                weights.fill_(version)
                publisher.publish(version, [("weights", weights)])
                weights.zero_()
                publisher.completed(version)
                (file,) = (tmp_path / f"v{version}").glob("*.safetensors")
                assert bool((load_file(file)["weights"] == version).all())
                (tmp_path / f"v{version}").rename(tmp_path / SPARE)

    @pytest.fixture
    def pages(self) -> Iterator[MappedFile]:
        """In shared memory: CUDA locks no pages of a disk's file."""
        with TemporaryDirectory(dir="/dev/shm") as folder:
            pages = MappedFile(Path(folder) / "file")
            yield pages
            pages.close()

    def test_kept_pages_are_page_locked_and_still_count_as_unused(self, pages: MappedFile) -> None:
        copier, tensors = TensorCopier(), [tensor.cuda() for tensor in randoms()]
        copy_all(copier, pages, tensors)
        pages.keep_mapped()
        copier.page_lock(pages)
        assert pages.is_page_locked
        assert pages.is_unused
        copy_all(copier, pages, [255 - tensor for tensor in tensors])

    def test_tensors_in_main_memory_leave_cuda_alone(self, tmp_path: Path) -> None:
        code = (
            "import sys, torch; from pathlib import Path; from laminar_py.relay.publisher import Publisher\n"
            "publisher = Publisher(Path(sys.argv[1]))\n"
            "publisher.publish(1, [('t', torch.ones(9))]); publisher.completed(1); publisher.close()\n"
            "sys.exit(torch.cuda.is_initialized())"
        )
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
