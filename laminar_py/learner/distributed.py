"""The learner's process group, and sums over its ranks.

A learner process joins a group when there are several ranks, or one with CUDA. Ranks of one host meet through a
file and talk over the loopback interface, so no port is open on another interface (law 7). Ranks of several hosts
meet at a port of rank 0 and talk, without authentication, over the interface that leads there: that network must
be private to the cluster.
"""

import os
import socket
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import psutil
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from laminar_py.learner.context import join_context
from laminar_py.records.codec import decode, encode
from laminar_py.records.metrics import RankPosition

Record = TypeVar("Record", bound=msgspec.Struct)
_ours: dict[str, str] = {}  # variables of the environment that the user did not set

JOIN_S = 86_400  # seconds that a rank waits for rank 0, which may make a warm start first; keepers see crashes
COLLECTIVE_S = 1_800  # of a collective: ranks load models and read adapters' bases at different speeds
STANDS_S = 45.0  # in an activity that takes seconds; with the time between two looks less than a minute
COMPUTES_S = 600.0  # in a pass over one microbatch, which may compile the model's layers
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")  # gloo and NCCL read them from the environment only


def join_group(
    rendezvous: str,
    *,
    rank: int,
    world_size: int,
    device_type: str = "cpu",
    on_cuda: str = "nccl",
    shard_ranks: int | None = None,
) -> DeviceMesh:
    """Join the data-parallel group: wait until all ranks have joined, and return the mesh.

    The mesh has one dimension, over which weights are sharded. With fewer `shard_ranks` than ranks it has two:
    groups of neighbouring ranks shard a copy of the weights, and each group has a copy.

    `rendezvous` is the same for all ranks and new for each start: the path of a file that does not exist yet for
    ranks of one host, or `tcp://ip:port` with an address of rank 0's host and a port that is free there.
    `device_type` is "cpu" (gloo) or "cuda" (`on_cuda`; each rank uses the first device that it sees). NCCL refuses
    two ranks on one device; `on_cuda="gloo"` carries them, slowly. The user's own interfaces
    (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`) and allocator settings stay as they are.
    """
    if device_type == "cuda":
        if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
            # rows of other lengths in each step would leave holes; torch reads this at its first allocation
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(0)
    store, interface = _open_store(rendezvous, rank, world_size)
    _ours.update(dict.fromkeys(set(INTERFACES) - (os.environ.keys() - _ours.keys()), interface))
    os.environ.update(_ours)
    if rank == 0:
        store.set("rank 0", "here")
    store.wait(["rank 0"], timedelta(seconds=JOIN_S))
    # gloo carries tensors offloaded to the host
    backend = f"cpu:gloo,cuda:{on_cuda}" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    if shard_ranks in (None, world_size):
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=("shard",))
    shape = (world_size // shard_ranks, shard_ranks)
    return init_device_mesh(device_type, shape, mesh_dim_names=("copy", "shard"))


def group_of(count: int) -> dist.ProcessGroup | None:
    """Make a gloo group of the first `count` ranks for a thread of its own; None on other ranks. Collective."""
    group = dist.new_group(range(count), backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    return group if isinstance(group, dist.ProcessGroup) else None


def leave_group() -> None:
    """Leave the group that `join_group` joined, and forget the interfaces that it chose."""
    dist.destroy_process_group()
    while _ours:
        del os.environ[_ours.popitem()[0]]


def share_record(record: Record | None, kind: type[Record], *, mesh: DeviceMesh) -> Record:
    """Return rank 0's `record`, of type `kind`, on every rank; other ranks pass None. Collective."""
    data = torch.frombuffer(bytearray(encode(record)), dtype=torch.uint8) if record is not None else torch.empty(0)
    length = torch.tensor(len(data))
    dist.broadcast(length, src=0)
    if record is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, src=0)
    return decode(kind, data.numpy().tobytes())


def _open_store(rendezvous: str, rank: int, world_size: int) -> tuple["dist.Store", str]:  # type: ignore[name-defined]
    """Open the key-value store by which ranks meet; returns it and the network interface towards other ranks."""
    address = urlsplit(rendezvous)
    if address.scheme != "tcp":
        return dist.FileStore(rendezvous, world_size), "lo"  # type: ignore[attr-defined]
    host, port = address.hostname, address.port
    assert host is not None, f"rendezvous {rendezvous} has no host"
    assert port is not None, f"rendezvous {rendezvous} has no port"
    listening = None
    if rank == 0:
        # Without this socket the store would listen on every interface. The store closes the socket with itself.
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
    """Return the name of the interface from which the route to a host leaves, e.g. `eth0`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outgoing:
        outgoing.connect((host, port))  # sends nothing
        local_address = outgoing.getsockname()[0]
    of_address = {entry.address: name for name, known in psutil.net_if_addrs().items() for entry in known}
    return of_address[local_address]


class Ranks:
    """Sums over the ranks of `mesh`, and the position of this rank; without a mesh it is the only one, on the CPU.

    With `context_parallel` above 1, so many neighbouring ranks share rows, as `context`.

    Sums and maxima are collectives: all ranks must call them, in the same order. `position` may be read on any
    thread. It counts the collectives of FSDP, too, since the process groups count them.
    """

    def __init__(self, mesh: DeviceMesh | None, *, context_parallel: int = 1) -> None:
        self.mesh = mesh
        self.device = torch.device(mesh.device_type if mesh else "cpu")
        self.context = join_context(context_parallel)
        groups: list[Any] = [dist.group.WORLD, *mesh.get_all_groups()] if mesh else []
        groups += [self.context.group] if self.context else []
        backends = [group._get_backend(self.device) for group in groups]
        self._backends = list({id(backend): backend for backend in backends}.values())
        self._activity = RankPosition("idle", STANDS_S, 0, 0)  # without its collectives

    def begin(self, activity: str, *, limit_s: float = STANDS_S) -> None:
        """Note that this rank begins an activity, e.g. "microbatch 3 of 8 of step 12".

        A rank that stays in it for more than `limit_s`, while other ranks wait in a collective, counts as hung.
        """
        self._activity = RankPosition(activity, limit_s, self._activity.num_activities + 1, 0)

    @property
    def position(self) -> RankPosition:
        """The present activity, and the number of collectives that this rank has entered."""
        entered = sum(backend._get_sequence_number_for_group() for backend in self._backends)
        return replace(self._activity, collectives=entered)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, 1 without a mesh."""
        return self.mesh.size() if self.mesh else 1

    @property
    def counts(self) -> bool:
        """True on the rank that counts the tokens of a row: the first of the ranks that share the row."""
        return self.context is None or self.context.place == 0

    @property
    def num_copies(self) -> int:
        """Number of ranks over `shard_ranks`: each group has a copy of the weights. 1 without a mesh."""
        return self.mesh.size(0) if self.mesh and self.mesh.ndim > 1 else 1

    def sum(self, value: float) -> float:
        """Return the sum of `value` over ranks."""
        return self._reduce_number(value, dist.ReduceOp.SUM)

    def max(self, value: float) -> float:
        """Return the largest `value` of any rank."""
        return self._reduce_number(value, dist.ReduceOp.MAX)

    def reduce_tensor(self, tensor: Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor by its sum over ranks, or by its maximum, in place."""
        if self.mesh:
            dist.all_reduce(tensor, op=how)

    def _reduce_number(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        """Return the sum or the maximum of `value` over ranks, in fp64."""
        if not self.mesh:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        self.reduce_tensor(tensor, how)
        return float(tensor)
