"""Copies of tensors into version files, from main memory or from a GPU, with a cast on the way.

The publisher uses it. The processor casts straight into mapped pages. A GPU casts and copies on a stream of its
own while the next tensor is being made: straight into the file where that is page-locked, else through two
page-locked buffers. No memory of a tensor is reused before it was read (`tests/relay/test_publisher_cuda.py`).
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from laminar_py.records.weights import TensorSource
from laminar_py.relay.mapped_file import WRITE_BYTES, MappedFile
from laminar_py.relay.version_layout import VersionLayout

log = logging.getLogger(__name__)

PIECE_BYTES = 16 * 2**20  # by a GPU at once: long enough to hide the start of the next copy
NUM_BUFFERS = 2  # one is filled while the other is emptied
MAX_HELD_BYTES = 256 * 2**20  # of tensors that a GPU still copies, unless one tensor alone is larger

# (number of a version's file, byte, number of bytes) -> the open file that gets them, and the position there
PlaceOf = Callable[[int, int, int], tuple[MappedFile, int]]


class _Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A piece of a tensor on its way to [position, position + len(target)) of a file."""

    arrived: _Event
    target: Tensor  # [num_bytes] uint8, in a buffer or in the mapped file itself
    buffer: Tensor | None
    pages: MappedFile
    position: int
    # The tensor and its bytes, so that their memory stays allocated until the GPU has read it. `record_stream`
    # instead would keep it for as long as the host runs ahead.
    sources: tuple[Tensor, Tensor]
    frees: int  # bytes of the tensor if this is its last piece, else 0


class TensorCopier:
    """Copies tensors into mapped files, from main memory or a GPU; uses CUDA only for tensors on a GPU."""

    def __init__(self) -> None:
        self._device_copier: DeviceCopier | None = None

    def copy(self, tensor: Tensor, pages: MappedFile, position: int, *, dtype: torch.dtype) -> None:
        """Cast a tensor to `dtype` and copy it to `position` of a file: at once, or from a GPU by the next `wait`.

        A tensor on a GPU must not change before `wait`. Raises `OSError` on a full file system.
        """
        tensor = tensor.detach()
        if tensor.is_cuda:
            if self._device_copier is None:
                self._device_copier = DeviceCopier()
            self._device_copier.copy(tensor.to(dtype), pages, position)
        elif tensor.numel():
            _copy_on_host(tensor, pages, position, dtype)

    def copy_rows(self, sources: Sequence[TensorSource], layout: VersionLayout, place: PlaceOf) -> None:
        """Copy the rows that sources yield to where `place` puts them, and wait. Raises `OSError` as `copy`.

        Reads all sources also after an error: other ranks may wait for this one in a collective.
        """
        error: OSError | None = None
        for source in sources:
            for name, first, values in source.read():
                target = layout.places[name]
                dtype = target.stored.dtype
                try:
                    if error is None:
                        found = place(target.file, target.byte_of(first), values.numel() * dtype.itemsize)
                        self.copy(values, *found, dtype=dtype)
                except OSError as failed:
                    error = failed
        if error is not None:
            raise error
        self.wait()

    def wait(self) -> None:
        """Wait until all copies have arrived. Raises `OSError` on a full file system."""
        if self._device_copier is not None:
            self._device_copier.wait()

    def drop(self) -> None:
        """Abandon copies that were not waited for; return when the GPU no longer reads a tensor."""
        if self._device_copier is not None:
            self._device_copier.drop()

    def page_lock(self, pages: MappedFile) -> None:
        """Page-lock a mapped file, so that a GPU can write into it, if tensors come from a GPU.

        Call it in a thread that starts no work on a GPU: CUDA reports a failure again at the thread's next call.
        """
        if self._device_copier is not None and self._device_copier.device is not None:
            page_lock_for(pages, self._device_copier.device)


class DeviceCopier:
    """Copies tensors from a device in pieces, of which several are in flight; tests run it with CPU tensors."""

    def __init__(self) -> None:
        self.device: torch.device | None = None  # of the last tensor
        self._streams: dict[torch.device, torch.Stream] = {}
        self._in_flight: deque[_Piece] = deque()
        self._held_bytes = 0
        self._buffers: list[Tensor] = []  # [PIECE_BYTES] each, made at the first use
        self._free: list[Tensor] = []  # buffers that no piece uses

    def copy(self, tensor: Tensor, pages: MappedFile, position: int) -> None:
        """Start to copy a tensor to `position` of a file; finish copies that are done or hold much memory."""
        self.device = tensor.device
        while self._in_flight and self._held_bytes + tensor.nbytes > MAX_HELD_BYTES:
            self._finish_oldest()
        module = torch.get_device_module(tensor.device)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = module.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(module.current_stream(tensor.device))  # which makes the tensor
        with module.stream(stream):
            raw = _raw(tensor)
            for begin in range(0, len(raw), PIECE_BYTES):
                source = raw[begin : begin + PIECE_BYTES]
                target, buffer = self._target(pages, position + begin, len(source))
                target.copy_(source, non_blocking=True)
                arrived = module.Event()
                arrived.record(stream)
                frees = tensor.nbytes if begin + len(source) == len(raw) else 0
                self._held_bytes += frees
                self._in_flight.append(
                    _Piece(
                        arrived=arrived,
                        target=target,
                        buffer=buffer,
                        pages=pages,
                        position=position + begin,
                        sources=(tensor, raw),
                        frees=frees,
                    )
                )
                while self._in_flight and self._in_flight[0].arrived.query():
                    self._finish_oldest()

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        while self._in_flight:
            self._finish_oldest()

    def drop(self) -> None:
        """Abandon copies that were not waited for; return when the device no longer reads a tensor."""
        try:
            for piece in self._in_flight:
                piece.arrived.synchronize()
        finally:
            self._in_flight.clear()
            self._held_bytes = 0
            self._free = list(self._buffers)

    def _target(self, pages: MappedFile, position: int, size: int) -> tuple[Tensor, Tensor | None]:
        """Return [size] uint8 memory to copy to: mapped, or in a buffer (returned too) after a wait for one."""
        view = pages.mapped_view(position, size) if pages.is_page_locked else None
        if view is not None:
            return torch.frombuffer(view, dtype=torch.uint8), None
        if not self._buffers:
            pin = self.device is not None and self.device.type != "cpu"
            self._buffers = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pin) for _ in range(NUM_BUFFERS)
            ]
            self._free = list(self._buffers)
        while not self._free:
            self._finish_oldest()
        buffer = self._free.pop()
        return buffer[:size], buffer

    def _finish_oldest(self) -> None:
        """Wait for the oldest piece, and write it to the file if it came through a buffer."""
        piece = self._in_flight.popleft()
        piece.arrived.synchronize()
        if piece.buffer is not None:
            piece.pages.write(piece.position, piece.target.numpy())
            self._free.append(piece.buffer)
        self._held_bytes -= piece.frees


def _copy_on_host(tensor: Tensor, pages: MappedFile, position: int, dtype: torch.dtype) -> None:
    """Copy a tensor in main memory: in one pass that casts into mapped pages, else through pieces."""
    view = pages.mapped_view(position, tensor.numel() * dtype.itemsize)
    if view is not None and position % dtype.itemsize == 0:
        torch.frombuffer(view, dtype=dtype).view(tensor.shape).copy_(tensor)
        return
    flat = tensor.reshape(-1)
    elements = WRITE_BYTES // dtype.itemsize
    for begin in range(0, len(flat), elements):
        piece = flat[begin : begin + elements].to(dtype)
        pages.write(position + begin * dtype.itemsize, _raw(piece).numpy())


def page_lock_for(pages: MappedFile, device: torch.device) -> None:
    """Page-lock a mapped file until it is unmapped; log a warning if CUDA refuses, and copy through buffers."""
    size = pages.size
    view = pages.mapped_view(0, size)
    if view is None or pages.is_page_locked:
        return
    address = np.frombuffer(view, np.uint8).ctypes.data
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        refused = cudart.cudaHostRegister(address, size, 0)
    if refused != cudart.cudaError.success:
        log.warning("CUDA cannot page-lock %d bytes (slow copies): %s", size, cudart.cudaGetErrorString(refused))
        return
    pages.set_page_locked(lambda: _unlock(address))


def _unlock(address: int) -> None:
    """Undo the page-lock of the memory at `address`; log a warning if CUDA refuses."""
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refused = cudart.cudaHostUnregister(address)
    if refused != cudart.cudaError.success:
        log.warning("CUDA cannot unlock page-locked memory: %s", cudart.cudaGetErrorString(refused))


def _raw(tensor: Tensor) -> Tensor:
    """[nbytes] uint8 view of a tensor's bytes on its device; a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
