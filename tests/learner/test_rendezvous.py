"""Ranks of several hosts meet at an address of rank 0's, and listen nowhere else. Real processes."""

import socket
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from laminar_py.learner.distributed import INTERFACES, join_group, leave_group
from tests.learner.ranks import run_ranks


def own_addresses() -> list[str]:
    """Loopback, and the address of each interface that has one."""
    known = [entry for entries in psutil.net_if_addrs().values() for entry in entries]
    return sorted({entry.address for entry in known if entry.family is socket.AF_INET})


def rank_main(rank: int, ip: str, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    mesh = join_group(f"tcp://{ip}:{port}", rank=rank, world_size=2)
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=mesh.get_group())
    assert total.item() == 3
    listening = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening <= {ip}, listening
    (folder / str(rank)).touch()
    leave_group()


@pytest.mark.parametrize("ip", own_addresses())
def test_ranks_meet_at_an_address_and_listen_there_only(tmp_path, monkeypatch, ip):
    for variable in INTERFACES:  # a test before this one may have left it
        monkeypatch.delenv(variable, raising=False)
    with socket.create_server((ip, 0)) as listening:
        port = listening.getsockname()[1]
    run_ranks(rank_main, ip, port, tmp_path, world_size=2)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
