"""Read-back of checkpoints: values of the live learner against the bytes of the files (law 13).

`Checkpointer` samples the learner when a save begins and after a load, from the parameters and the optimizer's
own state, so that a fault of the copy, of torch's writer or of its reader shows as a difference. Each rank samples
its own shards, `SAMPLES` values of each tensor, at other places for each checkpoint. It reads these bytes alone:
a tensor is a zip archive of `torch.save` in a file of the checkpoint, whose member `data/0` is stored as it is.
"""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from laminar_py.learner.marker import MARKER, read_marker

SAMPLES = 16  # values of each tensor
HEADER_BYTES = 4096  # more than the archive has before the values
VISIBLE_S, POLL_S = 60.0, 0.5  # NFS may show the files of another host that late
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of a parameter


@dataclass(frozen=True, slots=True)
class TensorSample:
    """Values of one tensor, e.g. `TensorSample("model.lm_head.weight", [[7, 2], ...], [[0, 0, 128, 63], ...])`."""

    key: str  # as the checkpoint names the tensor
    places: npt.NDArray[np.int64]  # [n, dimensions] in the full tensor
    values: npt.NDArray[np.uint8]  # [n, bytes of a value]


def sample_learner(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, seed: str, prefix: str = ""
) -> list[TensorSample]:
    """Return values of this rank's trained weights and of their AdamW state, at places drawn from `seed`.

    The state of an optimizer that has made no update is zero. Keys begin with `prefix`.
    """
    rng = np.random.default_rng(list(seed.encode()))
    live = ((f"{prefix}{key}", tensor) for key, tensor in _live(model, optimizer))
    return [_sample(key, tensor, rng) for key, tensor in live if _local(tensor).numel()]


def counted_updates(samples: Sequence[TensorSample]) -> int:
    """Return AdamW's own count of the policy's updates; a parameter without a gradient counts fewer."""
    of_policy = [one for one in samples if one.key.startswith("optimizer.")]
    counts = [one.values.view(np.float32) for one in of_policy if one.key.endswith(f".{MOMENTS[0]}")]
    return int(max((count.max() for count in counts), default=0))


def saved_fault(folder: Path, samples: Sequence[TensorSample], *, step: int, updates: int) -> str:
    """Compare a complete checkpoint with the learner's samples, steps and updates at the save; "" if it is sound.

    An error of the read is a fault too: a checkpoint that cannot be read is none.
    """
    deadline = time.monotonic() + VISIBLE_S
    while not (folder / MARKER).exists() and time.monotonic() < deadline:
        time.sleep(POLL_S)
    counted = counted_updates(samples)
    if counted != updates:
        return _fault(folder, f"AdamW has counted {counted} updates, and the learner has made {updates}")
    try:
        marker = read_marker(folder)
    except Exception as error:  # noqa: BLE001 - the run continues, with the older checkpoint
        return _fault(folder, f"cannot be read back: {error!r}")
    if (marker.step, marker.updates) != (step, updates):
        of_disk = f"step {marker.step} and {marker.updates} updates"
        return _fault(folder, f"has {of_disk} on disk, and the learner was at step {step} and {updates} updates")
    return stored_fault(folder, samples)


def stored_fault(folder: Path, samples: Sequence[TensorSample]) -> str:
    """Compare samples of the learner with the checkpoint's files; return the fault, "" if they are equal."""
    differing = []
    try:
        metadata = FileSystemReader(folder).read_metadata()
        with ExitStack() as opened:
            files: dict[str, int] = {}
            for one in samples:
                if one.key not in metadata.state_dict_metadata:
                    return _fault(folder, f"{one.key} is not on disk")
                if not np.array_equal(_read(folder, metadata, one, files, opened), one.values):
                    differing.append(one.key)
    except Exception as error:  # noqa: BLE001 - of torch, pickle or the disk; the run continues
        return _fault(folder, f"cannot be read back: {error!r}")
    if not differing:
        return ""
    others = f", and so do {len(differing) - 1} of {len(samples)} other tensors" if differing[1:] else ""
    return _fault(folder, f"{differing[0].removeprefix('model.')} on disk differs from the learner's{others}")


def _fault(folder: Path, fault: str) -> str:
    return f"checkpoint {folder.name}: {fault}"


# ---- the live learner


def _live(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield every trained parameter and its AdamW state, with their names in a checkpoint."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        yield f"model.{name}", parameter.detach()
        state = optimizer.state.get(parameter, {})
        for moment in MOMENTS:
            if moment in state:
                yield f"optimizer.state.{name}.{moment}", state[moment]
            elif not optimizer.state:
                yield (
                    f"optimizer.state.{name}.{moment}",
                    torch.zeros(()) if moment == "step" else torch.zeros_like(parameter),
                )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sample(key: str, tensor: Tensor, rng: np.random.Generator) -> TensorSample:
    """Copy values of this rank's part of a tensor, which may be on a GPU."""
    local = _local(tensor)
    flat = rng.integers(0, local.numel(), min(SAMPLES, local.numel()))
    values = local.reshape(-1)[torch.from_numpy(flat).to(local.device)].cpu()
    places = np.zeros((len(flat), local.ndim), np.int64)
    if local.ndim:
        places[:] = np.stack(np.unravel_index(flat, tuple(local.shape)), axis=1)
    if isinstance(tensor, DTensor):
        _, first = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        places += np.array(first, np.int64)
    return TensorSample(key, places, values.view(torch.uint8).reshape(len(flat), -1).numpy())


# ---- the files


def _read(
    folder: Path, metadata: Metadata, sample: TensorSample, files: dict[str, int], opened: ExitStack
) -> npt.NDArray[np.uint8]:
    """Read the stored values at a sample's places, whatever ranks wrote them. Raises an error of the files."""
    stored = metadata.state_dict_metadata[sample.key]
    assert isinstance(stored, TensorStorageMetadata), f"{sample.key} is no tensor"
    offsets = np.array([chunk.offsets for chunk in stored.chunks], np.int64).reshape(len(stored.chunks), -1)
    sizes = np.array([chunk.sizes for chunk in stored.chunks], np.int64).reshape(offsets.shape)
    places = sample.places[:, None]  # [n, 1, dimensions]
    owners = ((offsets <= places) & (places < offsets + sizes)).all(-1).argmax(-1)  # [n] chunk of each place
    values = np.zeros_like(sample.values)
    for chunk in np.unique(owners):
        rows = owners == chunk
        inside = sample.places[rows] - offsets[chunk]
        flat = np.ravel_multi_index(tuple(inside.T), tuple(sizes[chunk])) if inside.shape[1] else np.zeros(1, int)
        info = metadata.storage_data[MetadataIndex(sample.key, stored.chunks[chunk].offsets)]
        if info.relative_path not in files:
            files[info.relative_path] = os.open(folder / info.relative_path, os.O_RDONLY)
            opened.callback(os.close, files[info.relative_path])
        values[rows] = _read_values(files[info.relative_path], info.offset, flat, size=values.shape[1])
    return values


def _read_values(file: int, archive: int, flat: npt.NDArray[np.int64], *, size: int) -> npt.NDArray[np.uint8]:
    """Read values, each of `size` bytes, of the tensor whose archive begins at the byte `archive` of a file."""
    head = os.pread(file, HEADER_BYTES, archive)
    entry = head.rindex(b"PK\x03\x04", 0, head.index(b"/data/0"))  # local header of the member
    name_bytes, extra_bytes = struct.unpack_from("<HH", head, entry + 26)
    first = archive + entry + 30 + name_bytes + extra_bytes
    read = b"".join(os.pread(file, size, first + int(place) * size) for place in flat)
    return np.frombuffer(read, np.uint8).reshape(len(flat), size)
