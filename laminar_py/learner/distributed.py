"""The learner's process group. Called by a learner process when there are several, or one with CUDA.

Invariant: ranks of one host meet through a file and talk over the loopback interface, so nothing listens on
any other (torch's TCP store would, on every interface and without authentication).
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def join_group(rendezvous: Path, *, rank: int, world_size: int, device_type: str = "cpu") -> DeviceMesh:
    """Join the data-parallel group of this host's ranks; returns once all have joined.

    `rendezvous` is a file that does not exist yet, the same for all ranks and new for each incarnation.
    `device_type` is "cpu" (gloo) or "cuda" (nccl; rank r uses device r).
    """
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    # Gloo and NCCL read their interface from the environment only.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=dist.FileStore(str(rendezvous), world_size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
    )
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data",))


def leave_group() -> None:
    """Leave the group that `join_group` joined."""
    dist.destroy_process_group()
