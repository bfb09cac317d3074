"""The learner's process group. Called by a learner process when there are several, or one with CUDA.

Invariant: ranks of one host meet through a file and talk over the loopback interface, so nothing listens on any
other. Ranks of several hosts meet at a port of rank 0's and talk over the interface that leads there, all without
authentication: that network must be private to the cluster.
"""

import os
import socket
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laminar_py.records.codec import decode, encode

Record = TypeVar("Record", bound=msgspec.Struct)

JOIN_S = 600  # ranks load their models at different speeds


def join_group(rendezvous: str, *, rank: int, world_size: int, device_type: str = "cpu") -> DeviceMesh:
    """Join the data-parallel group; returns once all have joined.

    `rendezvous` is the same for all ranks and new for each incarnation: the path of a file that does not exist
    yet for ranks of one host, or `tcp://ip:port` with an address of rank 0's host and a port that is free there.
    `device_type` is "cpu" (gloo) or "cuda" (nccl; each rank uses the first device that it sees).
    """
    if device_type == "cuda":
        torch.cuda.set_device(0)
    store, interface = _meet(rendezvous, rank, world_size)
    # Gloo and NCCL read their interface from the environment only.
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"  # gloo for what is offloaded to the host
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    return init_device_mesh(device_type, (world_size,), mesh_dim_names=("data",))


def leave_group() -> None:
    """Leave the group that `join_group` joined."""
    dist.destroy_process_group()


def share_record(record: Record | None, kind: type[Record], *, mesh: DeviceMesh) -> Record:
    """The typed record that rank 0 has and the others, which give None, have not: its length, then its bytes."""
    data = torch.frombuffer(bytearray(encode(record)), dtype=torch.uint8) if record is not None else torch.empty(0)
    length = torch.tensor(len(data))
    dist.broadcast(length, group=mesh.get_group(), group_src=0)
    if record is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, group=mesh.get_group(), group_src=0)
    return decode(kind, data.numpy().tobytes())


def _meet(rendezvous: str, rank: int, world_size: int) -> tuple["dist.Store", str]:  # type: ignore[name-defined]
    """The store at the rendezvous, and the interface that leads to the others."""
    address = urlsplit(rendezvous)
    if address.scheme != "tcp":
        return dist.FileStore(rendezvous, world_size), "lo"  # type: ignore[attr-defined]
    host, port = address.hostname, address.port
    assert host is not None, f"rendezvous {rendezvous} has no host"
    assert port is not None, f"rendezvous {rendezvous} has no port"
    listening = None
    if rank == 0:
        # Given none, the store would listen on every interface. It closes the socket with itself.
        listening = socket.create_server((host, port)).detach()
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=JOIN_S),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    return store, _interface_towards(host, port)


def _interface_towards(host: str, port: int) -> str:
    """Name of the interface that the route to a host begins at, e.g. `eth0`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
        outgoing.connect((host, port))  # sends nothing
        own = outgoing.getsockname()[0]
    names = [name for name, known in psutil.net_if_addrs().items() if own in (entry.address for entry in known)]
    assert names, f"no interface has the address {own}"
    return names[0]
