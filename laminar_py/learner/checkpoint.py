"""Learner state on disk: weights, optimizer, step and random state. Called by `step.Learner`.

Invariant: a checkpoint is complete or refused. It is written as `<name>.tmp`, gets its marker `complete.json`
last, and takes its name by one rename; a folder without the marker is torn.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

MARKER = "complete.json"


class Marker(msgspec.Struct, frozen=True):
    """What `complete.json` says, e.g. `{"step": 40, "world_size": 2}`."""

    step: int
    world_size: int


def save_checkpoint(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, mesh: DeviceMesh | None
) -> None:
    """Write the state after `step` steps. Collective; returns when it is on disk. Replaces an older `folder`."""
    rank, world_size = _place(mesh)
    partial = folder.with_name(f"{folder.name}.tmp")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(mesh)
    weights, moments = get_state_dict(model, optimizer)
    with _alone_without_warning():
        state_dict_saver.save(
            {"model": weights, "optimizer": moments}, checkpoint_id=partial, no_dist=mesh is None
        )
    _write(partial / f"random-{rank}.bin", torch.get_rng_state().numpy().tobytes())
    _barrier(mesh)
    if rank == 0:
        _write(partial / MARKER, msgspec.json.encode(Marker(step, world_size)))
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _sync_folder(folder.parent)
    _barrier(mesh)


def load_checkpoint(
    folder: Path, *, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None
) -> int:
    """Restore model and optimizer bit by bit; returns the step. Collective.

    Another world size than the one that saved it is fine, but draws its random numbers anew. Raises
    `ValueError` if the checkpoint is torn.
    """
    marker = read_marker(folder)
    rank, world_size = _place(mesh)
    weights, moments = get_state_dict(model, optimizer)
    with _alone_without_warning():
        state_dict_loader.load(
            {"model": weights, "optimizer": moments}, checkpoint_id=folder, no_dist=mesh is None
        )
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    if marker.world_size == world_size:
        state = bytearray((folder / f"random-{rank}.bin").read_bytes())
        torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
    return marker.step


def read_marker(folder: Path) -> Marker:
    """The marker of a complete checkpoint; `ValueError` if there is none."""
    path = folder / MARKER
    if not path.is_file():
        raise ValueError(
            f"checkpoint={folder}: has no {MARKER}, so it is torn or missing; resume from an older one"
        )
    return msgspec.json.decode(path.read_bytes(), type=Marker)


def _place(mesh: DeviceMesh | None) -> tuple[int, int]:
    return (mesh.get_rank(), mesh.size()) if mesh else (0, 1)


def _barrier(mesh: DeviceMesh | None) -> None:
    if mesh:
        dist.barrier(group=mesh.get_group())


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """Torch warns of a missing process group even where `no_dist` says that there is none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """A rename survives a power cut only once its folder is on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
