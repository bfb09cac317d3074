"""Copies of tensors into version files, from main memory or from a GPU.

Called by the publisher. A GPU copies by itself, on a stream of its own, while the next tensor is being made: into
the file where that is page-locked, else through two page-locked buffers. Invariant: a file is said to be filled up
to a place only when all before it has arrived, and memory of a tensor is not reused before it was read.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from laminar_py.relay.store.pages import Pages

log = logging.getLogger(__name__)

COPY_BYTES = 8 * 2**20  # by a processor, before hashing threads may hear of it
PIECE_BYTES = 16 * 2**20  # by a GPU at once: long enough to hide the starting of the next
NUM_BUFFERS = 2  # one is filled while the other is emptied
HELD_BYTES = 256 * 2**20  # of tensors that a GPU still copies, or one tensor that is larger

Filled = Callable[[int], None]


class _Event(Protocol):
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A piece of a tensor on its way to [position, position + len(landing)) of a file."""

    arrived: _Event
    landing: Tensor  # [num_bytes] uint8, of a buffer or of the pages themselves
    buffer: Tensor | None
    pages: Pages
    position: int
    filled: Filled
    # The tensor and its bytes. A reference is released when they were read, at the latest in `wait`; after
    # `record_stream` they would stay allocated for as long as the host runs ahead.
    sources: tuple[Tensor, Tensor]
    frees: int  # bytes of the tensor if this is its last piece, else 0


class TensorCopier:
    """Copies one tensor after the other; CUDA is not touched before the first tensor that lies there."""

    def __init__(self) -> None:
        self._device_copier: DeviceCopier | None = None

    def copy(self, tensor: Tensor, pages: Pages, position: int, *, filled: Filled) -> None:
        """Put a tensor's bytes there; calls `filled(end)` as they arrive, which may be in a later call.

        A tensor on a GPU must not be changed before `wait`. Raises `OSError` on a full file system.
        """
        if tensor.is_cuda:
            if self._device_copier is None:
                self._device_copier = DeviceCopier()
            self._device_copier.copy(tensor, pages, position, filled=filled)
            return
        self.wait()
        raw = _raw(tensor).numpy()
        for begin in range(0, len(raw), COPY_BYTES):
            piece = raw[begin : begin + COPY_BYTES]
            pages.write(position + begin, piece)
            filled(position + begin + len(piece))

    def wait(self) -> None:
        """Until all have arrived. Raises `OSError` on a full file system."""
        if self._device_copier is not None:
            self._device_copier.wait()

    def drop(self) -> None:
        """Give up what has not arrived: returns when nothing is on its way."""
        if self._device_copier is not None:
            self._device_copier.drop()

    def lock(self, pages: Pages) -> None:
        """Let GPUs write into what is mapped of a file, if tensors come from one.

        Call it in a thread that starts no work on a GPU: CUDA keeps a failure for the thread's next check.
        """
        if self._device_copier is not None and self._device_copier.device is not None:
            page_lock(pages, self._device_copier.device)


class DeviceCopier:
    """Pieces in flight from a device, in order; the streams of a CPU, which do nothing, will also do."""

    def __init__(self) -> None:
        self.device: torch.device | None = None  # of the last tensor
        self._streams: dict[torch.device, torch.Stream] = {}
        self._flying: deque[_Piece] = deque()
        self._held_bytes = 0
        self._buffers: list[Tensor] = []
        self._free: list[Tensor] = []

    def copy(self, tensor: Tensor, pages: Pages, position: int, *, filled: Filled) -> None:
        """See `TensorCopier`."""
        self.device = tensor.device
        while self._flying and self._held_bytes + tensor.nbytes > HELD_BYTES:
            self._land()
        module = torch.get_device_module(tensor.device)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = module.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(module.current_stream(tensor.device))  # which makes the tensor
        with module.stream(stream):
            raw = _raw(tensor)
            for begin in range(0, len(raw), PIECE_BYTES):
                source = raw[begin : begin + PIECE_BYTES]
                landing, buffer = self._landing(pages, position + begin, len(source))
                landing.copy_(source, non_blocking=True)
                arrived = module.Event()
                arrived.record(stream)
                frees = tensor.nbytes if begin + len(source) == len(raw) else 0
                self._held_bytes += frees
                self._flying.append(
                    _Piece(
                        arrived=arrived,
                        landing=landing,
                        buffer=buffer,
                        pages=pages,
                        position=position + begin,
                        filled=filled,
                        sources=(tensor, raw),
                        frees=frees,
                    )
                )
                while self._flying and self._flying[0].arrived.query():
                    self._land()

    def wait(self) -> None:
        """See `TensorCopier`."""
        while self._flying:
            self._land()

    def drop(self) -> None:
        """See `TensorCopier`."""
        try:
            for piece in self._flying:
                piece.arrived.synchronize()
        finally:
            self._flying.clear()
            self._held_bytes = 0
            self._free = list(self._buffers)

    def _landing(self, pages: Pages, position: int, size: int) -> tuple[Tensor, Tensor | None]:
        """[size] uint8 where the device may write, and the buffer that it is in, if it is in one."""
        view = pages.mapped(position, size) if pages.is_locked else None
        if view is not None:
            return torch.frombuffer(view, dtype=torch.uint8), None
        if not self._buffers:
            pin = self.device is not None and self.device.type != "cpu"
            self._buffers = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=pin) for _ in range(NUM_BUFFERS)
            ]
            self._free = list(self._buffers)
        while not self._free:
            self._land()
        buffer = self._free.pop()
        return buffer[:size], buffer

    def _land(self) -> None:
        """Wait for the oldest piece."""
        piece = self._flying.popleft()
        piece.arrived.synchronize()
        if piece.buffer is not None:
            piece.pages.write(piece.position, piece.landing.numpy())
            self._free.append(piece.buffer)
        self._held_bytes -= piece.frees
        piece.filled(piece.position + len(piece.landing))


def page_lock(pages: Pages, device: torch.device) -> None:
    """Page-lock what is mapped of a file until it is unmapped. Where CUDA refuses, copies go through buffers."""
    size = pages.size
    view = pages.mapped(0, size)
    if view is None or pages.is_locked:
        return
    address = np.frombuffer(view, np.uint8).ctypes.data
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        refused = cudart.cudaHostRegister(address, size, 0)
    if refused != cudart.cudaError.success:
        log.warning("CUDA cannot page-lock %d bytes: %s", size, cudart.cudaGetErrorString(refused))
        return
    pages.locked(lambda: _unlock(address))


def _unlock(address: int) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    refused = cudart.cudaHostUnregister(address)
    if refused != cudart.cudaError.success:
        log.warning("CUDA cannot let go of page-locked memory: %s", cudart.cudaGetErrorString(refused))


def _raw(tensor: Tensor) -> Tensor:
    """[nbytes] uint8 its bytes where it lies; a copy if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
